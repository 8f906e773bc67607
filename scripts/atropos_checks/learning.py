"""Checks 3 and 4: does a policy learn from an environment, and do those of others run as they are."""

import ast
import asyncio
import json
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from clients import Traffic, stream_for
from job import SCRIPTS, clean_environment, run_program
from server_process import free_port

from atropos_checks.failures import greedy, started
from atropos_checks.stage import QUESTION, Bench, Finding, NotHere, Trainer, expect, trainer

TEMPLATE = SCRIPTS.parent / "recipes" / "atropos" / "words.py"
SAMPLES = 4
"""Of each problem, to tell what a model is worth."""
LEAST_GAIN = 0.1
LEARNING_RATE = 4e-4
"""With which 40 steps do not solve the template. What is solved gives no batches: all scores of a group are 1."""
IDLE_SECONDS, BUSY_SECONDS = 6.0, 15.0
CLIENTS = 2
MAX_TOKENS = 64
PATTERNS = (".*", ".+", "hello.*", ".*.txt", ".*.com", "a.*", ".*1.*", "yes")
"""What a small model learns to say to questions for a regular expression, right or wrong, in signs that it knows."""
NUM_TAUGHT = 320
"""Problems with their answers."""
BATCHES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """What became of a policy. Base and policy are sampled with seeds of their own, so equal ones differ by chance."""

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


def learning(bench: Bench) -> Finding:
    """The template environment, several seeds, beside runs with a learning rate of 0; the first also serves streams."""
    learned: list[Learned] = []
    controls: list[Learned] = []
    ratio, joined = 0.0, 1.0
    for seed in bench.seeds:
        for name, rate, found in (("learned", LEARNING_RATE, learned), ("control", 0.0, controls)):
            own = bench.of(f"{name}_{seed}")
            with trainer(own, overrides(own, seed, rate)) as one:
                one.wait_for_step(1)
                base = greedy(one, "base")
                if not ratio:
                    ratio = itl_ratio(one)
                one.wait_for_step(bench.steps, 900)
                expect(greedy(one, "base") == base, "the base answers otherwise than before")
                one.pause(on=True)  # a policy that stays what it is
                before, after = worth(one, "base", 2 * seed), worth(one, "policy", 2 * seed + 1)
                rows = one.rows()
            joined = min(joined, *(row["atropos/joined_fraction"] for row in rows))
            found.append(Learned(before=before, after=after, rewards=tuple(row["reward/mean"] for row in rows)))
    shown = f"rewards {told(learned)}, with a learning rate of 0 {told(controls)}"
    least = min(one.gain for one in learned)
    expect(least > max(*(one.gain for one in controls), LEAST_GAIN), shown)
    curves = {one.rewards[: bench.steps] for one in [*learned, *controls]}
    expect(len(curves) == 2 * len(bench.seeds), "two runs had the same rewards, step by step")
    steps = ", ".join(str(one.half_at) for one in learned)
    figures = {"reward_gain": least, "ledger_join_fraction": joined, "itl_p50_ratio": ratio}
    return Finding(remark=f"{shown}; half of it at step {steps}; between tokens {ratio:.2f} of idle", figures=figures)


def overrides(bench: Bench, seed: int, rate: float) -> list[str]:
    return [
        *started(bench, f"http://127.0.0.1:{free_port()}", "words"),
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
    """Those functions of the template, which is written for an interpreter with atroposlib."""
    tree = ast.parse(TEMPLATE.read_text())
    kept = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.Assign)
        or (isinstance(node, ast.Import) and node.names[0].name == "re")
    ]
    known: dict[str, Any] = {}
    exec(compile(ast.Module(body=kept, type_ignores=[]), str(TEMPLATE), "exec"), known)
    return known


def told(runs: Sequence[Learned]) -> str:
    return ", ".join(f"{one.before:.2f} to {one.after:.2f}" for one in runs)


def itl_ratio(one: Trainer) -> float:
    """The median time between two tokens of streams while the run trains, over that while it is paused."""
    one.pause(on=True)
    streams(one, IDLE_SECONDS)  # what the environment may have under way ends meanwhile
    idle = streams(one, IDLE_SECONDS)
    one.pause(on=False)
    busy = streams(one, BUSY_SECONDS)
    expect(not idle.errors and not busy.errors, busy.errors[:1])
    return median(busy.gaps) / median(idle.gaps)


def streams(one: Trainer, seconds: float) -> Traffic:
    return asyncio.run(stream_for(one.url, [QUESTION], clients=CLIENTS, seconds=seconds, max_tokens=48))


def real_environments(bench: Bench) -> Finding:
    """gsm8k_server.py and regex_env.py, unmodified; and gsm8k_server.py with the flags of its README."""
    if not (bench.model and bench.data and bench.environments):
        raise NotHere("needs --model, --data and --environments")
    adapter = taught(bench)
    remarks, joined = [], 1.0
    for name, script, folder in (
        ("gsm8k", Path(bench.environments) / "gsm8k_server.py", dataset(bench)),
        ("regex", Path("regex_env.py"), Path(bench.environments) / "community" / "regex_generation"),
    ):
        own = bench.of(name)
        with trainer(own, [*foreign(own, name, script, folder), f"model.adapter={adapter}"]) as one:
            one.wait_for_step(BATCHES + 1, 400)
            one.wait_for_message(f"the environment {name} has ended by itself", 60)
            rows = one.rows()
        joined = min(joined, *(row["atropos/joined_fraction"] for row in rows))
        expect(joined == 1, f"{name}: joined {joined:.0%}")
        remarks.append(f"{name} {len(rows)} batches, then ended with 0")
    remarks.append(readme_flags(bench.of("flags"), dataset(bench.of("flags_data"))))
    return Finding(remark="; ".join(remarks), figures={"ledger_join_fraction": joined})


def foreign(bench: Bench, name: str, script: Path, folder: Path, arguments: str = "") -> list[str]:
    """A run with an environment of others, which ends by itself after some batches."""
    words = f"script: '{script}', folder: '{folder}', env: {{total_steps: {BATCHES}}}{arguments}"
    return [
        *started(bench, f"http://127.0.0.1:{free_port()}"),
        f"rollout.atropos.start.environments={{{name}: {{{words}, variables: {{HF_HUB_OFFLINE: '1'}}}}}}",
        f"model.path={bench.model}",
        "rollout.group_size=8",
        "rollout.max_tokens=200",
        "rollout.atropos.max_token_len=768",
        "learner.learning_rate=1e-4",
    ]


def readme_flags(bench: Bench, folder: Path) -> str:
    """What the README says leads gsm8k_server.py to other ports; that is told."""
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
    script = Path(str(bench.environments)) / "gsm8k_server.py"
    with trainer(bench, foreign(bench, "gsm8k", script, folder, f", arguments: [{listed}]")) as one:
        one.wait_for_message("9004", 60)
        expect(one.step() == 0, "the control: the flags were honoured")
    return "ignored --openai.base_url explained"


def dataset(bench: Bench) -> Path:
    """A folder in which `load_dataset("gsm8k", "main")` finds GSM8K without a network."""
    place = bench.folder / "data" / "gsm8k"
    (place / "main").mkdir(parents=True)
    for split in ("train", "test"):
        shutil.copy(Path(str(bench.data)) / f"{split}.jsonl", place / "main")
    files = "".join(f"  - {{split: {split}, path: main/{split}.jsonl}}\n" for split in ("train", "test"))
    (place / "README.md").write_text(f"---\nconfigs:\n- config_name: main\n  data_files:\n{files}---\n")
    return place.parent


def taught(bench: Bench) -> Path:
    """An adapter with which the model answers in the forms that both environments can read."""
    file, run = bench.folder / "demonstrations.jsonl", bench.folder / "taught"
    lines = (Path(str(bench.data)) / "train.jsonl").read_text().splitlines()
    rows = [in_latex(json.loads(line)) for line in lines[:NUM_TAUGHT]] + regex_rows(Path(str(bench.environments)))
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    command = [
        sys.executable,
        "-m",
        "parallm.train",
        "learner=sft",
        f"learner.data={file}",
        f"model.path={bench.model}",
    ]
    settings = [
        "learner.learning_rate=1e-3",
        "learner.warmup_steps=0",
        "rollout.problems_per_step=8",
        "trainer.steps=45",
    ]
    rest = ["trainer.evaluate_problems=0", "server=off", "metrics.display=lines", "name=taught", f"hydra.run.dir={run}"]
    run_program([*command, *settings, *rest], clean_environment(), bench.folder)
    return run / "adapter"


def in_latex(row: dict[str, str]) -> dict[str, object]:
    """A problem with its solution, which ends in one of the forms that gsm8k_server.py reads."""
    steps, _, answer = row["answer"].partition("#### ")
    completion = f"{re.sub('<<.*?>>', '', steps)}The answer is ${answer}$"
    return {"messages": [{"role": "user", "content": row["question"]}], "completion": completion}


def regex_rows(environments: Path) -> list[dict[str, object]]:
    """The environment's own questions, each with several patterns."""
    code = (environments / "community" / "regex_generation" / "regex_problems.py").read_text()
    known: dict[str, list[dict[str, object]]] = {}
    exec(code, known)  # data of the environment that is about to run
    rows = []
    for number, problem in enumerate(known["PROBLEMS"]):
        shown = [f"Description: {problem['description']}", "", "Strings that SHOULD match:"]
        shown += [f"  - {text!r}" for text in problem["positive"]] + ["", "Strings that should NOT match:"]  # type: ignore[attr-defined]
        shown += [f"  - {text!r}" for text in problem["negative"]]  # type: ignore[attr-defined]
        for turn in range(2):
            answer = f"This is the pattern: <answer>{PATTERNS[(number + 3 * turn) % len(PATTERNS)]}</answer>"
            rows.append({"messages": [{"role": "user", "content": "\n".join(shown)}], "completion": answer})
    return rows
