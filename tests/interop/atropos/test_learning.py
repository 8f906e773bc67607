"""A policy learns from an environment, and environments of others run as they are."""

import ast
import asyncio
import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest
from bench.clients import Traffic, stream_for
from bench.measurement import request_of_tests
from bench.processes import ROOT, free_port, train

from tests.interop.atropos.stage import QUESTION, Stage, Trainer, expect, greedy, started, trainer

TEMPLATE = ROOT / "recipes" / "atropos" / "words.py"
SAMPLES = 4
"""Samples of each problem that measure a model."""
MIN_GAIN = 0.1
LEARNING_RATE = 4e-4
"""A rate with which 40 steps do not solve the template. A problem that is solved gives no batches: all scores are 1."""
IDLE_SECONDS, BUSY_SECONDS = 6.0, 15.0
CLIENTS = 2
MAX_TOKENS = 64
PATTERNS = (".*", ".+", "hello.*", ".*.txt", ".*.com", "a.*", ".*1.*", "yes")
"""Answers for a small model to questions for a regular expression, right or wrong, in signs that it knows."""
NUM_TAUGHT = 320
"""Problems with their answers."""
BATCHES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """The rewards of base and policy, sampled with seeds of their own, so that equal ones differ by chance."""

    before: float
    after: float
    rewards: tuple[float, ...]
    """Mean of each step's batch."""

    @property
    def gain(self) -> float:
        return self.after - self.before

    @property
    def half_at(self) -> int | None:
        """The first step whose batch had half of the gain."""
        half = self.before + self.gain / 2
        return next((step for step, reward in enumerate(self.rewards, 1) if reward >= half), None)


@pytest.mark.interop
def test_a_policy_learns_from_the_template_on_all_seeds(
    stage: Stage, record_property: Callable[[str, object], None]
) -> None:
    """Beside runs with a learning rate of 0; the first run also serves streams."""
    seeds, steps = range(request_of_tests().size(3, 1)), request_of_tests().size(40, 16)
    learned: list[Learned] = []
    controls: list[Learned] = []
    ratio, joined = 0.0, 1.0
    for seed in seeds:
        for name, rate, runs in (("learned", LEARNING_RATE, learned), ("control", 0.0, controls)):
            own = stage.of(f"{name}_{seed}")
            with trainer(own, overrides(own, seed, rate)) as one:
                one.wait_for_step(1)
                base = greedy(one, "base")
                if not ratio:
                    ratio = itl_ratio(one)
                one.wait_for_step(steps, 900)
                expect(greedy(one, "base") == base, "the base answers otherwise than before")
                one.pause(on=True)  # a policy that stays what it is
                before, after = worth(one, "base", 2 * seed), worth(one, "policy", 2 * seed + 1)
                rows = one.rows()
            joined = min(joined, *(row["atropos/joined_fraction"] for row in rows))
            runs.append(Learned(before=before, after=after, rewards=tuple(row["reward/mean"] for row in rows)))
    gain = min(one.gain for one in learned)
    record_property("atropos.reward_gain", gain)
    record_property("atropos.ledger_join_fraction", joined)
    record_property("atropos.itl_p50_ratio", ratio)
    rewards = f"rewards {listed(learned)}, with a learning rate of 0 {listed(controls)}"
    record_property("remark", f"{rewards}; half of it at step {', '.join(str(one.half_at) for one in learned)}")
    expect(gain > max(*(one.gain for one in controls), MIN_GAIN), rewards)
    curves = {one.rewards[:steps] for one in [*learned, *controls]}
    expect(len(curves) == 2 * len(seeds), "two runs had the same rewards, step by step")


def overrides(stage: Stage, seed: int, rate: float) -> list[str]:
    return [
        *started(stage, f"http://127.0.0.1:{free_port()}", "words"),
        f"seed={seed}",
        f"learner.learning_rate={rate}",
        "rollout.problems_per_step=4",
        "rollout.group_size=8",
        f"rollout.max_tokens={MAX_TOKENS}",
    ]


def worth(one: Trainer, model: str, seed: int) -> float:
    """The mean reward of what a model samples to the problems of the template.

    Each problem has a seed of its own: with one for all, their samples would rise and fall together.
    """
    words = problems_and_score()
    rewards = []
    for number, (question, answer) in enumerate(words["problems"]()):
        body = {"model": model, "messages": [{"role": "user", "content": question}], "n": SAMPLES}
        sampling = {"max_tokens": MAX_TOKENS, "temperature": 1.0, "seed": 1000 * seed + number}
        reply = one.http.post("/v1/chat/completions", json=body | sampling)
        reply.raise_for_status()
        rewards += [words["score"](choice["message"]["content"], answer) for choice in reply.json()["choices"]]
    return fmean(rewards)


def problems_and_score() -> dict[str, Any]:
    """These functions of the template, which is written for an interpreter with atroposlib."""
    tree = ast.parse(TEMPLATE.read_text())
    kept: list[ast.stmt] = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.Assign)
        or (isinstance(node, ast.Import) and node.names[0].name == "re")
    ]
    names: dict[str, Any] = {}
    exec(compile(ast.Module(body=kept, type_ignores=[]), str(TEMPLATE), "exec"), names)
    return names


def listed(runs: Sequence[Learned]) -> str:
    return ", ".join(f"{one.before:.2f} to {one.after:.2f}" for one in runs)


def itl_ratio(one: Trainer) -> float:
    """The median time between two tokens of streams while the run trains, over that while it is paused."""
    one.pause(on=True)
    streams(one, IDLE_SECONDS)  # requests of the environment under way end meanwhile
    idle = streams(one, IDLE_SECONDS)
    one.pause(on=False)
    busy = streams(one, BUSY_SECONDS)
    expect(not idle.errors and not busy.errors, busy.errors[:1])
    return median(busy.gaps) / median(idle.gaps)


def streams(one: Trainer, seconds: float) -> Traffic:
    return asyncio.run(stream_for(one.url, [QUESTION], clients=CLIENTS, seconds=seconds, max_tokens=48))


@pytest.mark.interop
def test_environments_of_others_run_as_they_are(stage: Stage, record_property: Callable[[str, object], None]) -> None:
    """gsm8k_server.py and regex_env.py, unmodified; and gsm8k_server.py with the flags of its README."""
    theirs, adapter, joined = environments(), taught(stage), 1.0
    for name, script, folder in (
        ("gsm8k", theirs / "gsm8k_server.py", dataset(stage)),
        ("regex", Path("regex_env.py"), theirs / "community" / "regex_generation"),
    ):
        own = stage.of(name)
        with trainer(own, [*foreign(own, name, script, folder), f"model.adapter={adapter}"]) as one:
            one.wait_for_step(BATCHES + 1, 400)
            one.wait_for_message(f"the environment {name} has ended by itself", 60)
            rows = one.rows()
        joined = min(joined, *(row["atropos/joined_fraction"] for row in rows))
        expect(joined == 1, f"{name}: joined {joined:.0%}")
    readme_flags(stage.of("flags"), dataset(stage.of("flags_data")))
    record_property("atropos.ledger_join_fraction", joined)


def environments() -> Path:
    """The folder `environments` of a clone of Atropos. Skips the test without it, a model and data."""
    request = request_of_tests()
    found = (one / "environments" for one in request.environments)
    folder = next((one for one in found if (one / "gsm8k_server.py").exists()), None)
    if folder is None or not request.has_model:
        pytest.skip("needs a model that solves some of GSM8K, its data, and a clone of Atropos")
    return folder


def foreign(stage: Stage, name: str, script: Path, folder: Path, arguments: str = "") -> list[str]:
    """A run with an environment of others, which ends by itself after some batches."""
    words = f"script: '{script}', folder: '{folder}', env: {{total_steps: {BATCHES}}}{arguments}"
    return [
        *started(stage, f"http://127.0.0.1:{free_port()}"),
        f"rollout.atropos.start.environments={{{name}: {{{words}, variables: {{HF_HUB_OFFLINE: '1'}}}}}}",
        f"model.path={request_of_tests().model}",
        "rollout.group_size=8",
        "rollout.max_tokens=200",
        "rollout.atropos.max_token_len=768",
        "learner.learning_rate=1e-4",
    ]


def readme_flags(stage: Stage, folder: Path) -> None:
    """The flags of the README lead gsm8k_server.py to another server, and the status says so."""
    flags = {
        "env.rollout_server_url": "{api}",
        "env.tokenizer_name": "{tokenizer}",
        "env.use_wandb": "false",
        "env.steps_per_eval": "0",
        "openai.base_url": "{server}/v1",
        "openai.model_name": "policy",
        "openai.tokenizer_name": "{tokenizer}",
        "openai.server_type": "vllm",
        "slurm": "false",
    }
    listed = ", ".join(["serve", *(f"--{name}, '{value}'" for name, value in flags.items())])
    script = environments() / "gsm8k_server.py"
    with trainer(stage, foreign(stage, "gsm8k", script, folder, f", arguments: [{listed}]")) as one:
        one.wait_for_message("it asks another server", 60)
        expect(one.step() == 0, "the control: the flags were honoured")


def dataset(stage: Stage) -> Path:
    """A folder in which `load_dataset("gsm8k", "main")` finds GSM8K without a network."""
    place = stage.folder / "data" / "gsm8k"
    (place / "main").mkdir(parents=True)
    for split in ("train", "test"):
        shutil.copy(Path(str(request_of_tests().data)) / f"{split}.jsonl", place / "main")
    files = "".join(f"  - {{split: {split}, path: main/{split}.jsonl}}\n" for split in ("train", "test"))
    (place / "README.md").write_text(f"---\nconfigs:\n- config_name: main\n  data_files:\n{files}---\n")
    return place.parent


def taught(stage: Stage) -> Path:
    """An adapter with which the model answers in the forms that both environments can read."""
    file, run = stage.folder / "demonstrations.jsonl", stage.folder / "taught"
    lines = (Path(str(request_of_tests().data)) / "train.jsonl").read_text().splitlines()
    rows = [in_latex(json.loads(line)) for line in lines[:NUM_TAUGHT]] + regex_rows(environments())
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    train(
        run,
        *("learner=sft", f"learner.data={file}", f"model.path={request_of_tests().model}", "learner.warmup_steps=0"),
        *("learner.learning_rate=1e-3", "rollout.problems_per_step=8", "trainer.steps=45"),
        "trainer.evaluate_problems=0",
    )
    return run / "adapter"


def in_latex(row: dict[str, str]) -> dict[str, object]:
    """A problem with its solution, which ends in one of the forms that gsm8k_server.py reads."""
    steps, _, answer = row["answer"].partition("#### ")
    completion = f"{re.sub('<<.*?>>', '', steps)}The answer is ${answer}$"
    return {"messages": [{"role": "user", "content": row["question"]}], "completion": completion}


def regex_rows(environments: Path) -> list[dict[str, object]]:
    """The environment's own questions, each with several patterns."""
    code = (environments / "community" / "regex_generation" / "regex_problems.py").read_text()
    names: dict[str, list[dict[str, Any]]] = {}
    exec(code, names)  # data of the environment that is about to run
    rows: list[dict[str, object]] = []
    for number, problem in enumerate(names["PROBLEMS"]):
        shown = [f"Description: {problem['description']}", "", "Strings that SHOULD match:"]
        shown += [f"  - {text!r}" for text in problem["positive"]] + ["", "Strings that should NOT match:"]
        shown += [f"  - {text!r}" for text in problem["negative"]]
        for turn in range(2):
            answer = f"This is the pattern: <answer>{PATTERNS[(number + 3 * turn) % len(PATTERNS)]}</answer>"
            rows.append({"messages": [{"role": "user", "content": "\n".join(shown)}], "completion": answer})
    return rows
