"""Word problems from a file, one question each: a taskset as the documentation of verifiers 0.4 has them."""

import json
import re
from collections.abc import Iterable
from pathlib import Path

import verifiers.v1 as vf

__all__ = ["WordSumsTaskset"]
ANSWER = re.compile(r"####\s*(-?\d+)\s*$")


class WordSumsData(vf.TaskData):
    answer: str


class WordSumsTask(vf.Task[WordSumsData]):
    @vf.stop
    async def single_turn(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 1

    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        found = ANSWER.search(trace.last_reply)
        return float(found is not None and found[1] == self.data.answer)


class WordSumsConfig(vf.TasksetConfig):
    path: str
    split: str = "train"


class WordSumsTaskset(vf.Taskset[WordSumsTask, WordSumsConfig]):
    def load(self) -> Iterable[WordSumsTask]:
        for line in (Path(self.config.path) / f"{self.config.split}.jsonl").read_text().splitlines():
            row = json.loads(line)
            yield WordSumsTask(WordSumsData(prompt=row["question"], answer=row["answer"]), self.config.task)
