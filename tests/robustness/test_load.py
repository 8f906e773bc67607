"""A server stands two hundred clients at once that stream, wait, leave and are aborted, while adapters are swapped.

Nothing may be lost, every finished greedy answer must be what its prompt and version gave when nothing else ran, and in
the end nothing may be held. A BLAS that is not strict may compute a row otherwise in company, so that near ties count
as wrong.
"""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from bench.measurement import request_of_tests
from bench.processes import running

from parallm.client import ApiError, AsyncClient
from tests.robustness.servers import held, kv_share, prompts, random_archives

TIMEOUT = 300.0
MAX_TOKENS = 48
NAME = "poet"
PINNED = 3
"""Versions that stay, since an alias names them: one for each archive."""
SECONDS_BETWEEN_SWAPS = 1.0
MIN_DISTINCT = 0.5
"""Share of the answers given alone."""
PATH = "/v1/completions"

Tokens = tuple[int, ...]


@pytest.mark.robustness
def test_no_request_is_lost_and_no_answer_is_mixed_up(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    request = request_of_tests()
    clients, seconds = request.size(200, 20), request.size(300, 12)
    archives = random_archives(tmp_path, PINNED, request.model)
    settings = ("name=load", "engine.max_context=512", "server.adapters_root=.", f"model.path={request.model}")
    with running("parallm.serve", settings, tmp_path) as server:
        work = load_for(server.url, prompts(), archives, clients=clients, seconds=seconds)
        tally, adapters = asyncio.run(work)
        leaked, share = held(server), kv_share(server)
    record_property("load.clients", clients)
    record_property("load.requests", tally.ends.total() + len(tally.lost))
    record_property("load.checked", tally.checked)
    record_property("load.lost", len(tally.lost))
    record_property("load.wrong", len(tally.wrong))
    record_property("load.leaked_slots", leaked)
    record_property("load.leaked_kv_share", share)
    record_property("remark", f"{adapters.uploads} uploads, {adapters.unloads} unloads, {len(tally.versions)} versions")
    assert (tally.lost[:5], tally.wrong[:5], leaked, share) == ([], [], 0, 0)
    assert tally.checked


@dataclass(slots=True)
class Adapters:
    """The adapters uploaded so far, and what each said alone."""

    weights: dict[str, int] = field(default_factory=lambda: {"base": -1})
    """Version (`poet@7`) -> place of its archive."""
    alone: dict[tuple[int, str], Tokens] = field(default_factory=dict)
    """Place of the archive and prompt -> tokens of a greedy answer."""
    uploads: int = 0
    unloads: int = 0


@dataclass(slots=True)
class Tally:
    """What all clients together have seen."""

    ends: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    """Requests that no client ended and that were not answered whole."""
    wrong: list[str] = field(default_factory=list)
    """Answers that are not those of their own prompt and version."""
    checked: int = 0
    versions: set[str] = field(default_factory=set)


@dataclass(slots=True)
class Answer:
    """One choice as it comes, whole or in pieces."""

    model: str = ""
    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    spans: int = 0


async def record_alone(client: httpx.AsyncClient, prompts: Sequence[str], archives: Sequence[bytes]) -> Adapters:
    """Upload each archive once and ask for each prompt, one after the other. Raises httpx.HTTPError, ValueError."""
    adapters = Adapters()
    parallm = AsyncClient("", http=client)
    for place, archive in enumerate(archives):
        await upload(parallm, adapters, place, archive)
        # versions come faster than answers on a busy machine: only an alias keeps one beyond the newest few
        await parallm.set_alias(f"archive{place}", place + 1, NAME)
    for model, place in dict(adapters.weights).items():
        for prompt in prompts:
            answer = await client.post(PATH, json=body_of(model, prompt, MAX_TOKENS))
            answer.raise_for_status()
            adapters.alone[place, prompt] = tuple(answer.json()["choices"][0]["token_ids"])
    if share_of_distinct(adapters) < MIN_DISTINCT:
        raise ValueError("most prompts and versions give the same answers: what is mixed up would not be seen")
    return adapters


def share_of_distinct(adapters: Adapters) -> float:
    return len(set(adapters.alone.values())) / len(adapters.alone)


async def load_for(
    url: str, prompts: Sequence[str], archives: Sequence[bytes], *, clients: int, seconds: float
) -> tuple[Tally, Adapters]:
    """Keep `clients` requests under way for `seconds`, then let them end."""
    tally = Tally()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=clients)
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT, limits=limits, trust_env=False) as client:
        adapters = await record_alone(client, prompts, archives)
        ends = time.perf_counter() + seconds
        swapping = asyncio.create_task(
            swap_until(ends, AsyncClient("", http=client), adapters, archives, random.Random(0))
        )

        async def one_client(place: int) -> None:
            source, turn = random.Random(place), 0
            while time.perf_counter() < ends:
                turn += 1
                visitor = Visitor(client, adapters, tally, source, f"client-{place}-{turn}")
                await visitor.ask(source.choice(prompts))

        await asyncio.gather(*(one_client(place) for place in range(clients)))
        await swapping
    return tally, adapters


class Visitor:
    """One request: greedy and checked or sampled, streamed or whole, to its end, left or aborted."""

    def __init__(
        self, client: httpx.AsyncClient, adapters: Adapters, tally: Tally, source: random.Random, name: str
    ) -> None:
        self._client = client
        self._adapters = adapters
        self._tally = tally
        self._source = source
        self._name = name

    async def ask(self, prompt: str) -> None:
        source = self._source
        pinned = list(self._adapters.weights)[: PINNED + 1]
        model = source.choice([*pinned, NAME, NAME])
        body = body_of(model, prompt, source.randint(1, MAX_TOKENS)) | {"request_id": self._name}
        is_greedy = source.random() < 0.75
        if not is_greedy:
            body |= {"temperature": 1.0, "n": 2, "seed": source.randrange(1000)}
        body["stream"] = source.random() < 0.5
        manner = source.choices(("to the end", "left", "aborted"), (7, 2, 2))[0]
        try:
            if manner == "left":
                await self._leave(body)
                return
            aborting = asyncio.create_task(self._abort()) if manner == "aborted" else None
            answers = await self._answers(body)
            if aborting is not None:
                await aborting
        except (httpx.HTTPError, ApiError, ValueError, KeyError) as error:
            self._tally.lost.append(f"{self._name} ({manner}, {body}): {type(error).__name__}: {error}")
            return
        self._judge(prompt, body, answers, is_greedy=is_greedy, may_be_cut=manner == "aborted")

    async def _leave(self, body: Mapping[str, Any]) -> None:
        try:
            await asyncio.wait_for(self._answers(body), self._source.uniform(0.0, 0.5))
            self._tally.ends["answered before the client left"] += 1
        except TimeoutError:
            self._tally.ends["client left"] += 1

    async def _abort(self) -> None:
        await asyncio.sleep(self._source.uniform(0.0, 1.0))
        await AsyncClient("", http=self._client).cancel(self._name)

    async def _answers(self, body: Mapping[str, Any]) -> list[Answer]:
        """Raises httpx.HTTPError, ValueError, KeyError for answers that are refused, broken or cut off."""
        answers = [Answer() for _ in range(body["n"])]
        if not body["stream"]:
            response = await self._client.post(PATH, json=body)
            if response.status_code != 200:
                raise ValueError(f"HTTP {response.status_code}: {response.text[:200]}")
            take(answers, response.json(), self._name)
            return answers
        is_done = False
        async with self._client.stream("POST", PATH, json=body) as response:
            if response.status_code != 200:
                raise ValueError(f"HTTP {response.status_code}: {(await response.aread())[:200]!r}")
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    is_done = True
                elif line:
                    take(answers, json.loads(line.removeprefix("data: ")), self._name)
        if not is_done:
            raise ValueError("the stream ended without [DONE]")
        return answers

    def _judge(
        self, prompt: str, body: Mapping[str, Any], answers: Sequence[Answer], *, is_greedy: bool, may_be_cut: bool
    ) -> None:
        for answer in answers:
            if answer.finish not in (("length", "stop", "abort") if may_be_cut else ("length", "stop")):
                self._tally.lost.append(f"{self._name}: ended with {answer.finish}")
                return
            self._tally.ends[str(answer.finish)] += 1
        if not is_greedy:
            return
        (answer,) = answers
        if answer.finish == "abort" and not answer.tokens:
            return  # it still waited
        self._tally.checked += 1
        self._tally.versions.add(answer.model)
        place = self._adapters.weights.get(answer.model)
        alone = None if place is None else self._adapters.alone[place, prompt]
        wanted = alone and alone[: len(answer.tokens) if answer.finish == "abort" else body["max_tokens"]]
        asked = body["model"]
        if tuple(answer.tokens) != wanted or (asked != NAME and answer.model != asked) or answer.spans > 1:
            self._tally.wrong.append(
                f"{self._name} asked {asked}, answered by {answer.model} in {answer.spans} spans, {answer.finish}: "
                f"{prompt!r} gave {answer.tokens}, alone {wanted}"
            )


async def swap_until(
    ends: float, parallm: AsyncClient, adapters: Adapters, archives: Sequence[bytes], source: random.Random
) -> None:
    """Upload the next version, let the name mean another one, and unload one that may be in use. Raises HTTPError."""
    while time.perf_counter() < ends:
        version = await upload(parallm, adapters, place := source.randrange(len(archives)), archives[place])
        await asyncio.sleep(SECONDS_BETWEEN_SWAPS)
        target = source.randint(1, PINNED)
        await parallm.promote(target, NAME)
        await asyncio.sleep(SECONDS_BETWEEN_SWAPS)
        if source.random() < 0.8:
            await parallm.unload_adapter(version)
            adapters.unloads += 1


async def upload(parallm: AsyncClient, adapters: Adapters, place: int, archive: bytes) -> str:
    # known before it is served: a client may be faster than the answer to the upload
    following = f"{NAME}@{adapters.uploads + 1}"
    adapters.weights[following] = place
    adapters.uploads += 1
    card = await parallm.upload_adapter(NAME, archive)
    if f"{card.name}@{card.version}" != following:
        raise ValueError(f"expected {following}, the upload became {card.name}@{card.version}")
    return following


def body_of(model: str, prompt: str, max_tokens: int) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "n": 1,
        "return_token_ids": True,
        "stream": False,
    }


def take(answers: Sequence[Answer], told: Mapping[str, Any], name: str) -> None:
    """Add one response or one event. Raises ValueError for an error or an answer to another request."""
    if "error" in told:
        raise ValueError(f"error: {told['error']}")
    if told.get("request_id", name) != name:
        raise ValueError(f"the answer is to {told['request_id']}")
    for choice in told["choices"]:
        answer = answers[choice["index"]]
        answer.model = told["model"]
        answer.tokens += choice.get("token_ids") or []
        answer.finish = choice.get("finish_reason") or answer.finish
        answer.spans = len(choice.get("weight_versions") or ()) or answer.spans
