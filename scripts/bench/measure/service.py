"""What a view of a server costs at the terminal."""

import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from bench.compare import print_table
from bench.measurement import Bar, Figures, Request, measurement
from bench.processes import clean_environment, running


@measurement({"service.cli_ms": Bar(max=300), "service.cli_python_ms": Bar()}, minutes=0.5)
def command_line(request: Request) -> Figures:
    """`parallm list` from the start of its process to its end, beside a process that does nothing."""
    with TemporaryDirectory() as folder, running("parallm.serve", ["server.state=off"], Path(folder)) as server:
        commands = (["-m", "parallm", "list", "--host", server.url], ["-c", "pass"])
        rounds = [[milliseconds(words, folder) for words in commands] for _ in range(request.size(30, 4))]
    listing, python = (median(column) for column in zip(*rounds, strict=True))
    print_table("At the terminal, ms", [("parallm list", listing), ("python -c pass", python)])
    return {"service.cli_ms": listing, "service.cli_python_ms": python}


def milliseconds(words: list[str], folder: str) -> float:
    """Raises CalledProcessError for a command that fails."""
    began = time.perf_counter()
    subprocess.run([sys.executable, *words], cwd=folder, env=clean_environment(), capture_output=True, check=True)
    return 1e3 * (time.perf_counter() - began)
