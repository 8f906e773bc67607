"""The lists of kernels hold what an engine and a learner launch; in a process that believes it has a Hopper GPU."""

import io
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.llama import Model, ModelArgs
from mlx_lm.utils import load_tokenizer

from parallm.device.streams import DeviceStreams
from parallm.engine import flat_prefill, paged_memory
from parallm.engine.decode_batch import row_bucket
from parallm.engine.engine import Engine
from parallm.engine.kernel_list import engine_kernels
from parallm.engine.kv.attention_metadata import AttentionMetadata
from parallm.engine.kv.paged_cache import PagedCache, make_pools
from parallm.engine.paged_memory import PagedMemory
from parallm.engine.settings import EngineSettings
from parallm.learner.kernel_list import learner_kernels, packed_kernels
from parallm.model import load
from parallm.model.adapters.adapter import Adapter
from parallm.model.adapters.table import AdapterTable
from parallm.model.chat.tokenizer import ChatTokenizer
from parallm.model.kernels import cuda, host_memory
from parallm.model.kernels.all_sum import PeerMemory
from parallm.model.kernels.columns import memory_of
from parallm.model.kernels.compiler import Defines, Specialization
from parallm.model.kernels.cuda import captured_launches
from parallm.model.kernels.page_write import PAGE
from parallm.model.load import NANO, share_model
from parallm.model.lora.segmented import SegmentedLora
from parallm.model.lora.selector import LoraSelector
from parallm.model.patches.forward import QuantizedRowEmbedding
from parallm.model.quantized import UnpackingEmbedding
from parallm.model.settings import ModelSettings
from parallm.model.shared_model import SharedModel
from parallm.model.tensor_parallel import Ranks
from parallm.types import GenerationRequest
from tests.engine.conftest import step

SHAPE = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": 385,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> dict[Specialization, None]:
    """The kernels that are launched; their outputs are zeros."""
    launches: dict[Specialization, None] = {}

    def launch(name: str, defines: Defines, shared_memory: int, copies_views: bool) -> cuda.Kernel:
        launches[name, defines] = None
        return cuda.Kernel(name, None, shared_memory, copies_views)

    believed = {"has_kernels": True, "on_cuda": True, "architecture": "sm_90"}
    for module in [module for name, module in sys.modules.items() if name.startswith("parallm.")]:
        for name, value in believed.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, lambda value=value: value)
    monkeypatch.setattr(cuda, "_kernel", launch)
    monkeypatch.setattr(host_memory, "_page_locked", lambda size: np.zeros(size, np.int32))
    monkeypatch.setattr(host_memory, "_memory", host_memory.HostMemory())
    monkeypatch.setattr(load, "choose_dtype", lambda *_, **__: mx.bfloat16)
    monkeypatch.setattr(flat_prefill, "try_flash_attention", lambda *_: None)
    return launches


@pytest.fixture
def model(launched: dict[Specialization, None]) -> SharedModel:
    base = Model(ModelArgs.from_dict(SHAPE))
    shared = share_model(base, SHAPE, ChatTokenizer(load_tokenizer(NANO)), ModelSettings())
    launched.clear()
    return shared


@pytest.mark.parametrize("versions", [0, 1, 2])
def test_an_engine_launches_what_is_listed(
    versions: int,
    model: SharedModel,
    launched: dict[Specialization, None],
    make_engine: Callable[..., Engine],
    random_adapter: Callable[..., Adapter],
    ask: Callable[..., GenerationRequest],
) -> None:
    listed = engine_kernels(model, random_adapter(model, 1, rank=8), EngineSettings())
    assert launched == {}
    table = AdapterTable()
    for version in range(1, versions + 1):
        table.publish(random_adapter(model, version, rank=8))
    engine = make_engine(model, table=table)
    for rows in (1, 2, 7, 30, 60):
        for row in range(rows):
            name = f"policy@{1 + row % versions}" if versions else "base"
            request = ask(f"{rows}-{row}", [1, 2, 3], 3 + row % 2, model=name, temperature=1.0, top_k=5)
            engine.add(request, False)
        while step(engine):
            pass
    assert {name for name, _ in launched} >= {
        "small_batch_gemm",
        "paged_attention",
        "paged_attention_plan",
        "page_write",
        "flash_attention_hopper",
        "filter_ends",
    }
    assert [kernel for kernel in launched if kernel not in listed] == []
    assert len(launched) > 15, "a list of a few kernels would not do"


def step_over_pages(model: SharedModel, adapters: Sequence[Adapter | None]) -> mx.array:
    """Hidden states of rows with these adapters."""
    rows, lora = len(adapters), LoraSelector(model).select(adapters)
    metadata, lengths_B, tables_BN = AttentionMetadata(), mx.zeros(rows, mx.int32), mx.zeros((rows, 4), mx.int32)
    metadata.set_traced(lengths_B, tables_BN, num_positions=4 * PAGE)
    pools = make_pools(model, 1)
    mx.eval(model.base.parameters(), lengths_B, tables_BN, pools)
    if isinstance(lora, SegmentedLora):
        mx.eval(lora.arrays())
    return model.hidden(lengths_B[:, None], [PagedCache(metadata, pool) for pool in pools], lora)


SIZES_OF_1_5B = {"hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12, "num_key_value_heads": 2}
SIZES_OF_1_5B |= {"head_dim": 128}
"""Its captured rows end at 910, which is no power of two."""


@pytest.mark.parametrize(("sizes", "versions"), [({}, 0), ({}, 1), ({}, 2), (SIZES_OF_1_5B, 1)])
def test_captured_steps_launch_what_is_listed(
    sizes: dict[str, int], versions: int, launched: dict[Specialization, None], random_adapter: Callable[..., Adapter]
) -> None:
    shape = SHAPE | sizes
    model = share_model(Model(ModelArgs.from_dict(shape)), shape, ChatTokenizer(load_tokenizer(NANO)), ModelSettings())
    listed = engine_kernels(model, random_adapter(model, 1, rank=8), EngineSettings())
    adapters = [random_adapter(model, 1 + version, rank=8) for version in range(versions)]
    launched.clear()
    for rows in map(row_bucket, (4, 40, 100, 130, 260, 400, 700, 896, 1024)):
        with captured_launches():
            step_over_pages(model, [adapters[row % versions] if versions else None for row in range(rows)])
    assert [kernel for kernel in launched if kernel not in listed] == []
    assert len([name for name, _ in launched if name == "warpgroup_gemm"]) >= 3


def operations(rows: int, *, layers: int, adapter: Callable[..., Adapter] | None) -> int:
    """The nodes that MLX walks for a step over pages."""
    shape = SHAPE | {"num_hidden_layers": layers}
    model = share_model(Model(ModelArgs.from_dict(shape)), shape, ChatTokenizer(load_tokenizer(NANO)), ModelSettings())
    hidden = step_over_pages(model, [None if adapter is None else adapter(model, 1, rank=8)] * rows)
    graph = io.StringIO()
    mx.export_to_dot(graph, hidden)
    return graph.getvalue().count("label =")


@pytest.mark.parametrize(
    ("rows", "is_captured", "has_lora", "expected"),
    [
        *((30, is_captured, has_lora, 7) for is_captured in (False, True) for has_lora in (False, True)),
        *((200, False, False, 8), (200, False, True, 13), (200, True, False, 7), (200, True, True, 7)),
        *((400, True, False, 7), (400, True, True, 9), (1100, True, False, 8), (1100, True, True, 13)),
    ],
)
def test_a_layer_of_a_step_is_kernels_and_products_without_views(
    rows: int,
    is_captured: bool,
    has_lora: bool,
    expected: int,
    launched: dict[Specialization, None],
    random_adapter: Callable[..., Adapter],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step of a small model waits for the host, which takes as long for two views as for a launch."""

    def launch(_: cuda.Kernel, inputs: list[mx.array], *__: Any, **sizes: Any) -> list[mx.array]:
        zeros = [mx.zeros(*output) for output in zip(sizes["output_shapes"], sizes["output_dtypes"], strict=True)]
        mx.eval(zeros)
        return mx.depends(zeros, list(map(memory_of, inputs)))

    monkeypatch.setattr(cuda.Kernel, "__call__", launch)
    adapter = random_adapter if has_lora else None
    with captured_launches() if is_captured else nullcontext():
        assert operations(rows, layers=3, adapter=adapter) - operations(rows, layers=2, adapter=adapter) == expected


@pytest.mark.parametrize("versions", [0, 1])
def test_an_engine_of_packed_weights_launches_what_is_listed(
    versions: int,
    launched: dict[Specialization, None],
    make_engine: Callable[..., Engine],
    random_adapter: Callable[..., Adapter],
    ask: Callable[..., GenerationRequest],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shape = SHAPE | {"intermediate_size": 256, "vocab_size": 392}
    base = Model(ModelArgs.from_dict(shape))
    base.set_dtype(mx.bfloat16)
    nn.quantize(base, group_size=64, bits=4)
    packed = share_model(base, shape, ChatTokenizer(load_tokenizer(NANO)), ModelSettings(quantized="packed"))
    embedding = packed.trunk.embed_tokens
    assert isinstance(embedding, QuantizedRowEmbedding)
    assert isinstance(embedding, UnpackingEmbedding)
    launched.clear()
    listed = engine_kernels(packed, random_adapter(packed, 1, rank=8), EngineSettings())
    table = AdapterTable()
    if versions:
        table.publish(random_adapter(packed, 1, rank=8))
    engine = make_engine(packed, table=table)
    for rows in (1, 7, 30, 130):
        for row in range(rows):
            engine.add(ask(f"{rows}-{row}", [1, 2, 3], 3, model="policy" if versions else "base"), False)
        while step(engine):
            pass
    assert [kernel for kernel in launched if kernel not in listed] == []
    products = [dict(defines) for name, defines in launched if name == "quantized_gemm"]
    assert {True, False} - {versions > 0} <= {product["GATED"] for product in products}
    assert {1, 4, 16} <= {product["TILES"] for product in products}
    assert versions or not any(name == "small_batch_gemm" for name, _ in launched)


@pytest.mark.parametrize(("hidden", "added"), [(128, {"all_sum"}), (256, {"sum_add_norm"})])
def test_a_divided_engine_sums_by_a_kernel_and_adds_with_the_norm(
    hidden: int,
    added: set[str],
    launched: dict[Specialization, None],
    make_engine: Callable[..., Engine],
    random_adapter: Callable[..., Adapter],
    ask: Callable[..., GenerationRequest],
) -> None:
    peers = PeerMemory(rank=0, size=2, addresses=mx.zeros(4, mx.uint64))
    ranks = Ranks(group=mx.distributed.init(), peers=peers)
    tokenizer = ChatTokenizer(load_tokenizer(NANO))
    shape = SHAPE | {"hidden_size": hidden}
    divided = share_model(Model(ModelArgs.from_dict(shape)), shape, tokenizer, ModelSettings(), ranks=ranks)
    launched.clear()
    listed = engine_kernels(divided, random_adapter(divided, 1, rank=8), EngineSettings())
    table = AdapterTable()
    table.publish(random_adapter(divided, 1, rank=8))
    engine = make_engine(divided, table=table)
    assert isinstance(engine.memory, PagedMemory)
    for rows in (1, 30):
        for row in range(rows):
            engine.add(ask(f"{rows}-{row}", [1, 2, 3], 4, model=("base", "policy")[row % 2]), False)
        while step(engine):
            pass
    assert [kernel for kernel in launched if kernel not in listed] == []
    assert added | {"page_write", "expand"} <= {name for name, _ in launched}


@pytest.mark.parametrize("is_prepared", [True, False])
def test_a_prepared_engine_builds_no_step_for_a_request(
    is_prepared: bool,
    model: SharedModel,
    streams: DeviceStreams,
    make_engine: Callable[..., Engine],
    ask: Callable[..., GenerationRequest],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streams, "handles", streams.handles[:1])  # as a GPU has
    engine = make_engine(model, settings=EngineSettings(max_rows=64))
    assert isinstance(engine.memory, PagedMemory)
    num_prepared = 0
    while is_prepared and engine.prepare():
        num_prepared += 1
    built: list[int] = []
    hidden = SharedModel.hidden

    def noted(self: SharedModel, tokens_BT: mx.array, cache: Any, lora: Any) -> mx.array:
        if isinstance(cache[0], PagedCache):
            built.append(tokens_BT.shape[0])
        return hidden(self, tokens_BT, cache, lora)

    monkeypatch.setattr(SharedModel, "hidden", noted)
    for rows in (1, 2, 7, 30, 60):
        for row in range(rows):
            engine.add(ask(f"{rows}-{row}", [1, 2, 3] * (1 + 20 * row % 300), 3 + row % 2), False)
        while step(engine):
            pass
    assert num_prepared == (24 if is_prepared else 0), "8 numbers of rows, 3 widths of tables"
    assert bool(built) != is_prepared, built


def test_an_engine_that_cannot_prepare_serves_without(
    model: SharedModel, make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("[malloc] Unable to allocate 512 bytes.")

    engine = make_engine(model)
    monkeypatch.setattr(paged_memory, "make_pools", fail)
    assert not engine.prepare()
    monkeypatch.undo()
    assert not engine.prepare(), "what failed is not tried again and again"


def test_a_learner_needs_attention_and_scores_in_both_directions(
    model: SharedModel, launched: dict[Specialization, None], random_adapter: Callable[..., Adapter]
) -> None:
    listed = learner_kernels(model, random_adapter(model, 1, rank=8))
    assert launched == {}
    names = [name for name, _ in listed]
    assert {"flash_attention_hopper", "flash_attention_queries", "rotate", "token_scores", "swiglu"} <= set(names)
    assert {"token_scores_gradient", "swiglu_gradient", "gather_rows_gradient", "rms_norm_gradient"} <= set(names)
    assert names.count("flash_attention_keys") == 2


def test_vectors_need_attention_forward(model: SharedModel, launched: dict[Specialization, None]) -> None:
    names = [name for name, _ in packed_kernels(model)]
    assert launched == {}
    assert {"flash_attention_hopper", "rotate", "swiglu"} <= set(names)
    assert not any("gradient" in name or name in ("flash_attention_queries", "flash_attention_keys") for name in names)


def test_a_cpu_needs_no_kernels(
    load_tiny: Callable[[str], SharedModel], random_adapter: Callable[..., Adapter]
) -> None:
    model = load_tiny("llama")
    if not cuda.has_kernels():
        assert (
            engine_kernels(model, random_adapter(model, 1), EngineSettings())
            == learner_kernels(model, random_adapter(model, 1))
            == []
        )
