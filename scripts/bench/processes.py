"""Processes that are measured: workers, servers, and the environments of other people's programs.

Every measurement runs in a process of its own, since a BLAS can be chosen only once per process and before MLX is
loaded. The process of the command and of the tests here never measures anything itself.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import venv
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from threading import Timer
from typing import Any

import httpx

from parallm.device.blas import load_blas
from parallm.device.settings import DeviceSettings
from parallm.metrics.json_lines import read_rows

SCRIPTS = Path(__file__).parents[1]
ROOT = SCRIPTS.parent
NANO = ROOT / "parallm" / "model" / "nano"
PEER = {"MLX_BFS_MAX_WIDTH": "20", "MLX_ENABLE_TF32": "1"}
"""Our BLAS loading changes these variables of MLX; other people's code runs with MLX's own defaults."""
SECONDS_TO_START, SECONDS_TO_STOP = 120.0, 60.0
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def clean_environment() -> dict[str, str]:
    """Our environment without the user's configuration file and what loading a BLAS has set, with our packages."""
    kept = {key: value for key, value in os.environ.items() if key not in {"MKL_CBWR", *PEER}}
    paths = [str(ROOT), str(SCRIPTS), *kept.get("PYTHONPATH", "").split(os.pathsep)]
    return kept | {
        "PARALLM_CONFIG": "off",
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(path for path in paths if path)),
    }


def foreign_environment() -> dict[str, str]:
    """For a program that must not find our packages, and is not to fetch anything."""
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    offline = {"HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false"}
    return kept | offline


def run_program(
    command: Sequence[str],
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    given: str | None = None,
) -> str:
    """Run a program, whose standard input is `given`, to its end and return what it printed. Raises RuntimeError with
    its last words if it fails."""
    own = environment or clean_environment()
    done = subprocess.run(command, capture_output=True, text=True, env=own, cwd=folder, input=given, check=False)
    if done.returncode != 0:
        words = done.stdout[-2000:] + done.stderr[-4000:]
        raise RuntimeError(f"{' '.join(command[:4])} ended with {done.returncode}:\n{words}")
    return done.stdout


def last_json(output: str) -> dict[str, Any]:
    """The last line of a program's output, parsed. Raises ValueError if it is not a JSON object."""
    lines = [line for line in output.splitlines() if line.strip()]
    last = json.loads(lines[-1]) if lines else None
    if not isinstance(last, dict):
        raise ValueError(f"expected a JSON object as the last line, found {lines[-1:]!r}")
    return last


def worker_command(name: str, keywords: Mapping[str, Any], python: str = sys.executable) -> list[str]:
    return [python, "-m", "bench.worker", name, json.dumps(keywords)]


def work(
    name: str,
    *,
    is_peer: bool = False,
    python: str = sys.executable,
    environment: Mapping[str, str] | None = None,
    **keywords: Any,
) -> dict[str, Any]:
    """The result of a worker, whose main takes these keywords. Raises RuntimeError with its errors.

    `is_peer`: it runs other people's code, under MLX's own settings.
    """
    variables = clean_environment() | (PEER if is_peer else {}) | (environment or {})
    return last_json(run_program(worker_command(name, keywords, python), variables))


def work_in_parts(
    name: str,
    *,
    is_peer: bool,
    limit: float = 3600,
    python: str = sys.executable,
    environment: Mapping[str, str] | None = None,
    **keywords: Any,
) -> Iterator[dict[str, Any]]:
    """The results of a worker that yields one a part, as they come, with the seconds that each took. It is killed after
    `limit` seconds, and when nobody wants more."""
    variables = clean_environment() | (PEER if is_peer else {}) | (environment or {})
    command = worker_command(name, keywords, python)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables) as process:
        clock = Timer(limit, process.kill)
        clock.start()
        began = time.monotonic()
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line.startswith('{"'):  # a peer prints dicts of Python, too
                    now = time.monotonic()
                    yield json.loads(line) | {"took": round(now - began, 1)}
                    began = now
        except BaseException:
            process.kill()
            raise
        finally:
            clock.cancel()
    if process.returncode != 0:
        print(f"  {name} ended with {process.returncode}", file=sys.stderr, flush=True)


def blas_name() -> str:
    """The library that multiplies matrices in our workers. Harmless: this process computes nothing."""
    report = load_blas(DeviceSettings())
    return f"{report.name}, strict" if report.strict else report.name


# training ------------------------------------------------------------------------------------------------------------


def train(run: Path, *overrides: str, python: str = sys.executable, paths: Sequence[Path] = ()) -> None:
    """Run `parallm.train` to its end in the run folder `run`. Raises RuntimeError with its last words if it fails."""
    variables = clean_environment()
    variables["PYTHONPATH"] = os.pathsep.join([variables["PYTHONPATH"], *map(str, paths)])
    quiet = ("server=off", "metrics.display=off", "name=bench", f"hydra.run.dir={run}")
    run.parent.mkdir(parents=True, exist_ok=True)
    run_program([python, "-m", "parallm.train", *quiet, *overrides], variables, run.parent)


def metrics(run: Path) -> list[dict[str, Any]]:
    """One row a step."""
    return read_rows(run / "metrics.jsonl")


def evaluations(run: Path) -> list[dict[str, Any]]:
    return read_rows(run / "evaluations.jsonl")


# servers -------------------------------------------------------------------------------------------------------------


class Server:
    """A command of ours that serves HTTP on a port of its own: started, killed and started again in one folder."""

    def __init__(
        self, program: str, overrides: Sequence[str], folder: Path, variables: Mapping[str, str] | None = None
    ) -> None:
        """`program` is a module or a file; `variables` are set beside ours."""
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / f"{Path(program).name}.log"
        name = [program] if program.endswith(".py") else ["-m", program]
        self._command = [sys.executable, *name, f"server.port={port}", "metrics.display=lines", *overrides]
        self._variables = variables or {}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "spawned before"
        return self._process

    def spawn(self) -> None:
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                self._command,
                cwd=self.log.parent,
                env=clean_environment() | self._variables,
                stdout=output,
                stderr=output,
            )

    def wait(self) -> None:
        """Return when it answers. Raises RuntimeError if it ends or takes too long."""
        deadline = time.monotonic() + SECONDS_TO_START
        while time.monotonic() < deadline:
            self.check_alive()
            try:
                if httpx.get(f"{self.url}/health", trust_env=False).status_code == httpx.codes.OK:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        raise RuntimeError(f"{self.url} did not answer within {SECONDS_TO_START:.0f} s:\n{self.log_tail()}")

    def check_alive(self) -> None:
        if self.process.poll() is not None:
            raise RuntimeError(f"{self.log.stem} ended with {self.process.returncode}:\n{self.log_tail()}")

    def wait_to_end(self, seconds: float) -> None:
        """Raises RuntimeError unless it ends by itself and well."""
        if code := self.process.wait(seconds):
            raise RuntimeError(f"{self.log.stem} ended with {code}:\n{self.log_tail()}")

    def log_tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]

    def kill(self) -> None:
        """End it as a power cut would."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """Ask it to end, then make it."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(SECONDS_TO_STOP)
            except subprocess.TimeoutExpired:
                self.kill()

    def open_files(self) -> int | None:
        """None where the system does not tell."""
        folder = Path(f"/proc/{self.process.pid}/fd")
        return len(list(folder.iterdir())) if folder.is_dir() else None

    def resident_megabytes(self) -> float:
        command = ["ps", "-o", "rss=", "-p", str(self.process.pid)]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) / 1024


@contextmanager
def running(
    program: str, overrides: Sequence[str], folder: Path, variables: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """A server from its first answer to its end. Raises RuntimeError if it ends by itself."""
    server = Server(program, overrides, folder, variables)
    server.spawn()
    try:
        server.wait()
        yield server
        server.check_alive()
    finally:
        server.stop()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


# environments of peers -----------------------------------------------------------------------------------------------


def python_with(place: Path, *installs: Sequence[str]) -> str:
    """The interpreter of the venv at `place`, made on first use with one `pip install` for each of `installs`.

    Raises subprocess.CalledProcessError if pip fails.
    """
    python, stamp = place / "bin" / "python", place / "installed"
    requirements = [word for words in installs for word in words]
    if stamp.exists() and stamp.read_text().split() == requirements:
        return str(python)
    print(f"installing {' '.join(requirements)} into {place} (minutes the first time)", file=sys.stderr)
    venv.create(place, with_pip=True, clear=True)  # a half-made one of an earlier call is in the way
    for words in installs:
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *words]
        subprocess.run(pip, check=True, stdout=sys.stderr)
    stamp.write_text("\n".join(requirements))
    return str(python)


def our_mlx() -> list[str]:
    """Requirements of the versions of MLX and mlx-lm that we have."""
    build = "" if sys.platform == "darwin" else "[cpu]"
    return [f"mlx{build}=={metadata.version('mlx')}", f"mlx-lm=={metadata.version('mlx-lm')}"]


def cpu_torch(version: str) -> list[str]:
    """Requirement of torch without a GPU: PyPI's build for Linux would bring gigabytes of CUDA along."""
    if sys.platform == "darwin":
        return [f"torch=={version}"]
    return [f"torch=={version}+cpu", f"--extra-index-url={TORCH_CPU_INDEX}"]
