"""From the start of a process to its first finished update on a GPU: with empty caches on disk, and with full ones."""

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.measurement import Bar, Figures, Request, measurement
from bench.problems import environment_overrides
from bench.processes import clean_environment, metrics, work

SECONDS_TO_FIRST_STEP, SECONDS_BETWEEN_LOOKS = 300.0, 0.02


@measurement(
    {
        "gpu.first_step_seconds": Bar(max=15, needs="model gpu"),
        "gpu.first_step_seconds_warm": Bar(max=8, needs="model gpu"),
    },
    minutes=1,
    needs="gpu",
    is_quick_anywhere=True,
)
def first_step(request: Request) -> Figures:
    """64 problems x 16 with default settings."""
    job = ["+recipe=gsm8k_grpo", f"model.path={request.model}", *environment_overrides(request.data, 7473)]
    job += [f"rollout.problems_per_step={request.size(64, 2)}", f"rollout.group_size={request.size(16, 4)}"]
    return cold_and_warm("gpu.first_step_seconds", job)


@measurement(
    {
        "gpu.8b.first_step_seconds": Bar(max=40, needs="gpu"),
        "gpu.8b.first_step_seconds_warm": Bar(max=25, needs="gpu"),
    },
    minutes=2,
    needs="gpu",
    is_quick_anywhere=True,
)
def first_step_of_8b(request: Request) -> Figures:
    """8 problems x 8 of 64 tokens; random weights, read from files that were just written."""
    with TemporaryDirectory() as folder:
        work("random_folder", shape="tiny" if request.is_quick else "8b", folder=folder)
        job = [f"model.path={folder}", "environment=custom", "environment.target=bench.problems:Lottery"]
        job += ["rollout.problems_per_step=8", "rollout.group_size=8", "rollout.max_tokens=64"]
        return cold_and_warm("gpu.8b.first_step_seconds", [*job, "rollout.refill_rounds=0"])


def cold_and_warm(figure: str, job: Sequence[str]) -> Figures:
    with TemporaryDirectory() as cache:
        return {name: seconds_to_first_step(job, Path(cache)) for name in (figure, f"{figure}_warm")}


def seconds_to_first_step(job: Sequence[str], cache: Path) -> float:
    """Of a run that is killed then. Raises RuntimeError if there is no first step."""
    variables = clean_environment() | {"XDG_CACHE_HOME": str(cache), "CUDA_CACHE_PATH": str(cache / "cuda")}
    variables.pop("MLX_PTX_CACHE_DIR", None)  # below XDG_CACHE_HOME by default
    with TemporaryDirectory() as name:
        run, log = Path(name) / "run", Path(name) / "log"
        own = ["trainer.steps=100", "trainer.evaluate_problems=0", "server=off", "name=bench", f"hydra.run.dir={run}"]
        command = [sys.executable, "-m", "parallm.train", *job, *own, "metrics.display=off"]
        began = time.monotonic()
        with log.open("wb") as output:
            process = subprocess.Popen(command, env=variables, cwd=name, stdout=output, stderr=output)
        try:
            while not ((run / "metrics.jsonl").exists() and metrics(run)):
                seconds = time.monotonic() - began
                if process.poll() is not None or seconds > SECONDS_TO_FIRST_STEP:
                    raise RuntimeError(f"no first step in {seconds:.0f} s:\n{log.read_text()[-2000:]}")
                time.sleep(SECONDS_BETWEEN_LOOKS)
            return time.monotonic() - began
        finally:
            process.kill()
            process.wait()
