"""A hostile day: does a run that trains and serves stand what strangers do, and do its honest clients notice?

Twenty clients stream greedy answers while one policy trains and another learns from live traffic. First alone: that
tells what each prompt is answered and how late a token may be. Then beside hostile clients, workers/hostile_clients.py:
2,100 half-open connections, texts of 4 MB, deep JSON, foreign pages, rewards and scales that no float32 holds, patterns
that never end, scoring functions that block. Every attack has the refusal that it must get.

No honest answer may be wrong, lost or more than 2 s later than alone; no row of metrics, no checkpoint and no version
may be lost; the process must live, and its memory and open files be what they were. In a second run, the control,
nobody attacks and the server itself does wrong (workers/planted_harm.py): a false token, standing still for four
seconds, a row that is not written. Each must be seen.
"""

import asyncio
import json
import random
import re
import sys
import time
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
from check_server import made_archives, prompts_of
from job import SCRIPTS, base_job, blas_name, clean_environment
from report import last_json, print_figures, print_table
from server_fuzz import settled_megabytes
from server_process import Server, running_server

from parallm.client import AsyncClient

STREAMS = 20
SOCKETS = 2100
QUIET_SECONDS = 15.0
TIMEOUT = 60.0
MAX_TOKENS = 48
MOST_SECONDS = 900.0
SECONDS_TO_CALM = 30.0
DELAY = 2.0
CONTROL_STEPS = 6
ROLLED_BACK = re.compile(r"rolled back from version")
NOT_SAVED = re.compile(r"could not be saved")
FUNCTIONS = """
import time

def blocks(answered):
    time.sleep(3600)

def scores(answered):
    return 1.0
"""
LIVE = (
    "{source: live, live: {wait_seconds: 1, scoring_functions: "
    "{blocks: 'hostile_functions:blocks', scores: 'hostile_functions:scores'}}}"
)
RUN = (
    "name=hostile",
    f"policies={{math: {{}}, live: {{rollout: {LIVE}, trainer: {{max_off_policy_steps: 1000}}}}}}",
    "rollout.problems_per_step=4",
    "rollout.group_size=4",
    "rollout.max_tokens=32",
    "rollout.score_seconds=5",
    "rollout.max_idle_steps=100000",
    "learner.learning_rate=1e-6",
    "trainer.steps=100000",
    "trainer.evaluate_problems=0",
    "trainer.guard.on_divergence=warn",
    "checkpoint.every=5",
    "engine.max_context=1024",
)


@dataclass(slots=True)
class Honest:
    """What the honest clients have seen."""

    answers: int = 0
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    worst_seconds: float = 0.0
    """From a request to its first token, or between two of its tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Day:
    """What one run was like."""

    quiet: Honest
    day: Honest
    attacks: int
    failures: Sequence[str]
    growth_mb: float
    files_growth: float

    @property
    def delay(self) -> float:
        return max(0.0, self.day.worst_seconds - self.quiet.worst_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """What a run has left on the disk."""

    steps: int
    rows_lost: int
    steps_skipped: int
    rolled_back: int
    checkpoints_failed: int


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--blas", default="auto", help="auto, mkl, openblas or reference (default: %(default)s)")
    parser.add_argument("--sockets", type=int, default=SOCKETS, help="half-open ones (default: %(default)s)")
    parser.add_argument("--skip", nargs="*", default=[], help="names of attacks in workers/hostile_clients.py")
    parser.add_argument("--only", choices=("attacks", "control"), help="default: both")
    arguments = parser.parse_args()
    arguments.model, arguments.data = "nano", None
    figures: dict[str, float | None] = {}
    if arguments.only != "control":
        figures |= attacks(arguments)
    if arguments.only != "attacks":
        figures["hostile.control_seen"] = control(arguments)
    print_figures(figures, device=blas_name(base_job(arguments)))


def attacks(arguments: Namespace) -> dict[str, float | None]:
    with TemporaryDirectory() as name:
        day, is_alive = run(arguments, Path(name), "parallm.train", is_attacked=True)
        left = left_in(Path(name))
    show(day, left, is_alive=is_alive)
    return {
        "hostile.attacks": float(day.attacks),
        "hostile.not_refused": float(len(day.failures)),
        "hostile.honest_answers": float(day.day.answers),
        "hostile.honest_wrong": float(len(day.day.wrong)),
        "hostile.honest_lost": float(len(day.day.lost)),
        "hostile.worst_delay_seconds": day.delay,
        "hostile.steps": float(left.steps),
        "hostile.rows_lost": float(left.rows_lost),
        "hostile.steps_skipped": float(left.steps_skipped),
        "hostile.versions_rolled_back": float(left.rolled_back),
        "hostile.checkpoints_failed": float(left.checkpoints_failed),
        "hostile.memory_growth_mb": day.growth_mb,
        "hostile.files_growth": day.files_growth,
        "hostile.alive": float(is_alive),
    }


def control(arguments: Namespace) -> float:
    """How many of three planted harms are seen."""
    with TemporaryDirectory() as name:
        day, _ = run(arguments, Path(name), str(SCRIPTS / "workers" / "planted_harm.py"), is_attacked=False)
        left = left_in(Path(name))
    seen = [bool(day.day.wrong), day.delay > DELAY, left.rows_lost > 0]
    print(f"  control: {len(day.day.wrong)} wrong answers, {day.delay:.1f} s late, {left.rows_lost} rows lost")
    return float(sum(seen))


def run(arguments: Namespace, folder: Path, program: str, *, is_attacked: bool) -> tuple[Day, bool]:
    """Whether the server lived to its end comes second."""
    archive = folder / "poet.zip"
    archive.write_bytes(made_archives(arguments, folder, 1)[0])
    (folder / "hostile_functions.py").write_text(FUNCTIONS)
    day: Day | None = None
    is_alive = False
    try:
        with running_server(program, [*RUN, f"device.blas={arguments.blas}"], folder) as server:
            day = asyncio.run(live_through(arguments, server, archive, is_attacked=is_attacked))
            is_alive = is_healthy(server)
    except RuntimeError as error:  # it has ended by itself
        print(error, file=sys.stderr)
        is_alive = False
    if day is None:
        raise RuntimeError("the run ended before the day was over")
    return day, is_alive


async def live_through(arguments: Namespace, server: Server, archive: Path, *, is_attacked: bool) -> Day:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=STREAMS)
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT, limits=limits, trust_env=False) as client:
        crowd = await Crowd.begin(client, archive.read_bytes())
        quiet = await crowd.stream_during(asyncio.sleep(QUIET_SECONDS))
        before, files = settled_megabytes(server), server.open_files() or 0
        told: dict[str, Any] = {"attacks": 0, "failures": []}
        if is_attacked:
            work = asyncio.create_task(attack(arguments, server, archive))
            day = await crowd.stream_during(asyncio.wait({work}))
            told = work.result()
        else:
            day = await crowd.stream_during(freeze(client))
        with suppress(httpx.HTTPError):
            await calm(server, files)
        return Day(
            quiet=quiet,
            day=day,
            attacks=told["attacks"],
            failures=told["failures"],
            growth_mb=megabytes(server) - before,
            files_growth=float((server.open_files() or 0) - files),
        )


class Crowd:
    """Honest clients. All ask greedily, so that what was answered alone must be answered again."""

    def __init__(self, client: httpx.AsyncClient, alone: dict[tuple[str, str], list[int]]) -> None:
        self._client = client
        self._alone = alone

    @staticmethod
    async def begin(client: httpx.AsyncClient, archive: bytes) -> "Crowd":
        """With the answers that are given when nobody else asks. Raises httpx.HTTPError."""
        parallm = AsyncClient("", http=client)
        card = await parallm.upload_adapter("poet", archive)
        await parallm.set_alias("kept", card.version, "poet")
        alone = {}
        for model in ("base", "poet@kept"):
            for prompt in prompts_of(0):
                answer = await client.post("/v1/completions", json=body_of(model, prompt))
                answer.raise_for_status()
                alone[model, prompt] = answer.json()["choices"][0]["token_ids"]
        return Crowd(client, alone)

    async def stream_during(self, work: Any) -> Honest:
        """Stream until `work` is done and each client has its answer."""
        seen, is_over = Honest(), asyncio.Event()

        async def one_client(place: int) -> None:
            source = random.Random(place)
            while not is_over.is_set():
                await self._ask(*source.choice(list(self._alone)), seen)

        clients = asyncio.gather(*(one_client(place) for place in range(STREAMS)))
        await work
        is_over.set()
        await clients
        return seen

    async def _ask(self, model: str, prompt: str, seen: Honest) -> None:
        tokens: list[int] = []
        last = time.perf_counter()
        try:
            sent = body_of(model, prompt) | {"stream": True}
            async with self._client.stream("POST", "/v1/completions", json=sent) as response:
                if response.status_code != 200:
                    raise ValueError(f"{response.status_code}: {(await response.aread())[:200]!r}")
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        event = json.loads(line.removeprefix("data: "))
                        tokens += [token for choice in event["choices"] for token in choice.get("token_ids") or ()]
                        now = time.perf_counter()
                        seen.worst_seconds, last = max(seen.worst_seconds, now - last), now
        except (httpx.HTTPError, ValueError, KeyError) as error:
            seen.worst_seconds = max(seen.worst_seconds, time.perf_counter() - last)
            seen.lost.append(f"{type(error).__name__}: {error}")
            await asyncio.sleep(0.5)
            return
        seen.answers += 1
        if tokens != self._alone[model, prompt]:
            seen.wrong.append(f"{model} {prompt[-20:]!r}: {tokens}, alone {self._alone[model, prompt]}")


def body_of(model: str, prompt: str) -> dict[str, Any]:
    return {"model": model, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "return_token_ids": True}


async def attack(arguments: Namespace, server: Server, archive: Path) -> dict[str, Any]:
    """What the hostile clients tell at their end. Raises RuntimeError if they crash, TimeoutError."""
    command = [
        sys.executable, str(SCRIPTS / "workers" / "hostile_clients.py"), server.url.rpartition(":")[2], str(archive),
        str(arguments.sockets), *arguments.skip,
    ]  # fmt: skip
    process = await asyncio.create_subprocess_exec(*command, env=clean_environment(), stdout=asyncio.subprocess.PIPE)
    async with asyncio.timeout(MOST_SECONDS):
        output, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"the hostile clients ended with {process.returncode}")
    return last_json(output.decode())


async def freeze(client: httpx.AsyncClient) -> None:
    """Let the server of the control do its wrong, and train long enough to lose a row."""
    await asyncio.sleep(QUIET_SECONDS / 2)
    await client.post("/tokenize", json={"prompt": "freeze"})
    parallm = AsyncClient("", http=client)
    while (await parallm.training_status()).policies["math"].step < CONTROL_STEPS:
        await asyncio.sleep(0.2)


async def calm(server: Server, files: int) -> None:
    """Until connections of those who have left are closed, at most half a minute."""
    ends = time.perf_counter() + SECONDS_TO_CALM
    while (server.open_files() or 0) > files and time.perf_counter() < ends:
        await asyncio.sleep(0.5)


def megabytes(server: Server) -> float:
    with suppress(httpx.HTTPError):
        return settled_megabytes(server)
    return server.resident_megabytes()


def is_healthy(server: Server) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(f"{server.url}/ready", timeout=TIMEOUT, trust_env=False).status_code == 200
    return False


def left_in(folder: Path) -> Folder:
    """What the files of all policies say, once the process has ended."""
    files = sorted(folder.glob("checkpoints/**/metrics.jsonl"))
    rows = {file: [read_row(line) for line in file.read_text().splitlines()] for file in files}
    logs = "".join(path.read_text(errors="replace") for path in folder.rglob("*.log"))
    last = [own[-1] for own in rows.values() if own and own[-1]]
    return Folder(
        steps=sum(len(own) for own in rows.values()),
        rows_lost=sum(lost(own, file.with_name("samples.jsonl")) for file, own in rows.items()),
        steps_skipped=round(sum(row.get("guard/skipped", 0) for row in last)),
        rolled_back=len(ROLLED_BACK.findall(logs)),
        checkpoints_failed=len(NOT_SAVED.findall(logs)),
    )


def lost(rows: Sequence[dict[str, Any]], samples: Path) -> int:
    """Lines that are none, steps that are not there or twice, and steps without a sample."""
    steps = Counter(row["step"] for row in rows if row)
    missing = max(steps, default=0) - min(steps, default=1) + 1 - len(steps)
    sampled = {row["step"] for row in map(read_row, samples.read_text().splitlines()) if row}
    return rows.count({}) + missing + steps.total() - len(steps) + len(set(steps) - sampled)


def read_row(line: str) -> dict[str, Any]:
    """Empty for what is no row."""
    with suppress(ValueError):
        return dict(json.loads(line))
    return {}


def show(day: Day, left: Folder, *, is_alive: bool) -> None:
    rows = [("", "answers", "wrong", "lost", "worst seconds")]
    for name, honest in (("alone", day.quiet), ("attacked", day.day)):
        counts = (honest.answers, len(honest.wrong), len(honest.lost))
        rows.append((name, *map(str, counts), f"{honest.worst_seconds:.2f}"))
    print_table(f"{STREAMS} honest streams", rows)
    print(f"  {left}")
    print(f"  memory grown by {day.growth_mb:.0f} MB, open files by {day.files_growth:.0f}")
    print(f"  the process {'lives' if is_alive else 'DOES NOT LIVE'}; {len(day.failures)} attacks were not refused")
    for line in (*day.day.wrong[:5], *day.day.lost[:5]):
        print(f"  {line[:300]}", file=sys.stderr)


if __name__ == "__main__":
    main()
