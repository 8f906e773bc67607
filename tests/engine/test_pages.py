"""With pages an engine samples what it samples with slots; groups share their prompt, and pages come back."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from parallm.engine import flat_prefill, paged_memory
from parallm.engine.engine import Engine
from parallm.engine.kv import block_pool
from parallm.engine.paged_batch import PagedDecodeBatch
from parallm.engine.paged_memory import PagedMemory
from parallm.engine.settings import EngineSettings
from parallm.model.adapters.adapter import Adapter
from parallm.model.adapters.table import AdapterTable
from parallm.model.kernels.cuda import on_cuda
from parallm.model.kernels.page_write import PAGE
from parallm.model.shared_model import SharedModel
from parallm.types import Completion, GenerationRequest, TokenEvent
from tests.engine.conftest import by_request, step
from tests.engine.paged_emulation import PoolsInNumpy, install_pages

Ask = Callable[..., GenerationRequest]
MakeEngine = Callable[..., Engine]
LoadTiny = Callable[..., SharedModel]
pytestmark = pytest.mark.skipif(on_cuda(), reason="emulates kernels on a CPU")
TOKEN_BYTES = 512  # of the tiny llama
PAGE_BYTES = PAGE * TOKEN_BYTES


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> PoolsInNumpy:
    return install_pages(monkeypatch)


def prompt(seed: int, length: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(2, 385, length)]


def memory_of(engine: Engine) -> PagedMemory:
    assert isinstance(engine.memory, PagedMemory)
    return engine.memory


def batches_of(engine: Engine) -> list[PagedDecodeBatch]:
    """One for each stream, of which a GPU has one."""
    batches = [decoder.batch for decoder in engine._queues["serving"].decoders]
    return [batch for batch in batches if isinstance(batch, PagedDecodeBatch)]


def run(
    make: MakeEngine, model: SharedModel, requests: Sequence[GenerationRequest], **more: object
) -> tuple[dict[str, list[Completion]], Engine]:
    events: list[TokenEvent] = []
    engine = make(model, events=events, **more)
    for request in requests:
        engine.add(request, False)
    while step(engine):
        pass
    return by_request(requests, events), engine


def assert_alike(some: dict[str, list[Completion]], others: dict[str, list[Completion]]) -> None:
    assert some.keys() == others.keys()
    for name, completions in some.items():
        assert [one.tokens for one in completions] == [one.tokens for one in others[name]]
        for one, other in zip(completions, others[name], strict=True):
            assert one.tokens
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=2e-4)


def mixed(ask: Ask, model: str = "base") -> list[GenerationRequest]:
    """Requests of many lengths, before, at and after the end of a page, and groups of them."""
    lengths = (1, 5, 62, 63, 64, 65, 127, 128, 130, 200)
    singles = [ask(f"r{length}", prompt(length, length), 40, model=model) for length in lengths]
    groups = [
        ask(f"g{length}", prompt(length, length), 9, n=3, model=model, temperature=1.0, seed=7) for length in (60, 64)
    ]
    return [*singles, *groups]


@pytest.mark.parametrize(
    ("model_type", "async_scheduling"),
    [
        ("llama", True),
        ("gemma3_text", True),
        ("gpt_oss", False),
        pytest.param("llama", False, marks=pytest.mark.slow),
        pytest.param("gemma3_text", False, marks=pytest.mark.slow),
        pytest.param("gpt_oss", True, marks=pytest.mark.slow),
    ],
)
def test_pages_give_what_slots_give(
    model_type: str,
    async_scheduling: bool,
    load_tiny: LoadTiny,
    make_engine: MakeEngine,
    ask: Ask,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, requests = load_tiny(model_type), mixed(ask)
    slots, engine = run(make_engine, model, requests)
    assert not isinstance(engine.memory, PagedMemory)
    install_pages(monkeypatch)
    pages, engine = run(make_engine, model, requests, async_scheduling=async_scheduling)
    assert_alike(slots, pages)
    assert memory_of(engine).num_held_bytes() == 0


@pytest.mark.parametrize("num_free_bytes", [0, 2**40])
def test_pools_grow_while_sequences_decode(
    num_free_bytes: int, load_tiny: LoadTiny, make_engine: MakeEngine, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, requests = load_tiny("llama"), mixed(ask)
    slots, _ = run(make_engine, model, requests)
    install_pages(monkeypatch)
    monkeypatch.setattr(block_pool, "FIRST_PAGES", 3)
    monkeypatch.setattr(paged_memory, "free_memory", lambda: num_free_bytes)
    pages, engine = run(make_engine, model, requests, settings=EngineSettings(max_rows=5))
    assert_alike(slots, pages)
    assert 3 < memory_of(engine).prefixes.num_pages < memory_of(engine).prefixes.max_pages
    assert {keys.shape[0] for keys, _ in memory_of(engine).layers} == {memory_of(engine).prefixes.num_pages}


def test_pools_grow_once_for_prompts_that_come_together(
    load_tiny: LoadTiny, make_engine: MakeEngine, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_pages(monkeypatch)
    monkeypatch.setattr(block_pool, "FIRST_PAGES", 3)
    engine = make_engine(load_tiny("llama"), settings=EngineSettings(max_rows=20, prefill_chunk=128))
    for seed in range(20):
        engine.add(ask(f"r{seed}", prompt(seed, 100), 20), False)
    sizes = set()
    while step(engine):
        sizes.add(memory_of(engine)._num_pages)
    assert sizes == {96}  # 2 pages of each prompt, and one for its first tokens: 60 of 3 * 2**n


def test_only_prompts_that_find_a_row_let_pools_grow(
    load_tiny: LoadTiny, make_engine: MakeEngine, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_pages(monkeypatch)
    engine = make_engine(load_tiny("llama"), settings=EngineSettings(max_rows=3))
    for seed in range(20):
        engine.add(ask(f"r{seed}", prompt(seed, 100), 1, n=2), False)
    assert memory_of(engine)._num_awaited() == 2 * (2 + 2)  # two jobs: prompts of two pages, two sequences


def test_versions_sample_side_by_side_and_keep_their_pages_apart(
    load_tiny: LoadTiny,
    make_engine: MakeEngine,
    ask: Ask,
    random_adapter: Callable[..., Adapter],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = load_tiny("llama")
    results = []
    for has_pages in (False, True):
        if has_pages:
            install_pages(monkeypatch)
        table = AdapterTable()
        for version in (1, 2):
            table.publish(random_adapter(model, version))
        same = prompt(1, 150)
        requests = [ask(f"{name}", same, 20, model=name) for name in ("base", "policy@1", "policy@2")]
        first, engine = run(make_engine, model, requests, table=table)
        results.append(first)
        assert engine.memory.prefixes.num_hits == 0
    assert_alike(*results)
    assert len({completions[0].tokens for completions in results[1].values()}) == 3


def test_a_group_shares_the_pages_of_its_prompt(
    pools: PoolsInNumpy, load_tiny: LoadTiny, make_engine: MakeEngine, ask: Ask
) -> None:
    engine = make_engine(load_tiny("llama"))
    engine.add(ask("a", prompt(1, 3 * PAGE + 20), 30, n=8, model="base"), False)
    engine.step("serving")
    engine.step("serving")
    tables = [table.pages for batch in batches_of(engine) for table in batch.tables]
    assert len(tables) == 8
    assert len({tuple(pages[:3]) for pages in tables}) == 1
    assert len({pages[3] for pages in tables}) == 8
    assert memory_of(engine).num_held_bytes() == (3 + 8) * PAGE_BYTES
    assert pools.num_copied == 7, "the first sequence goes on in the prompt's own page"
    engine.abort("a")
    assert engine.kv_budget.used == 0


def test_a_prompt_that_fills_its_pages_is_not_copied(
    pools: PoolsInNumpy, load_tiny: LoadTiny, make_engine: MakeEngine, ask: Ask
) -> None:
    run(make_engine, load_tiny("llama"), [ask("a", prompt(1, 2 * PAGE), 3, n=4, model="base")])
    assert pools.num_copied == 0


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_sequences_that_give_up_their_pages_get_the_same_tokens_later(
    async_scheduling: bool, load_tiny: LoadTiny, make_engine: MakeEngine, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_tiny("llama")
    requests = [ask(f"r{index}", prompt(index, 30 + 9 * index), 100, model="base") for index in range(8)]
    requests.append(ask("g", prompt(99, 70), 80, n=4, model="base", temperature=1.0, seed=3))
    slots, _ = run(make_engine, model, requests)
    install_pages(monkeypatch)
    settings = EngineSettings(kv_cache_bytes=12 * PAGE_BYTES)
    pages, engine = run(make_engine, model, requests, settings=settings, async_scheduling=async_scheduling)
    assert_alike(slots, pages)
    assert engine.scheduler.num_preempted >= 3
    assert memory_of(engine).num_held_bytes() == 0


def test_prompts_find_what_was_computed_before_them_in_its_pages(
    load_tiny: LoadTiny, make_engine: MakeEngine, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, common = load_tiny("llama"), prompt(5, 150)
    first, second = ask("a", [*common, 3, 4], 60, model="base"), ask("b", [*common, 9], 12, model="base")
    slots, _ = run(make_engine, model, [first, second], settings=EngineSettings(prefix_cache=False))
    install_pages(monkeypatch)
    events: list[TokenEvent] = []
    engine = make_engine(model, events=events)
    for request in (first, second):
        engine.add(request, False)
        while step(engine):
            pass
    answer = slots["a"][0].tokens
    third = ask("c", [*common, 3, 4, *answer[:50], 8], 5, model="base")
    engine.add(third, False)
    while step(engine):
        pass
    found = by_request([first, second, third], events)
    assert_alike(slots, {name: found[name] for name in ("a", "b")})
    assert [found[name][0].num_cached_prompt_tokens for name in "abc"] == [0, 2 * PAGE, 3 * PAGE]
    assert (engine.memory.prefixes.num_lookups, engine.memory.prefixes.num_hits) == (3, 2)
    assert engine.memory.prefixes.nbytes == 3 * PAGE_BYTES
    fresh, _ = run(make_engine, model, [third], settings=EngineSettings(prefix_cache=False))
    assert_alike(fresh, {"c": found["c"]})


def test_rows_of_all_lengths_take_little_more_than_their_tokens(
    pools: PoolsInNumpy, load_tiny: LoadTiny, make_engine: MakeEngine, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flat_prefill, "attend_pages", lambda queries, *_, **__: queries)  # numbers do not matter
    engine = make_engine(load_tiny("llama"), settings=EngineSettings(prefix_cache=False, prefill_chunk=4096))
    rng = np.random.default_rng(0)
    lengths = [int(length) for length in rng.integers(300, 900, 24)]
    for index, length in enumerate(lengths):
        engine.add(ask(f"r{index}", prompt(index, length), 40, model="base"), False)
    while engine.num_waiting():
        engine.step("serving")
    num_tokens = sum(sequence.num_cached for batch in batches_of(engine) for sequence in batch.sequences)
    assert 1 <= engine.kv_budget.used / (num_tokens * TOKEN_BYTES) <= 1.1


def test_a_request_that_needs_more_pages_than_there_are_is_refused(
    pools: PoolsInNumpy, load_tiny: LoadTiny, make_engine: MakeEngine, ask: Ask
) -> None:
    model, settings = load_tiny("llama"), EngineSettings(kv_cache_bytes=4 * PAGE_BYTES)
    budget = make_engine(model, settings=settings).kv_budget
    most = 3 * PAGE - 1  # one page is scratch, and a step after the last token may write
    budget.check(ask("a", prompt(1, 100), most - 100))
    with pytest.raises(Exception, match=r"the limit is"):
        budget.check(ask("a", prompt(1, 100), most - 99))
    found, _ = run(make_engine, model, [ask("a", prompt(1, 100), most - 100, model="base")], settings=settings)
    assert len(found["a"][0].tokens) == most - 100
