"""A run that trains and serves stands what strangers do to it, and its honest clients do not notice.

Twenty clients stream greedy answers while one policy trains and another learns from live traffic. First alone: that
tells what each prompt is answered and how late a token may be. Then beside hostile clients, hostile_clients.py:
2,100 half-open connections, texts of 4 MB, deep JSON, foreign pages, rewards and scales that no float32 holds, patterns
that never end, scoring functions that block. Every attack has the refusal that it must get.

No honest answer may be wrong, lost or more than 2 s later than alone; no row of metrics, no checkpoint and no version
may be lost; the process must live, and its memory and open files be what they were. In a second run, the control,
nobody attacks and the server itself does wrong (planted_harm.py): a false token, standing still for four
seconds, a row that is not written. Each must be seen.
"""

import asyncio
import json
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from bench.measurement import request_of_tests
from bench.processes import Server, clean_environment, last_json, running

from parallm.client import AsyncClient
from tests.robustness.servers import answers, prompts, random_archives, settled_megabytes

STREAMS = 20
PROGRAMS = Path(__file__).parent / "programs"
QUIET_SECONDS = 15.0
TIMEOUT = 60.0
MAX_TOKENS = 48
MAX_SECONDS = 900.0
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
    """The honest clients' view."""

    answers: int = 0
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    worst_seconds: float = 0.0
    """From a request to its first token, or between two of its tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Day:
    """One run as its clients see it."""

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
    """The account of the files that a run leaves."""

    steps: int
    rows_lost: int
    steps_skipped: int
    rolled_back: int
    checkpoints_failed: int


Record = Callable[[str, object], None]


@pytest.mark.robustness
def test_honest_clients_and_the_run_do_not_notice_a_hostile_day(tmp_path: Path, record_property: Record) -> None:
    archive = random_archives(tmp_path, 1)[0]
    (tmp_path / "hostile_functions.py").write_text(FUNCTIONS)
    with running("parallm.train", RUN, tmp_path) as server:
        day = asyncio.run(live_through(server, archive, sockets=request_of_tests().size(2100, 100)))
        is_alive = answers(server)
    files = left_in(tmp_path)
    figures = {
        "attacks": day.attacks,
        "not_refused": len(day.failures),
        "honest_answers": day.day.answers,
        "honest_wrong": len(day.day.wrong),
        "honest_lost": len(day.day.lost),
        "worst_delay_seconds": day.delay,
        "steps": files.steps,
        "rows_lost": files.rows_lost,
        "steps_skipped": files.steps_skipped,
        "versions_rolled_back": files.rolled_back,
        "checkpoints_failed": files.checkpoints_failed,
        "memory_growth_mb": day.growth_mb,
        "files_growth": day.files_growth,
        "alive": int(is_alive),
    }
    for name, value in figures.items():
        record_property(f"hostile.{name}", value)
    assert (day.day.wrong[:5], day.day.lost[:5]) == ([], [])
    assert request_of_tests().is_quick or list(day.failures) == []  # few sockets exhaust nothing
    assert (files.rows_lost, files.checkpoints_failed) == (0, 0)
    assert day.delay <= DELAY
    assert is_alive


@pytest.mark.robustness
def test_a_server_that_does_wrong_by_itself_is_seen(tmp_path: Path, record_property: Record) -> None:
    archive = random_archives(tmp_path, 1)[0]
    (tmp_path / "hostile_functions.py").write_text(FUNCTIONS)
    with running(str(PROGRAMS / "planted_harm.py"), RUN, tmp_path) as server:
        day = asyncio.run(live_through(server, archive, sockets=0))
    seen = [bool(day.day.wrong), day.delay > DELAY, left_in(tmp_path).rows_lost > 0]
    record_property("hostile.control_seen", sum(seen))
    assert seen == [True, True, True]


def lines_of(*steps: int) -> list[str]:
    return [json.dumps({"step": step}) for step in steps]


@pytest.mark.parametrize(
    ("rows", "sampled", "rows_lost"),
    [
        (lines_of(1, 2, 3, 4), lines_of(1, 1, 2, 3, 4), 0),
        (lines_of(1, 2, 4), lines_of(1, 2, 4), 1),
        (lines_of(1, 2, 3, 3), lines_of(1, 2, 3), 1),
        ([*lines_of(1, 2), "", *lines_of(3)], lines_of(1, 2, 3), 1),
        ([*lines_of(1, 2), '{"step": 3, "rew'], lines_of(1, 2, 3), 1),
        (lines_of(1, 2, 3, 4), lines_of(1, 2, 4), 1),
    ],
)
def test_rows_that_are_lost_are_counted(rows: list[str], sampled: list[str], rows_lost: int, tmp_path: Path) -> None:
    run = tmp_path / "checkpoints" / "hostile" / "time" / "math"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    (run / "samples.jsonl").write_text("\n".join(sampled) + "\n")
    (tmp_path / "run.log").write_text("rolled back from version 3\nthe checkpoint could not be saved\n")
    files = left_in(tmp_path)
    assert (files.rows_lost, files.rolled_back, files.checkpoints_failed) == (rows_lost, 1, 1)


async def live_through(server: Server, archive: bytes, *, sockets: int) -> Day:
    """A quiet time, then a day beside attacks; without sockets no one attacks.

    Raises httpx.HTTPError, RuntimeError.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=STREAMS)
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT, limits=limits, trust_env=False) as client:
        crowd = await Crowd.begin(client, archive)
        quiet = await crowd.stream_during(asyncio.sleep(QUIET_SECONDS))
        before, files = settled_megabytes(server), server.open_files() or 0
        outcome: dict[str, Any] = {"attacks": 0, "failures": []}
        if sockets:
            work = asyncio.create_task(attack(server, archive, sockets))
            day = await crowd.stream_during(asyncio.wait({work}))
            outcome = work.result()
        else:
            day = await crowd.stream_during(freeze(client))
        with suppress(httpx.HTTPError):
            await calm(server, files)
        return Day(
            quiet=quiet,
            day=day,
            attacks=outcome["attacks"],
            failures=outcome["failures"],
            growth_mb=megabytes(server) - before,
            files_growth=float((server.open_files() or 0) - files),
        )


class Crowd:
    """Honest clients, which all ask greedily: what was answered alone must be answered again."""

    def __init__(self, client: httpx.AsyncClient, alone: dict[tuple[str, str], list[int]]) -> None:
        self._client = client
        self._alone = alone

    @staticmethod
    async def begin(client: httpx.AsyncClient, archive: bytes) -> "Crowd":
        """Clients that know the answers given without any other request. Raises httpx.HTTPError."""
        parallm = AsyncClient("", http=client)
        card = await parallm.upload_adapter("poet", archive)
        await parallm.set_alias("kept", card.version, "poet")
        alone = {}
        for model in ("base", "poet@kept"):
            for prompt in prompts():
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


async def attack(server: Server, archive: bytes, sockets: int) -> dict[str, Any]:
    """The account of the hostile clients. Raises RuntimeError if they crash, TimeoutError."""
    file = server.log.with_name("poet.zip")
    file.write_bytes(archive)
    command = [sys.executable, str(PROGRAMS / "hostile_clients.py"), str(server.port), str(file), str(sockets)]
    process = await asyncio.create_subprocess_exec(*command, env=clean_environment(), stdout=asyncio.subprocess.PIPE)
    async with asyncio.timeout(MAX_SECONDS):
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
    """Wait until the connections of clients that have left are closed, at most half a minute."""
    ends = time.perf_counter() + SECONDS_TO_CALM
    while (server.open_files() or 0) > files and time.perf_counter() < ends:
        await asyncio.sleep(0.5)


def megabytes(server: Server) -> float:
    with suppress(httpx.HTTPError):
        return settled_megabytes(server)
    return server.resident_megabytes()


def left_in(folder: Path) -> Folder:
    """The account of the files of all policies, after the process has ended."""
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
