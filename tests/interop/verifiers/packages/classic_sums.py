"""The word problems of `word_sums` as an environment of verifiers 0.3: its SingleTurnEnv, with a rubric."""

import json
import re
from pathlib import Path

import verifiers as vf
from datasets import Dataset

ANSWER = re.compile(r"####\s*(-?\d+)\s*$")


def load_environment(path: str) -> vf.Environment:
    rubric = vf.Rubric(funcs=[correct], weights=[1.0])
    return vf.SingleTurnEnv(dataset=rows(path, "train"), eval_dataset=rows(path, "test"), rubric=rubric)


def rows(path: str, split: str) -> Dataset:
    lines = (Path(path) / f"{split}.jsonl").read_text().splitlines()
    return Dataset.from_list([json.loads(line) for line in lines])


async def correct(completion: vf.Messages, answer: str) -> float:
    found = ANSWER.search(completion[-1]["content"])
    return float(found is not None and found[1] == answer)
