"""Keys and values are counted and bounded, and what a long row needed is given back."""

from collections.abc import Callable

import pytest

from parallm.engine.engine import Engine
from parallm.engine.kv import budget
from parallm.engine.kv.budget import KvBudget, KvCost, measure_cost
from parallm.engine.kv.shapes import EMPTY, BufferShape, grown, grown_to_end
from parallm.engine.settings import EngineSettings
from parallm.errors import ContextTooLong
from parallm.model.shared_model import SharedModel
from parallm.types import GenerationRequest

Ask = Callable[..., GenerationRequest]


@pytest.mark.parametrize(
    ("architecture", "per_token", "per_sequence"),
    [("llama", 512, 0), ("gemma3_text", 1024, 0), ("gpt_bigcode", 256, 0), ("jamba", 256, 5632), ("mamba", 0, 11264)],
)
def test_a_token_costs_what_all_layers_keep_of_it(
    architecture: str, per_token: int, per_sequence: int, load_tiny: Callable[..., SharedModel]
) -> None:
    cost = measure_cost(load_tiny(architecture))
    assert (cost.per_token, cost.per_sequence) == (per_token, per_sequence)
    assert cost.of(17) == 32 * per_token + per_sequence


def test_a_layer_that_keeps_a_window_costs_no_more_than_it() -> None:
    cost = KvCost(layers=((100, None), (10, 64)), per_sequence=7)
    assert [cost.of(length) for length in (1, 64, 65)] == [1767, 7047, 8647]


def test_pools_grow_by_doubling_and_give_back_what_is_four_times_too_long() -> None:
    present, seen = EMPTY, []
    for rows, positions in [(1, 9), (9, 257), (3, 3000), (3, 1025), (3, 1024), (0, 0)]:
        present = grown(BufferShape(rows, positions), present)
        seen.append((present.num_slots, present.num_positions))
    assert seen == [(8, 256), (16, 512), (16, 4096), (16, 4096), (16, 1024), (0, 0)]


@pytest.mark.parametrize(
    ("present", "needed", "end", "then"),
    [
        (EMPTY, BufferShape(128, 128), 288, BufferShape(128, 288)),  # all that they may need, as it is near
        (EMPTY, BufferShape(128, 128), 8192, BufferShape(128, 256)),
        (EMPTY, BufferShape(4, 48), 64, BufferShape(8, 64)),
        (BufferShape(128, 288), BufferShape(100, 272), 288, BufferShape(128, 288)),  # what holds them stays
        (BufferShape(128, 256), BufferShape(35, 272), 8192, BufferShape(64, 512)),  # slots for those that are left
        (
            BufferShape(128, 288),
            BufferShape(128, 304),
            310,
            BufferShape(128, 320),
        ),  # and for rows that end a little later
        (BufferShape(128, 4096), BufferShape(35, 272), 288, BufferShape(64, 320)),  # four times too long
        (BufferShape(8, 288), BufferShape(0, 0), 0, EMPTY),
    ],
)
def test_without_compiled_steps_pools_fit_their_rows(
    present: BufferShape, needed: BufferShape, end: int, then: BufferShape
) -> None:
    assert grown_to_end(needed, present, end) == then


@pytest.mark.cpu
def test_a_request_that_could_never_fit_is_refused(
    load_tiny: Callable[..., SharedModel], ask: Ask, make_engine: Callable[..., Engine]
) -> None:
    # 80 positions in a cache of its own, and four slots of 80: of 512 bytes each
    memory = make_engine(load_tiny("llama"), settings=EngineSettings(kv_cache_bytes=5 * 80 * 512)).kv_budget
    memory.check(ask("a", range(2, 34), 44))
    with pytest.raises(ContextTooLong, match=r"take 212992 bytes; the limit is 204800; .* engine.kv_cache_bytes"):
        memory.check(ask("a", range(2, 34), 45))


@pytest.mark.cpu
@pytest.mark.parametrize(("asked", "rows"), [(None, 256), (3, 3)])
def test_a_cpu_decodes_256_rows_unless_settings_say_otherwise(asked: int | None, rows: int) -> None:
    settings = EngineSettings(max_rows=asked, kv_cache_bytes=10**9)
    assert KvBudget(settings, KvCost(layers=((1000, None),), per_sequence=0), lambda _: 0).max_rows == rows


@pytest.mark.parametrize(
    ("bytes_per_token", "gigabytes", "rows"),
    [(8_192, 50, 1024), (131_072, 50, 256), (131_072, 40, 256), (131_072, 30, 128), (131_072, 1, 128)],
)
def test_cuda_decodes_as_many_rows_of_1024_tokens_as_memory_holds(
    bytes_per_token: int, gigabytes: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "on_cuda", lambda: True)
    cost = KvCost(layers=((bytes_per_token, None),), per_sequence=0)
    assert budget.default_rows(cost, gigabytes * 10**9) == rows
