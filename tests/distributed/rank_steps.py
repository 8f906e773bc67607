"""One of two ranks on the same GPU: what a divided model samples, for `test_divided_steps_on_cuda.py`.

`python -m tests.distributed.rank_steps OUTPUT`; rank 0 writes. The kernels of two processes take turns on a GPU, so a
sum takes milliseconds. NCCL refuses two ranks on one GPU, but memory can be shared, and a ring does the rest.
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from parallm.device.blas import load_blas, set_blas_threads
from parallm.device.settings import DeviceSettings

BLAS = load_blas(DeviceSettings())
set_blas_threads(BLAS, 1)

import mlx.core as mx  # noqa: E402  # after the BLAS
import numpy as np  # noqa: E402
from bench.workers.random_model import random_base  # noqa: E402
from bench.workers.workbench import random_adapter  # noqa: E402
from mlx_lm.utils import load_tokenizer  # noqa: E402

from parallm.device.streams import DeviceStreams  # noqa: E402
from parallm.engine.captured_forward import CapturedForward  # noqa: E402
from parallm.engine.engine import Engine  # noqa: E402
from parallm.engine.settings import EngineSettings  # noqa: E402
from parallm.model.adapters.table import AdapterTable  # noqa: E402
from parallm.model.chat.tokenizer import ChatTokenizer  # noqa: E402
from parallm.model.kernels.all_sum import open_peer_memory  # noqa: E402
from parallm.model.kernels.peer_trial import tried  # noqa: E402
from parallm.model.load import NANO, share_model  # noqa: E402
from parallm.model.settings import ModelSettings  # noqa: E402
from parallm.model.shared_model import SharedModel  # noqa: E402
from parallm.model.tensor_parallel import Ranks  # noqa: E402
from parallm.types import BASE, GenerationRequest, SamplingParams, TokenEvent  # noqa: E402

SHAPE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 385,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
KINDS: dict[str, dict[str, Any]] = {"dense": {}, "4bit": {"quantization": {"group_size": 64, "bits": 4}}}
NUM_REQUESTS, APART = 8, 3
LONGEST = 1000  # bytes that ranks tell each other
Sampled = list[list[object]]


def ranks_on_one_gpu() -> Ranks:
    group = mx.distributed.init(strict=True, backend="ring")

    def gather(part: bytes) -> list[bytes]:
        words = np.zeros(1 + LONGEST, np.int32)
        words[: 1 + len(part)] = [len(part), *part]
        told = np.array(mx.distributed.all_gather(mx.array(words)[None], group=group))
        return [bytes(row[1 : 1 + row[0]].tolist()) for row in told]

    peers = open_peer_memory(group.rank(), group.size(), gather)
    assert peers is not None
    peers = tried(peers, gather)
    assert peers is not None
    return Ranks(group=group, peers=peers)


def sampled(model: SharedModel, *, prepares: bool) -> Sampled:
    """Tokens and log-probs of requests that join while others decode, the version changing on the way."""
    table, events = AdapterTable(), list[TokenEvent]()
    streams = DeviceStreams(partial(set_blas_threads, BLAS))
    engine = Engine(
        model,
        table,
        streams,
        EngineSettings(kv_cache_bytes=1 << 26, max_rows=16),
        emit=events.extend,
        report=lambda names, error: sys.exit(f"{names}: {error}"),
        async_scheduling=True,
    )
    for _ in range(3 if prepares else 0):
        engine.prepare()
    table.publish(random_adapter(model, 1, size=0.1))
    for place in range(NUM_REQUESTS):
        if place == NUM_REQUESTS // 2:
            table.publish(random_adapter(model, 2, seed=1, size=0.1))
        engine.add(request(place), False)
        for _ in range(APART):
            engine.step("serving")
    while engine.has_work("serving"):
        engine.step("serving")
    ended = [(event.request_id, event.completion) for event in events if event.completion]
    return sorted([name, one.index, list(one.tokens), list(one.logprobs)] for name, one in ended)


def request(place: int) -> GenerationRequest:
    prompt = tuple(5 + (place + step * step) % 300 for step in range(1 + 29 * place))
    sampling = SamplingParams(max_tokens=15 + 8 * place, temperature=1.0, seed=place, ignore_eos=True)
    model = ("policy", BASE)[place % 2]
    return GenerationRequest(
        request_id=str(place), prompt_tokens=prompt, sampling=sampling, n=1 + place % 3, model=model
    )


def noted(call: Callable[..., mx.array | None], counts: dict[str, int], *, replays: bool) -> Callable[..., Any]:
    def counted(self: CapturedForward, *given: Any) -> mx.array | None:
        hidden_BH = call(self, *given) if replays else None
        counts["replayed" if hidden_BH is not None else "launched"] += 1
        return hidden_BH

    return counted


def main() -> None:
    ranks, call, found = ranks_on_one_gpu(), CapturedForward.__call__, {}
    for kind, bits in KINDS.items():
        mx.random.seed(0)
        tokenizer = ChatTokenizer(load_tokenizer(NANO))
        shape = SHAPE | bits
        model = share_model(random_base(shape), shape, tokenizer, ModelSettings(), ranks=ranks)
        for replays in (False, True):
            counts = {"replayed": 0, "launched": 0}
            CapturedForward.__call__ = noted(call, counts, replays=replays)  # type: ignore[method-assign]
            found[f"{kind} {'replayed' if replays else 'launched'}"] = counts | {
                "sampled": sampled(model, prepares=replays)
            }
    if ranks.group.rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
