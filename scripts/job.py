"""What a measuring script asks of one of its worker processes, and how it gets the answer.

Every measurement runs in a process of its own: a BLAS can be chosen only once per process and before MLX is loaded.
"""

import json
import os
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from report import last_json

from parallm.device.blas import load_blas
from parallm.device.settings import DeviceSettings

SCRIPTS = Path(__file__).parent
MLX_DEFAULT_BFS_WIDTH = "20"
"""Our BLAS loading changes this environment variable of MLX; peers run with MLX's own default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One measurement. Workers read the fields that concern them."""

    model: str = "nano"
    shape: str | None = None
    """Of random weights, in place of the model; see shapes.py."""
    data: str | None = None
    """Folder with train.jsonl in GSM8K's form; None: the arithmetic problems."""
    dtype: str = "auto"
    """model.dtype."""
    quantized: str = "auto"
    """model.quantized."""
    blas: str = "auto"
    strict: bool = True
    prompts: int = 16
    group_size: int = 8
    max_tokens: int = 160
    rows: int = 128
    """Completions that decode together."""
    prompts_at_once: int = 8
    """That BatchGenerator computes together."""
    tokens: int = 10_000
    repeats: int = 3
    lora: bool = False
    draft: str | None = None
    """A small model that drafts for the other."""
    ignore_eos: bool = False
    seed: int = 0
    trajectories: str | None = None
    """File of trajectories to read, or to write."""
    steps: int = 20
    """Of a training run."""
    ahead: int = 0
    """trainer.max_off_policy_steps."""
    switches: bool = False
    """rollout.switch_in_flight."""
    samples: bool = False
    """A learner samples for itself, so that a whole step is measured, instead of using the trajectories' tokens."""
    kv_cache_bytes: int | None = None
    kv_bits: int | None = None
    """engine.kv_bits."""
    compiles: bool = False
    """Decode steps are compiled, as they are with MLX's CUDA build."""

    @property
    def device(self) -> DeviceSettings:
        return DeviceSettings(blas=self.blas, blas_strict=self.strict)  # type: ignore[arg-type]  # pydantic checks it


def read_job(text: str) -> Job:
    return Job(**json.loads(text))


def add_model_options(parser: ArgumentParser) -> None:
    parser.add_argument("--model", default="nano", help="nano, a local folder or a hub id (default: %(default)s)")
    parser.add_argument("--data", help="folder with train.jsonl in GSM8K's form (default: arithmetic problems)")
    parser.add_argument("--blas", default="auto", help="auto, mkl, openblas or reference (default: %(default)s)")


def base_job(arguments: Namespace) -> Job:
    data = None if arguments.data is None else absolute(arguments.data)
    return Job(model=absolute(arguments.model), data=data, blas=arguments.blas)


def run_worker(
    name: str,
    job: Job,
    *,
    peer: bool = False,
    python: str = sys.executable,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run `workers/NAME.py` with a fresh BLAS and return what it prints last.

    `peer` workers run other people's code under MLX's own settings. Raises RuntimeError with the worker's errors.
    """
    variables = worker_environment(peer=peer) | (environment or {})
    worker = SCRIPTS / "naive_grpo.py" if name == "naive_grpo" else SCRIPTS / "workers" / f"{name}.py"
    return last_json(
        run_program([python, str(SCRIPTS / "with_blas.py"), str(worker), json.dumps(asdict(job))], variables)
    )


def run_worker_parts(name: str, job: str, *, peer: bool) -> list[dict[str, Any]]:
    """The same with a worker that prints a line of JSON for each part of `job`. Raises RuntimeError if it crashes."""
    command = [sys.executable, str(SCRIPTS / "with_blas.py"), str(SCRIPTS / "workers" / f"{name}.py"), job]
    output = run_program(command, worker_environment(peer=peer))
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def worker_environment(*, peer: bool) -> dict[str, str]:
    return clean_environment() | ({"MLX_BFS_MAX_WIDTH": MLX_DEFAULT_BFS_WIDTH} if peer else {})


def run_program(command: list[str], environment: Mapping[str, str] | None = None, folder: Path | None = None) -> str:
    """Run a program to its end and return what it printed. Raises RuntimeError with its last words if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, check=False)
    if done.returncode != 0:
        words = done.stdout[-2000:] + done.stderr[-4000:]
        raise RuntimeError(f"{' '.join(command[:4])} ended with {done.returncode}:\n{words}")
    return done.stdout


def clean_environment() -> dict[str, str]:
    """Our environment without what loading a BLAS has set, and with our package wherever the program starts."""
    kept = {key: value for key, value in os.environ.items() if key not in {"MKL_CBWR", "MLX_BFS_MAX_WIDTH"}}
    paths = [str(SCRIPTS.parent), *kept.get("PYTHONPATH", "").split(os.pathsep)]
    return kept | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def blas_name(job: Job) -> str:
    """What multiplies matrices in our workers. Harmless here: measuring scripts never load MLX themselves."""
    report = load_blas(job.device)
    return f"{report.name}, strict" if report.strict else report.name


def absolute(model_or_folder: str) -> str:
    """A local folder as an absolute path; `nano` and hub ids as they are."""
    path = Path(model_or_folder).expanduser()
    return str(path.resolve()) if path.exists() else model_or_folder
