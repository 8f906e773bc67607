"""Decode steps of a shape with random weights, on one device or as one of the ranks that it is divided between.

Logits of a prompt come before, and as a control those of one with another end.

Rank 0 drives its engine as the device thread does, and the others follow it. Every process makes the same weights from
the seed, an array at a time, and keeps its part.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.utils import load_tokenizer

import bench
from bench.workers.loads import SHAPES, Tokens, random_prompts
from bench.workers.random_model import random_base
from parallm.device.blas import set_blas_threads
from parallm.device.streams import DeviceStreams
from parallm.distributed.lockstep import FollowingEngine, LeadingEngine
from parallm.distributed.settings import DistributedSettings
from parallm.distributed.team import Lone, Team, join_team
from parallm.distributed.tensor_parallel import join_ranks
from parallm.engine.engine import Engine
from parallm.engine.settings import EngineSettings
from parallm.model.adapters.table import AdapterTable
from parallm.model.chat.tokenizer import ChatTokenizer
from parallm.model.kernels.cuda import on_cuda
from parallm.model.load import NANO, share_model
from parallm.model.settings import ModelSettings
from parallm.model.shared_model import SharedModel
from parallm.model.tensor_parallel import Ranks
from parallm.types import BASE, GenerationRequest, SamplingParams, TokenEvent

PROMPT = 512
"""Prompt tokens of a unit: as many are multiplied by unpacked weights, for which MLX compiles nothing."""
SCORED = 4
"""Last positions of a prompt whose logits are compared: from 8 rows on MLX compiles a product for the head."""
CHANGED = 64
"""Last tokens that the control changes, the scored ones among them. Attention of random weights is a mean over all
positions, which makes them alike layer by layer: one other token alone moved its logits by a tenth of their spread."""
KV_BYTES = 4 << 30


def main(
    *, shape: str, layers: int, rows: list[int], new: int, workers: int, folder: str, uses_peers: bool = True
) -> Iterator[dict[str, Any]]:
    """Yield seconds of steps for each number of rows, at rank 0, after the logits of a prompt, which go to a file."""
    sizes = SHAPES[shape] | ({"num_hidden_layers": layers} if layers else {})
    began = time.perf_counter()
    settings = DistributedSettings(engine="mlx" if workers > 1 else "off", workers=workers, timeout_seconds=120)
    with ExitStack() as resources:
        team = resources.enter_context(join_team(settings, Path(folder), {}))
        ranks = None
        if isinstance(team, Team):
            ranks = join_ranks(team)
            ranks = ranks if uses_peers else replace(ranks, peers=None)
        model = divided_model(sizes, ranks)
        rank = team.identity.rank if isinstance(team, Team) else 0
        started = time.perf_counter() - began
        prompt, other = random_prompts(sizes["vocab_size"], 2, PROMPT, seed=7)
        changed = (*prompt[:-CHANGED], *other[-CHANGED:])
        logits_TV, other_TV = (scored_logits(model, tokens) for tokens in (prompt, changed))
        if rank == 0:
            np.save(Path(folder) / f"logits_{workers}.npy", logits_TV)
            np.save(Path(folder) / f"other_logits_{workers}.npy", other_TV)
            has_peers = ranks is not None and ranks.peers is not None
            yield {"start_seconds": started, "peers": has_peers, "logit_std": float(logits_TV.std())}
        engine = make_engine(team, model, max(rows))
        if isinstance(engine, FollowingEngine):
            assert isinstance(team, Team)
            while (content := team.channel.broadcasts.get()) is not None:
                engine.follow(content)
            return
        for count in rows:
            print(f"{count} rows", file=sys.stderr, flush=True)
            runs = [steps_of(engine, count, new, sizes["vocab_size"], run) for run in range(2)]
            yield {"rows": count, "seconds": median(runs[1]), "first_seconds": max(runs[0]), "memory": peak()}


def divided_model(sizes: dict[str, Any], ranks: Ranks | None) -> SharedModel:
    mx.random.seed(0)
    base = random_base(sizes)
    if ranks is None:
        for _, array in tree_flatten(base.parameters()):  # each is made of float32 numbers, which go at once
            mx.eval(array)
    return share_model(base, sizes, ChatTokenizer(load_tokenizer(NANO)), ModelSettings(), ranks=ranks)


def scored_logits(model: SharedModel, prompt: Tokens) -> np.ndarray:
    """Logits (T, V) of the last positions of a prompt."""
    hidden_1TH = model.hidden(mx.array([prompt]), model.make_cache(), None)
    return np.array(model.head(hidden_1TH[0, -SCORED:]).astype(mx.float32))


def make_engine(team: Lone | Team, model: SharedModel, rows: int) -> Engine:
    streams = DeviceStreams(partial(set_blas_threads, bench.BLAS))
    settings = EngineSettings(max_rows=rows, kv_cache_bytes=KV_BYTES if on_cuda() else None, prefix_cache=False)
    events: list[TokenEvent] = []
    kind: Any = Engine
    if isinstance(team, Team):
        kind = partial(LeadingEngine if team.identity.rank == 0 else FollowingEngine, channel=team.channel)
    engine: Engine = kind(
        model,
        AdapterTable(),
        streams,
        settings,
        emit=events.extend,
        report=lambda names, error: print(error, file=sys.stderr),
        async_scheduling=on_cuda(),
    )
    return engine


def steps_of(engine: Engine, rows: int, new: int, vocabulary: int, run: int) -> list[float]:
    """Seconds of the units in which all rows decode."""
    length = max(PROMPT // rows, 8)
    for index, prompt in enumerate(random_prompts(vocabulary, rows, length, seed=100 * run + rows)):
        sampling = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True)
        request = GenerationRequest(
            request_id=f"{run}-{rows}-{index}", prompt_tokens=prompt, sampling=sampling, model=BASE
        )
        engine.add(request, False)
    seconds: list[float] = []
    last = time.perf_counter()
    while engine.has_work("serving"):
        engine.step("serving")
        now = time.perf_counter()
        if not engine.num_waiting() and engine.num_running() == rows:
            seconds.append(now - last)
        last = now
    return seconds


def peak() -> int:
    return int(mx.get_peak_memory())
