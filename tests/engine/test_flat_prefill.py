"""Prompts as one flat row give what they give alone; the kernels stand in numpy."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from parallm.engine import flat_prefill
from parallm.engine.flat_prefill import Chunk, FlatForward, FlatPrefill, Read, fits, head_shapes, lay_out
from parallm.engine.kv.block_pool import BlockPool, BlockTable
from parallm.engine.paged_batch import PagedDecodeBatch
from parallm.engine.paged_memory import PagedMemory
from parallm.engine.sequence import PrefillJob, make_sequences
from parallm.engine.settings import EngineSettings
from parallm.model.adapters.adapter import Adapter
from parallm.model.kernels import flash_attention
from parallm.model.kernels.cuda import on_cuda
from parallm.model.kernels.gather import take_rows
from parallm.model.kernels.page_write import PAGE
from parallm.model.kernels.segmented_lora import ShrinkOutput
from parallm.model.layers import trimmed_last_layer
from parallm.model.load import load_shared_model
from parallm.model.lora.linear import merge_linears
from parallm.model.lora.segmented import add_products
from parallm.model.lora.selector import LoraSelector
from parallm.model.settings import LoraSettings, ModelSettings
from parallm.model.shared_model import SharedModel
from parallm.types import GenerationRequest
from tests.model.kernels.flash_emulation import fake_kernel

NUM_PAGES = 40
TARGETS = {"llama": ("all-linear",), "qwen3_moe": ("all-linear", "experts")}
pytestmark = pytest.mark.skipif(on_cuda(), reason="stands in for kernels that a GPU has")


class FakeMemory:
    """Pools whose arrays the fakes of the kernels know by their place, and pages in any order."""

    def __init__(self, model: SharedModel) -> None:
        plain = model.make_cache()
        model.hidden(mx.zeros((1, 1), mx.int32), plain, None)
        shapes = [(NUM_PAGES, layer.keys.shape[1], PAGE, layer.keys.shape[3]) for layer in plain]
        self.layers = [tuple(mx.zeros(shape) for _ in range(2)) for shape in shapes]
        self.arrays = {id(pool): np.full(pool.shape, np.nan, np.float32) for pair in self.layers for pool in pair}
        self.pool = BlockPool(NUM_PAGES, PAGE, 1)
        self.kept: list[tuple[str, int]] = []
        self.cached: dict[str, BlockTable] = {}

    def begin(self, job: PrefillJob) -> int:
        assert job.table is not None
        cached = self.cached.get(job.request.request_id)
        if cached is not None:
            job.table.share_first(cached.pages)
            job.num_computed = len(cached.pages) * PAGE
        return job.num_computed

    def keep(self, sequence: Any, _: BlockTable, num_computed: int) -> None:
        self.kept.append((sequence.request.request_id, num_computed))

    def table(self, count: int) -> BlockTable:
        pages = self.pool.allocate(count)
        assert pages is not None
        return BlockTable(self.pool, pages[::-1])

    def write(
        self, heads: Sequence[mx.array], keys: mx.array, values: mx.array, slots_M: mx.array, rotary: object
    ) -> mx.array:
        assert rotary is None
        slots = np.array(slots_M)
        for pool, new in zip((keys, values), heads[1:], strict=True):
            self.arrays[id(pool)][slots // PAGE, :, slots % PAGE] = np.array(new[:, :, 0])
        return heads[0][:, :, 0]

    def attend(self, queries: mx.array, keys: mx.array, values: mx.array, *rest: mx.array, **more: Any) -> mx.array:
        pools = (mx.array(self.arrays[id(pool)]) for pool in (keys, values))
        return flash_attention.attend_pages(queries, *pools, *rest, **more)


@pytest.fixture
def trimmed(monkeypatch: pytest.MonkeyPatch) -> list[SharedModel]:
    """Lets short units be trimmed, too. The models of forwards whose last layer was, in turn, without the trial's."""
    found: list[SharedModel] = []

    def noted(model: SharedModel, *more: Any) -> Any:
        found.append(model)
        return trimmed_last_layer(model, *more)

    monkeypatch.setattr(flat_prefill, "trimmed_last_layer", noted)
    monkeypatch.setattr(flat_prefill, "TRIMMED_FROM", 0)
    return found


@pytest.fixture
def make_prefill(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[FlatPrefill, FakeMemory]]:
    def make(model: SharedModel, chunk: int) -> tuple[FlatPrefill, FakeMemory]:
        memory = FakeMemory(model)
        monkeypatch.setattr(flat_prefill, "fits_pages", lambda *_: True)
        settings = EngineSettings(prefill_chunk=chunk)
        prefill = FlatPrefill(model, LoraSelector(model), cast(PagedMemory, memory), settings)
        monkeypatch.setattr(flash_attention, "kernel", fake_kernel)
        monkeypatch.setattr(flat_prefill, "write_pages", memory.write)
        monkeypatch.setattr(flat_prefill, "attend_pages", memory.attend)
        monkeypatch.setattr(flat_prefill, "padded", lambda count: count + 7)
        return prefill, memory

    return make


def job_of(memory: FakeMemory, request: GenerationRequest, adapter: Adapter | None = None) -> PrefillJob:
    sequences = make_sequences(request, adapter, is_streaming=False, arrival=0, max_context=4096)
    job = PrefillJob.of(sequences)
    job.table = memory.table(-(-len(job.tokens) // PAGE))
    return job


def compute_all(prefill: FlatPrefill, jobs: list[PrefillJob]) -> list[list[tuple[str, int]]]:
    """The jobs of each unit, and how far each was computed then."""
    units = []
    while waiting := [job for job in jobs if not job.is_computed]:
        chosen = prefill.for_one_unit(waiting)
        mx.eval(prefill.compute(chosen))
        units.append([(job.request.request_id, job.num_computed) for job in chosen])
    return units


def prompt(length: int, seed: int) -> list[int]:
    return [5 + (seed * 31 + step * step) % 70 for step in range(length)]


def logits_alone(model: SharedModel, tokens: Sequence[int], adapter: Adapter | None = None) -> mx.array:
    lora = LoraSelector(model).select([adapter])
    return model.head(model.hidden(mx.array([tokens]), model.make_cache(), lora)[0, -1:])[0]


def worst(model: SharedModel, jobs: list[PrefillJob]) -> float:
    differences = []
    for job in jobs:
        assert job.logits_V is not None
        alone = logits_alone(model, job.tokens, job.sequences[0].adapter)
        differences.append(float(mx.abs(job.logits_V - alone).max().item()))
    return max(differences)


@pytest.mark.parametrize("trimmed_from", [0, flat_prefill.TRIMMED_FROM])
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "qwen3_moe", "gpt2", "gpt_oss"])
def test_prompts_of_any_lengths_give_the_same_flat_as_alone(
    model_type: str,
    trimmed_from: int,
    make_prefill: Callable[..., tuple[FlatPrefill, FakeMemory]],
    load_tiny: Callable[..., SharedModel],
    ask: Callable[..., GenerationRequest],
    trimmed: list[SharedModel],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flat_prefill, "TRIMMED_FROM", trimmed_from)
    model = load_tiny(model_type)
    prefill, memory = make_prefill(model, 100)
    assert prefill._forward.can_trim == (model_type in ("llama", "qwen3_moe", "gpt_oss"))
    lengths = [20, 1, 150, 64, 63, 3]
    jobs = [job_of(memory, ask(str(place), prompt(length, place))) for place, length in enumerate(lengths)]
    units = compute_all(prefill, jobs)
    assert units == [
        [("0", 20), ("1", 1), ("2", 79)],
        [("2", 150), ("3", 29)],
        [("3", 64), ("4", 63), ("5", 2)],
        [("5", 3)],
    ]
    assert worst(model, jobs) < 2e-4
    assert memory.kept == [(str(place), length) for place, length in enumerate(lengths)]
    assert prefill.num_prompt_tokens == sum(lengths)
    assert len(trimmed) == (len(units) if prefill._forward.can_trim and trimmed_from == 0 else 0)


def test_a_last_layer_that_runs_again_is_not_trimmed(
    make_prefill: Callable[..., tuple[FlatPrefill, FakeMemory]],
    tiny_model: Callable[[str], Path],
    tmp_path: Path,
    ask: Callable[..., GenerationRequest],
    trimmed: list[SharedModel],
) -> None:
    shutil.copytree(tiny_model("nanbeige"), tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_loops": 2}))
    model = load_shared_model(ModelSettings(path=str(tmp_path)))
    assert len(model.make_cache()) == 2 * model.num_layers
    prefill, memory = make_prefill(model, 100)
    assert not prefill._forward.can_trim
    jobs = [job_of(memory, ask("loops", prompt(70, 1)))]
    compute_all(prefill, jobs)
    assert worst(model, jobs) < 2e-4
    assert trimmed == []


def test_a_last_mlp_of_other_tokens_is_found(
    make_prefill: Callable[..., tuple[FlatPrefill, FakeMemory]],
    load_tiny: Callable[..., SharedModel],
    ask: Callable[..., GenerationRequest],
    trimmed: list[SharedModel],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = load_tiny("llama")
    prefill, memory = make_prefill(model, 100)
    monkeypatch.setattr(flat_prefill, "take_rows", lambda hidden, read: take_rows(hidden, mx.maximum(read - 1, 0)))
    jobs = [job_of(memory, ask("control", prompt(20, 3)))]
    compute_all(prefill, jobs)
    assert worst(model, jobs) > 1e-2
    assert trimmed == [model]


def test_a_wrong_page_is_found(
    make_prefill: Callable[..., tuple[FlatPrefill, FakeMemory]],
    load_tiny: Callable[..., SharedModel],
    ask: Callable[..., GenerationRequest],
) -> None:
    model = load_tiny("llama")
    prefill, memory = make_prefill(model, 100)
    jobs = [job_of(memory, ask("a", prompt(150, 1)))]
    mx.eval(prefill.compute(prefill.for_one_unit(jobs)))
    assert jobs[0].table is not None
    jobs[0].table.pages[:2] = jobs[0].table.pages[1::-1]
    compute_all(prefill, jobs)
    assert not worst(model, jobs) < 2e-4


def test_a_cached_prefix_is_read_where_it_is(
    make_prefill: Callable[..., tuple[FlatPrefill, FakeMemory]],
    load_tiny: Callable[..., SharedModel],
    ask: Callable[..., GenerationRequest],
) -> None:
    model = load_tiny("llama")
    prefill, memory = make_prefill(model, 512)
    first = job_of(memory, ask("first", prompt(150, 1)))
    compute_all(prefill, [first])
    assert first.table is not None
    memory.cached["second"] = BlockTable(memory.pool, first.table.pages[:2])
    memory.pool.share(first.table.pages[:2])
    second, third = (job_of(memory, ask(name, [*prompt(128, 1), *prompt(5, 4)])) for name in ("second", "third"))
    assert compute_all(prefill, [second, third]) == [[("second", 133), ("third", 133)]]
    assert worst(model, [second, third]) < 2e-4
    assert (prefill.num_prompt_tokens, prefill.num_cached_tokens) == (150 + 2 * 133, 128)
    assert [one.sequences[0].num_cached_prompt_tokens for one in (second, third)] == [128, 0]


class PlainGroup:
    """In place of the kernels for LoRA of few rows: what `shrink` gives here are the rows themselves."""

    def __init__(self, y_SBTO: mx.array, dtype: mx.Dtype, widths: Sequence[int], lora: ShrinkOutput | None) -> None:
        y_BTO = y_SBTO.sum(axis=0)
        if lora is not None:
            rows = mx.arange(y_BTO.shape[0])
            place_B = mx.argmax(lora.order_B2[: rows.size, 0] == rows[:, None], axis=1)
            y_BTO = add_products(lora.weights, y_BTO, lora.hidden_PBTK, lora.order_B2[place_B, 1])
        self._y_BTO, self._cuts = y_BTO, [sum(widths[:count]) for count in range(1, len(widths))]

    def split(self) -> list[mx.array]:
        parts: list[mx.array] = mx.split(self._y_BTO, self._cuts, axis=-1)
        return parts

    def gated(self) -> mx.array:
        gate, up = self.split()
        return nn.silu(gate) * up

    def added_to(self, other: mx.array) -> mx.array:
        return self._y_BTO + other


@pytest.fixture
def packing_model(tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Callable[..., SharedModel]:
    """A model whose versions pack, as on a GPU."""

    def swiglu_of_halves(y: mx.array, **_: object) -> mx.array:
        gate, up = mx.split(y, 2, axis=-1)
        return nn.silu(gate) * up

    def make(model_type: str, targets: tuple[str, ...]) -> SharedModel:
        monkeypatch.setattr("parallm.model.lora.linear.shrink", lambda x, *_: x)
        monkeypatch.setattr("parallm.model.lora.linear.GroupOutput", PlainGroup)
        monkeypatch.setattr("parallm.model.lora.linear.swiglu_of_halves", swiglu_of_halves)
        lora = LoraSettings(targets=targets)
        model = load_shared_model(ModelSettings(path=str(tiny_model(model_type)), lora=lora))
        return replace(model, groups=merge_linears(model.base, model.joined))

    return make


@pytest.mark.parametrize("stacks", [False, True])
def test_a_unit_has_versions_that_stack(
    stacks: bool,
    make_prefill: Callable[..., tuple[FlatPrefill, FakeMemory]],
    packing_model: Callable[..., SharedModel],
    load_tiny: Callable[..., SharedModel],
    ask: Callable[..., GenerationRequest],
    random_adapter: Callable[..., Adapter],
    trimmed: list[SharedModel],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, plain = packing_model("llama", TARGETS["llama"]), load_tiny("llama")
    prefill, memory = make_prefill(model, 512)
    versions = [random_adapter(model, version, rank=8, size=0.1) for version in (1, 2)]
    adapters = [versions[0], None, versions[1], versions[0]]
    jobs = [
        job_of(memory, ask(str(place), prompt(30 + place, place)), adapter) for place, adapter in enumerate(adapters)
    ]
    if not stacks:
        monkeypatch.setattr(LoraSelector, "can_stack", lambda *_: False)
    units = [[name for name, _ in unit] for unit in compute_all(prefill, jobs)]
    assert units == ([["0", "2", "3"], ["1"]] if stacks else [["0", "3"], ["1"], ["2"]])
    assert len(trimmed) == len(units)
    assert worst(plain, jobs) < 5e-4
    jobs[0].sequences[0].adapter = versions[1]
    assert worst(plain, jobs) > 1e-3, "the versions differ"


@pytest.mark.parametrize("model_type", TARGETS)
@pytest.mark.parametrize("num_versions", [1, 3])
def test_last_tokens_have_the_lora_of_their_versions(
    model_type: str,
    num_versions: int,
    make_prefill: Callable[..., tuple[FlatPrefill, FakeMemory]],
    packing_model: Callable[..., SharedModel],
    load_tiny: Callable[..., SharedModel],
    ask: Callable[..., GenerationRequest],
    random_adapter: Callable[..., Adapter],
    trimmed: list[SharedModel],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    targets = TARGETS[model_type]
    model, plain = packing_model(model_type, targets), load_tiny(model_type, targets=targets)
    versions = [random_adapter(model, version + 1, rank=8, size=0.1) for version in range(num_versions)]
    prefill, memory = make_prefill(model, 400)

    def worst_of(apart: int) -> float:
        lengths = [120, 30, 1, 90, 64]
        jobs = [
            job_of(memory, ask(str(place), prompt(length, place)), versions[place * apart % num_versions])
            for place, length in enumerate(lengths)
        ]
        assert len(compute_all(prefill, jobs)) == 1
        return worst(plain, jobs)

    assert worst_of(1) < 5e-4
    assert worst_of(2) < 5e-4
    assert trimmed == [model, model]
    monkeypatch.setattr(flat_prefill, "Read", lambda places_C, _: Read(places_C, None))
    assert (worst_of(1) > 1e-2) == (num_versions > 1), "rows of the unit are not those of its last tokens"


def test_a_unit_has_a_few_versions_and_those_of_its_own_tokens(
    make_prefill: Callable[..., tuple[FlatPrefill, FakeMemory]],
    load_tiny: Callable[..., SharedModel],
    ask: Callable[..., GenerationRequest],
    random_adapter: Callable[..., Adapter],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = load_tiny("llama")
    prefill, memory = make_prefill(model, 100)
    asked: list[int] = []

    def can_stack(_: LoraSelector, adapters: Sequence[Adapter]) -> bool:
        asked.append(len(adapters))
        return True

    monkeypatch.setattr(LoraSelector, "can_stack", can_stack)
    adapters = [random_adapter(model, version) for version in range(1, 11)]
    for length, expected in ((5, 8), (30, 4), (60, 2)):
        jobs = [job_of(memory, ask(str(place), prompt(length, place)), one) for place, one in enumerate(adapters)]
        assert len(prefill.for_one_unit(jobs)) == expected
    assert asked == [8, 4, 2]


def test_log_probs_of_a_prompt_come_from_its_own_chunks(
    make_prefill: Callable[..., tuple[FlatPrefill, FakeMemory]],
    load_tiny: Callable[..., SharedModel],
    ask: Callable[..., GenerationRequest],
    trimmed: list[SharedModel],
) -> None:
    model = load_tiny("llama")
    prefill, memory = make_prefill(model, 100)
    jobs = [job_of(memory, ask(str(place), prompt(90, place), prompt_logprobs=0)) for place in range(2)]
    compute_all(prefill, jobs)
    for job in jobs:
        assert job.scorer is not None
        found = [one.logprob for one in job.scorer.read() if one is not None]
        logits_TV = model.head(model.hidden(mx.array([job.tokens]), model.make_cache(), None)[0])
        logprobs_TV = logits_TV - mx.logsumexp(logits_TV, axis=-1, keepdims=True)
        expected = mx.take_along_axis(logprobs_TV[:-1], mx.array(job.tokens[1:])[:, None], axis=-1)[:, 0].tolist()
        assert found == pytest.approx(expected, abs=1e-4)
    assert trimmed == []


def test_ended_sequences_are_kept_with_their_pages(
    make_prefill: Callable[..., tuple[FlatPrefill, FakeMemory]],
    load_tiny: Callable[..., SharedModel],
    ask: Callable[..., GenerationRequest],
) -> None:
    prefill, memory = make_prefill(load_tiny("llama"), 100)
    sequences = [job_of(memory, ask(name, prompt(30, 1))).sequences[0] for name in ("ended", "runs", "broken")]
    for sequence in sequences:
        sequence.tokens = [1, 2, 3]
    sequences[0].finish_reason = sequences[2].finish_reason = "stop"
    sequences[2].is_broken = True
    batch = PagedDecodeBatch.__new__(PagedDecodeBatch)
    batch.tables = [memory.table(1) for _ in sequences]
    decoder = SimpleNamespace(sequences=sequences, batch=batch)
    assert prefill.keep_ended(cast(Any, decoder)) == []
    assert memory.kept == [("ended", 32)]


@pytest.mark.parametrize(("model_type", "has_versions"), [("llama", False), ("llama", True), ("qwen3_moe", True)])
def test_a_trace_serves_other_tokens_positions_and_pages(
    model_type: str,
    has_versions: bool,
    packing_model: Callable[..., SharedModel],
    random_adapter: Callable[..., Adapter],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def write(heads: Sequence[mx.array], _: mx.array, __: mx.array, slots_M: mx.array, ___: object) -> mx.array:
        return heads[0][:, :, 0] + heads[1].sum() + slots_M[:, None, None] / 100

    def attend(queries: mx.array, _: mx.array, __: mx.array, pages: mx.array, tiles: mx.array, **___: Any) -> mx.array:
        return queries + (pages.sum() + tiles.sum()) / 1000

    model, num_traced = packing_model(model_type, TARGETS[model_type]), 0
    selector = LoraSelector(model)
    versions = [random_adapter(model, version, rank=8) if has_versions else None for version in (1, 2)]
    monkeypatch.setattr(flat_prefill, "fits_pages", lambda *_: True)
    shapes = head_shapes(model)
    monkeypatch.setattr(flat_prefill, "write_pages", write)
    monkeypatch.setattr(flat_prefill, "attend_pages", attend)
    plain, compiled, pools = FlatForward(model, shapes), FlatForward(model, shapes), [mx.zeros((1, 1))] * 4
    compiled._is_compiled = True
    hidden = compiled._hidden

    def count(*arguments: Any) -> mx.array:
        nonlocal num_traced
        num_traced += 1
        return hidden(*arguments)

    monkeypatch.setattr(compiled, "_hidden", count)
    results = []
    for chunks, read in (([Chunk(0, 20, [3]), Chunk(64, 70, [4, 5])], [19, 25]), ([Chunk(5, 9, [1])], [3, 0])):
        arrays = lay_out(chunks, 32, shapes)
        tokens_M, read_C = mx.arange(32) + chunks[0].end, mx.array(read)
        lora, read_lora = selector.select_flat(versions, [chunks[0].size, 32 - chunks[0].size], read)
        results += [plain(tokens_M, arrays, pools, lora), compiled(tokens_M, arrays, pools, lora)]
        trimmed_CH = compiled(tokens_M, arrays, pools, lora, Read(read_C, read_lora))
        assert mx.allclose(trimmed_CH, results[-1][read_C], atol=1e-4).item()
    assert mx.allclose(results[0], results[1], atol=1e-4).item()
    assert mx.allclose(results[2], results[3], atol=1e-4).item()
    assert not mx.allclose(results[0], results[2], atol=1e-2).item()
    assert num_traced == 2


def test_models_that_attend_in_another_way_do_not_fit(
    load_tiny: Callable[..., SharedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not fits(load_tiny("llama"))
    monkeypatch.setattr(flat_prefill, "has_kernels", lambda: True)
    assert not fits(load_tiny("llama"))  # float32
    monkeypatch.setattr(flat_prefill, "fits_pages", lambda *_: True)
    found = [fits(load_tiny(name)) for name in ("llama", "gemma3_text", "deepseek_v3", "mamba")]
    assert found == [True, True, False, False]
