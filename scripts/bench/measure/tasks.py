"""Speed of vectors beside sentence-transformers, and what a bulk index costs clients and training.

Both sides make vectors (the mean of hidden states, of length 1) of the same texts with the same weights, from text to
vector. sentence-transformers sorts texts by length itself; the number of rows in a batch is the one that was fastest.
"""

import asyncio
import json
import os
import random
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import httpx
import numpy as np
from tokenizers import Tokenizer

from bench.clients import Traffic, stream_for
from bench.compare import described, in_turns, print_table, ratio
from bench.measure.serving import (
    CLIENTS,
    MAX_TOKENS,
    NUM_QUESTIONS,
    per_minute,
    streams,
    wait_for_first_step,
    watched_steps,
)
from bench.measurement import Bar, Figures, Request, measurement
from bench.problems import environment_overrides, questions
from bench.processes import NANO, cpu_torch, python_with, running, work
from parallm.device.settings import DeviceSettings

SENTENCE_TRANSFORMERS = "sentence-transformers==6.2.0"
TORCH = "2.13.0"
WORDS = "what is the sum of seven apples and two trains how many minutes until 12 or 345 people leave for half price"
SHORTEST, LONGEST = 10, 200
BATCHES = (32, 8, 16, 64, 128)
NUM_INDEXES, TEXTS_A_REQUEST = 2, 64
CONTROL_SHARE = 0.02
Result = TypeVar("Result")


@measurement(
    {
        "tasks.cpu.vs_sentence_transformers": Bar(min=3, needs="model"),
        "tasks.cpu.vs_sentence_transformers_bfloat16": Bar(),
        "tasks.cpu.products_vs_sentence_transformers": Bar(),
        "tasks.cpu.vector_error": Bar(max=1e-4),
    },
    minutes=20,
)
def vectors_cpu(request: Request) -> Figures:
    """10,000 texts of 10 to 200 tokens, a quarter of them in each round.

    Both in float32, and sentence-transformers in bfloat16. Products: as fast as the matrix products alone would be,
    were nothing else to compute.
    """
    count, rounds = request.size(10_000, 40), request.size(4, 1)
    folder = NANO if request.model == "nano" else Path(request.model)
    python = python_with(request.peers / "sentence-transformers", cpu_torch(TORCH), [SENTENCE_TRANSFORMERS])
    with TemporaryDirectory() as name:
        file = Path(name) / "texts.json"
        file.write_text(json.dumps(texts(folder, count)))
        job = {"file": str(file), "first": 0, "count": count // rounds}
        offline = {"BENCH_BLAS_LIBRARY": "", "HF_HUB_OFFLINE": "1"}
        own = {"model": str(folder), "threads": os.cpu_count(), "rows": BATCHES, "tried": min(count, 400)}

        def peer(dtype: str, settings: Mapping[str, Any] | None, number: int) -> dict[str, Any]:
            part = job | {"first": number * job["count"], "dtype": dtype, "settings": settings}
            return work("sentence_transformers_speed", is_peer=True, python=python, environment=offline, **own, **part)

        def ours(number: int) -> dict[str, Any]:
            return work("embedding_speed", model=request.model, **job | {"first": number * job["count"]})

        best = {dtype: peer(dtype, None, 0)["settings"] for dtype in ("float32", "bfloat16")}
        sides = {dtype: partial(peer, dtype, settings) for dtype, settings in best.items()}
        found = in_turns(rounds, {"parallm": ours, **sides})
    if len(counted := {sum(part["tokens"] for part in parts) for parts in found.values()}) != 1:
        raise ValueError(f"the sides read other tokens: {counted}")
    speeds = {who: [part["tokens"] / part["seconds"] for part in parts] for who, parts in found.items()}
    speeds["our products alone"] = [part["tokens"] / part["products"] for part in found["parallm"]]
    rows = [(who, median(values), described(best.get(who, {}))) for who, values in speeds.items()]
    print_table(f"{count} texts, tokens/s", [("", "median", ""), *rows])
    first, others = (np.array([part["vectors"] for part in found[who]]) for who in ("parallm", "float32"))
    return {
        "tasks.cpu.vs_sentence_transformers": ratio(speeds["parallm"], speeds["float32"]),
        "tasks.cpu.vs_sentence_transformers_bfloat16": ratio(speeds["parallm"], speeds["bfloat16"]),
        "tasks.cpu.products_vs_sentence_transformers": ratio(speeds["our products alone"], speeds["float32"]),
        "tasks.cpu.vector_error": float(np.abs(first - others).max()),
    }


def texts(folder: Path, count: int) -> list[str]:
    """Texts of 10 to 200 tokens of the model in `folder`, every length as likely; the same on every call."""
    tokenizer, generator = Tokenizer.from_file(str(folder / "tokenizer.json")), random.Random(0)

    def text() -> str:
        whole = " ".join(generator.choices(WORDS.split(), k=LONGEST))
        return whole[: tokenizer.encode(whole).offsets[generator.randint(SHORTEST, LONGEST) - 1][1]]

    return [text() for _ in range(count)]


@measurement(
    {
        "tasks.chat_p95_ratio": Bar(max=1.3),
        "tasks.chat_p95_control_ratio": Bar(min=1.5),
        "tasks.chat_tokens_ratio": Bar(),
        "tasks.bulk_tokens_per_second": Bar(min=1),
        "tasks.bulk_updates_ratio": Bar(min=0.4),
        "tasks.bulk_errors": Bar(max=0),
    },
    minutes=8,
)
def bulk(request: Request) -> Figures:
    """8 streams of chat while two clients index texts, 64 a request, over the same streams without them.

    p95 of the time between tokens, over that of the streams alone divided by serving's share of the engine. Control: a
    share of a 50th. Updates: steps of training in a minute while both run, over those beside chat alone; rollouts
    halve with the index what chat leaves to them.
    """
    seconds, rounds = request.size(20, 2), request.size(3, 1)
    with TemporaryDirectory() as name:
        shares = {"as set": DeviceSettings().serving_share, "control": CONTROL_SHARE}
        found = {
            who: asyncio.run(beside_chat(request, Path(name), share, seconds, rounds)) for who, share in shares.items()
        }
        updates = asyncio.run(beside_training(request, Path(name), 2 * seconds))
    promised = shares["as set"]
    ratios = {who: median(promised * p95(b.gaps) / p95(a.gaps) for a, b, _ in parts) for who, parts in found.items()}
    tokens = [indexed / after.seconds for _, after, indexed in found["as set"]]
    rows = [
        (who, *(median(1e3 * p95(part[side].gaps) for part in parts) for side in (0, 1)), ratios[who])
        for who, parts in found.items()
    ]
    print_table("p95 between tokens, ms", [("", "chat alone", "beside an index", "over the promise"), *rows])
    print_table("Steps of training a minute", [("chat alone", updates[0]), ("and an index", updates[1])])
    return {
        "tasks.chat_p95_ratio": ratios["as set"],
        "tasks.chat_p95_control_ratio": ratios["control"],
        "tasks.chat_tokens_ratio": median(b.tokens_per_second / a.tokens_per_second for a, b, _ in found["as set"]),
        "tasks.bulk_tokens_per_second": median(tokens),
        "tasks.bulk_updates_ratio": updates[1] / updates[0],
        "tasks.bulk_errors": sum(len(side.errors) for parts in found.values() for a, b, _ in parts for side in (a, b)),
    }


def p95(values: Sequence[float]) -> float:
    return quantiles(values, n=20, method="inclusive")[18]


async def beside_chat(
    request: Request, folder: Path, share: float, seconds: float, rounds: int
) -> list[tuple[Traffic, Traffic, int]]:
    """Of each round: chat alone, chat beside an index, and the tokens that were indexed."""
    settings = [f"model.path={request.model}", "name=bench", "tasks.pooling=mean", f"device.serving_share={share}"]
    chat = partial(stream_for, clients=CLIENTS, max_tokens=MAX_TOKENS, seconds=seconds, model="base")
    with running("parallm.serve", settings, folder) as server:
        asked = server.url, questions(request.data, NUM_QUESTIONS)
        await stream_for(*asked, clients=CLIENTS, max_tokens=MAX_TOKENS, seconds=min(3.0, seconds), model="base")
        return [(await chat(*asked), *await indexing(request, server.url, chat(*asked))) for _ in range(rounds)]


async def beside_training(request: Request, folder: Path, seconds: float) -> tuple[float, float]:
    """Steps a minute beside chat, and beside chat and an index."""
    settings = [
        *(f"model.path={request.model}", "name=bench", *environment_overrides(request.data, NUM_QUESTIONS)),
        *("trainer.steps=1000000", "trainer.evaluate_problems=0", "checkpoint.every=1000000", "tasks.pooling=mean"),
        *("rollout.problems_per_step=2", f"rollout.max_tokens={MAX_TOKENS}", "learner.learning_rate=1e-6"),
    ]
    with running("parallm.train", settings, folder) as server:
        await wait_for_first_step(server.url)
        alone = await watched_steps(server.url, streams(request, server.url, seconds))
        beside, _ = await indexing(
            request, server.url, watched_steps(server.url, streams(request, server.url, seconds))
        )
    return per_minute(alone, seconds), per_minute(beside, seconds)


async def indexing(request: Request, url: str, work: Coroutine[Any, Any, Result]) -> tuple[Result, int]:
    """The result of `work`, and the tokens of texts whose vectors were computed meanwhile. Raises httpx.HTTPError."""
    given = texts(NANO if request.model == "nano" else Path(request.model), TEXTS_A_REQUEST)
    body = json.dumps({"model": "base", "input": given, "encoding_format": "base64"})
    headers = {"content-type": "application/json"}
    tokens = 0

    async def index(client: httpx.AsyncClient) -> None:
        nonlocal tokens
        while True:
            answer = (await client.post("/v1/embeddings", content=body, headers=headers)).raise_for_status()
            tokens += int(answer.json()["usage"]["total_tokens"])

    async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) as client:
        indexes = [asyncio.create_task(index(client)) for _ in range(NUM_INDEXES)]
        result = await work
        for task in indexes:
            task.cancel()
        for done in await asyncio.gather(*indexes, return_exceptions=True):
            if isinstance(done, Exception):
                raise done
    return result, tokens


@measurement({"tasks.8b.products_share": Bar(min=0.5, needs="gpu")}, minutes=1, needs="gpu", is_quick_anywhere=True)
def vectors_gpu(request: Request) -> Figures:
    """A causal embedder of 8B, rows of 10 to 200 tokens in passes of 8,192: the share of its time that its matrix
    products alone would take."""
    shape, tokens = ("tiny", 512) if request.is_quick else ("8b", 8192)
    found = work(
        "embedding_passes", shape=shape, tokens=tokens, lengths=(SHORTEST, LONGEST), repeats=request.size(5, 2)
    )
    rows = [("vectors", median(found["seconds"])), ("their products alone", found["products"])]
    print_table(f"{shape}, passes of {tokens} tokens, s", rows)
    return {"tasks.8b.products_share": found["products"] / median(found["seconds"])}
