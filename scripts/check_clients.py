"""Real clients, unmodified, against `python -m parallm.serve` on loopback: one table, and 1 if a check failed.

The model is the embedded one with a chat template that knows tools. Each client is installed from PyPI into an
environment of its own, kept between runs (`--peers`), so the first run needs a network and takes minutes; later ones
need none. What stands in for a part that cannot be installed is said in the table.
"""

import json
import os
import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from job import SCRIPTS, clean_environment, run_program
from peers import DEFAULT_FOLDER, plain_python, torch_python
from report import last_json, print_figures, print_table
from server_process import server_process
from tool_model import write_tool_model

TORCH = "2.13.0"
TRANSFORMERS = "transformers==5.23.0"
SECONDS = 300.0
PROBLEMS = {
    "12 + 3 =": (" 15", " 16", " 51"),
    "Mia has 3 apples. Mia gets 4 more.": (" 7", " How many apples?", " 3 + 4 = 7"),
    "Tom": (" has 9 pens.", " loses 5."),
    "Tom has 9 pens. Tom loses 5. How many pens?": ("9 - 5 = 4", "4", "<|end|>"),
}
"""Contexts and continuations whose log-likelihoods are compared.

lm-eval takes a context of digits alone for a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    name: str
    worker: str
    """Below scripts/workers."""
    requirements: Sequence[str]
    needs_torch: bool = False
    needs_problems: bool = False

    def python(self, folder: Path) -> str:
        """Raises subprocess.CalledProcessError if pip fails. Clients with the same requirements share a place."""
        place = "clients-" + self.requirements[0].split("==")[0].split("[")[0]
        if self.needs_torch:
            return torch_python(folder, place, TORCH, self.requirements)
        return plain_python(folder, place, self.requirements)


OPENAI = ("openai==3.54.0", "langchain-openai==1.7.3", "renderers==0.1.12", "atroposlib==0.4.0")
# LiteLLM imports mcp where functions are called, and does not require it
LITELLM = ("litellm==1.106.2", "mcp==2.3.0")
LM_EVAL = ("lm-eval[api]==0.4.13", TRANSFORMERS)
TRL = ("trl==1.16.0", "guidellm==0.8.1", TRANSFORMERS, "requests")
CLIENTS = (
    Client(name="openai", worker="openai_probes.py", requirements=OPENAI),
    Client(name="litellm", worker="clients/litellm_calls.py", requirements=LITELLM),
    Client(name="langchain-openai", worker="clients/langchain_calls.py", requirements=OPENAI),
    Client(name="lm-eval", worker="clients/lm_eval_calls.py", requirements=LM_EVAL, needs_problems=True),
    Client(name="guidellm", worker="clients/guidellm_run.py", requirements=TRL, needs_torch=True),
    Client(name="trl", worker="clients/trl_calls.py", requirements=TRL, needs_torch=True),
    Client(name="renderers", worker="clients/renderers_calls.py", requirements=OPENAI),
    Client(name="atropos", worker="clients/atropos_calls.py", requirements=OPENAI),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a client's worker found. One that did not get to its end has one check, which failed."""

    client: str
    version: str = "?"
    passed: int = 0
    total: int = 1
    failed: Sequence[str] = ()
    remark: str = ""

    @property
    def is_right(self) -> bool:
        return self.passed == self.total > 0


def main() -> int:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=[client.name for client in CLIENTS], help="these clients alone")
    parser.add_argument("--peers", type=Path, default=DEFAULT_FOLDER, help="where clients are installed")
    arguments = parser.parse_args()
    chosen = [client for client in CLIENTS if not arguments.only or client.name in arguments.only]
    pythons = [client.python(arguments.peers) for client in chosen]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, problems = folder / "model", folder / "problems.jsonl"
        write_tool_model(model)
        if any(client.needs_problems for client in chosen):
            write_problems(model, problems)
        with server_process("parallm.serve", [f"model.path={model}"], folder) as url:
            outcomes = [
                ask(client, python, [url, str(model), *([str(problems)] if client.needs_problems else [])], folder)
                for client, python in zip(chosen, pythons, strict=True)
            ]
    header = ("client", "version", "checks", "passed", "remarks")
    print_table("Clients against parallm.serve", [header, *map(row, outcomes)])
    for outcome in outcomes:
        for line in outcome.failed:
            print(f"{outcome.client}: {line}", file=sys.stderr)
    print_figures(figures_of(outcomes))
    return int(not all(outcome.is_right for outcome in outcomes))


def write_problems(model: Path, file: Path) -> None:
    """With the log-likelihoods that mlx-lm computes from the same files."""
    pairs = [(context, choice) for context, choices in PROBLEMS.items() for choice in choices]
    worker = SCRIPTS / "workers" / "loglikelihoods.py"
    output = run_program([sys.executable, str(worker), str(model), json.dumps(pairs)], clean_environment())
    found = iter(last_json(output)["found"])
    rows = [
        {"context": context, "choices": choices, "found": [next(found) for _ in choices]}
        for context, choices in PROBLEMS.items()
    ]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def ask(client: Client, python: str, words: Sequence[str], folder: Path) -> Outcome:
    """Run a client's worker to its end, without any network but this machine's own."""
    # not ours: a client must not find our packages; and what would be fetched from elsewhere is not
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    offline = {"HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false"}
    command = [python, str(SCRIPTS / "workers" / client.worker), *words]
    print(f"{client.name} ...", file=sys.stderr, flush=True)
    try:
        done = subprocess.run(
            command, env=kept | offline, cwd=folder, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return Outcome(client=client.name, failed=[f"not done after {SECONDS:.0f} s"])
    try:
        found = last_json(done.stdout)
        own_lines = done.stdout.splitlines()[:-1] if found["passed"] < found["total"] else []
        return Outcome(client=client.name, **({"failed": own_lines} | found))
    except (ValueError, KeyError):
        return Outcome(client=client.name, failed=[f"ended with {done.returncode}: {done.stderr[-2000:]}"])


def row(outcome: Outcome) -> tuple[str, ...]:
    remarks = [outcome.remark, "" if outcome.is_right else "FAILED, see below"]
    text = "; ".join(remark for remark in remarks if remark)
    return outcome.client, outcome.version, str(outcome.total), str(outcome.passed), text


def figures_of(outcomes: Sequence[Outcome]) -> dict[str, float | None]:
    """Of checks: each probe of OpenAI's client is one."""
    passed, total = (sum(getattr(outcome, name) for outcome in outcomes) for name in ("passed", "total"))
    return {"clients.passed": passed, "clients.total": total, "clients.failed": total - passed}


if __name__ == "__main__":
    sys.exit(main())
