"""Real clients, unmodified, work with `python -m parallm.serve` on loopback.

The model is the embedded one with a chat template that knows tools. Each client is installed from PyPI, as it is
published, into an environment of its own, kept between runs, so the first run needs a network and takes minutes (2.7
GB); later ones need none. Its program in `programs/` runs there, without any network but this machine's own; a check is
one use of a client, and each of OpenAI's probes is one. TRL's client wants the package vllm, which it imports and does
not call, so an empty one stands in for it; its NCCL transfer of weights is not checked.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from bench.measurement import request_of_tests
from bench.processes import (
    clean_environment,
    cpu_torch,
    foreign_environment,
    last_json,
    python_with,
    run_program,
    running,
)

from tests.interop.clients.tool_model import write_tool_model
from tests.tasks.policy_files import write_policy
from tests.tasks.tiny_folders import read, write_folder

PROGRAMS = Path(__file__).parent / "programs"
TRANSFORMERS = "transformers==5.23.0"
SECONDS = 300.0
SETTINGS = ("tasks.pooling=mean", "jobs.enabled=true")
ENCODERS = {"rerank": "xlm_roberta_reranker", "classify": "modernbert_classifier"}
"""Folders of `tests/tasks/references`, by what they do."""
PROBLEMS = {
    "12 + 3 =": (" 15", " 16", " 51"),
    "Mia has 3 apples. Mia gets 4 more.": (" 7", " How many apples?", " 3 + 4 = 7"),
    "Tom": (" has 9 pens.", " loses 5."),
    "Tom has 9 pens. Tom loses 5. How many pens?": ("9 - 5 = 4", "4", "<|end|>"),
}
"""Contexts with continuations whose log-likelihoods are compared. lm-eval takes digits alone for a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    name: str
    program: str
    requirements: Sequence[str]
    needs_torch: bool = False
    is_of_tasks: bool = False
    """Whether it asks for vectors, ranks or labels."""

    def python(self, peers: Path) -> str:
        """Clients with the same requirements share a place."""
        place = peers / ("clients-" + self.requirements[0].split("==")[0].split("[")[0])
        return python_with(place, *([cpu_torch("2.13.0")] if self.needs_torch else []), self.requirements)


OPENAI = ("openai==3.54.0", "langchain-openai==1.7.3", "renderers==0.1.12", "atroposlib==0.4.0")
# LiteLLM imports mcp where functions are called, and does not require it
LITELLM = ("litellm==1.106.2", "mcp==2.3.0")
LM_EVAL = ("lm-eval[api]==0.4.13", TRANSFORMERS)
TRL = ("trl==1.16.0", "guidellm==0.8.1", TRANSFORMERS, "requests")
TASKS = ("cohere==7.3.1", "infinity-client==0.0.78", "huggingface_hub==2.4.0", "numpy")
TRITON = ("tritonclient[http]==2.73.0",)
MTEB = ("mteb==2.26.24", "sentence-transformers==6.2.0", TRANSFORMERS)
CLIENTS = (
    Client(name="openai", program="openai_probes.py", requirements=OPENAI, is_of_tasks=True),
    Client(name="litellm", program="litellm_calls.py", requirements=LITELLM, is_of_tasks=True),
    Client(name="langchain-openai", program="langchain_calls.py", requirements=OPENAI, is_of_tasks=True),
    Client(name="lm-eval", program="lm_eval_calls.py", requirements=LM_EVAL),
    Client(name="guidellm", program="guidellm_run.py", requirements=TRL, needs_torch=True),
    Client(name="trl", program="trl_calls.py", requirements=TRL, needs_torch=True),
    Client(name="renderers", program="renderers_calls.py", requirements=OPENAI),
    Client(name="cohere", program="cohere_calls.py", requirements=TASKS, is_of_tasks=True),
    Client(name="infinity-client", program="infinity_calls.py", requirements=TASKS, is_of_tasks=True),
    Client(name="huggingface_hub", program="huggingface_calls.py", requirements=TASKS, is_of_tasks=True),
    Client(name="tritonclient", program="kserve_calls.py", requirements=TRITON, is_of_tasks=True),
    Client(name="mteb", program="mteb_calls.py", requirements=MTEB, needs_torch=True, is_of_tasks=True),
    Client(name="atropos", program="atropos_calls.py", requirements=OPENAI),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    url: str
    model: Path
    problems: Path
    tasks: str
    """URLs of servers of encoders that rerank and classify, by what they do, as JSON."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    model, problems = folder / "model", folder / "problems.jsonl"
    write_tool_model(model)
    write_problems(model, problems)
    with ExitStack() as servers:
        policy_net = f"tasks.policies.agent={write_policy(folder / 'agent')}"
        words = [f"model.path={model}", *SETTINGS, policy_net]
        server = servers.enter_context(running("parallm.serve", words, folder))
        urls = {}
        for task, name in ENCODERS.items():
            (folder / task).mkdir()
            encoder = write_folder(read(name), folder / task / "model")
            words = [f"model.path={encoder}", "model.dtype=float32"]
            urls[task] = servers.enter_context(running("parallm.serve", words, folder / task)).url
        yield Served(url=server.url, model=model, problems=problems, tasks=json.dumps(urls))


@pytest.mark.interop
@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_all_checks_of_a_client_pass(
    client: Client, served: Served, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    python = client.python(request_of_tests().peers)
    words = [served.url, str(served.model), str(served.problems), served.tasks]
    found = ask(python, PROGRAMS / client.program, words, tmp_path)
    record_property("clients.passed", found["passed"])
    record_property("clients.total", found["total"])
    record_property("clients.failed", found["total"] - found["passed"])
    if client.is_of_tasks:
        record_property("tasks.clients_passed", int(found["passed"] == found["total"]))
    record_property("remark", f"{found['version']}: {found['passed']} of {found['total']}")
    assert found["failed"] == []
    assert found["passed"] == found["total"] > 0


def ask(python: str, program: Path, words: Sequence[str], folder: Path) -> dict[str, Any]:
    """The last line of a client's program. One that does not get to its end has one check, which failed."""
    lost = {"version": "?", "passed": 0, "total": 1}
    try:
        done = subprocess.run(
            [python, str(program), *words],
            env=foreign_environment(),
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        found = last_json(done.stdout)
    except subprocess.TimeoutExpired:
        return lost | {"failed": [f"not done after {SECONDS:.0f} s"]}
    except ValueError:
        return lost | {"failed": [f"ended with {done.returncode}: {done.stderr[-2000:]}"]}
    return {"failed": done.stdout.splitlines()[:-1] if found["passed"] < found["total"] else []} | found


def write_problems(model: Path, file: Path) -> None:
    """The problems with the log-likelihoods that mlx-lm computes from the same files, for lm-eval."""
    pairs = [(context, choice) for context, choices in PROBLEMS.items() for choice in choices]
    command = [sys.executable, str(PROGRAMS / "loglikelihoods.py"), str(model), json.dumps(pairs)]
    found = iter(last_json(run_program(command, clean_environment()))["found"])
    rows = [
        {"context": context, "choices": choices, "found": [next(found) for _ in choices]}
        for context, choices in PROBLEMS.items()
    ]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


CHECKS = """
import sys
sys.path.insert(0, {programs!r})
from checking import expect, report

def sums():
    expect(1 + 1 == 2)

def wonders():
    expect(1 + 1 == {value}, "of course")

report("pytest", [sums, wonders])
"""


@pytest.mark.parametrize(("value", "num_passed"), [(2, 2), (3, 1)])
def test_each_check_of_a_client_counts(value: int, num_passed: int, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(CHECKS.format(programs=str(PROGRAMS), value=value))
    found = ask(sys.executable, program, [], tmp_path)
    assert (found["passed"], found["total"]) == (num_passed, 2)
    assert found["failed"] == ([] if num_passed == 2 else ["wonders: AssertionError: of course"])


def test_a_program_that_crashes_is_a_check_that_failed(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("print('[]'); raise SystemExit('no such package')")
    found = ask(sys.executable, program, [], tmp_path)
    assert (found["passed"], found["total"]) == (0, 1)
    assert found["failed"] == ["ended with 1: no such package\n"]
