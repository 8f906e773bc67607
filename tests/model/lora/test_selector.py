"""What is made of adapters for the kernels serves whatever rows use them, as long as no other version comes."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import mlx.core as mx
import pytest

from parallm.model.adapters.adapter import Adapter
from parallm.model.lora.concatenated import ConcatenatedLora
from parallm.model.lora.linear import LoraBinding
from parallm.model.lora.segmented import SegmentedLora
from parallm.model.lora.selector import LoraSelector, training_lora
from parallm.model.lora.single import SingleLora
from parallm.model.lora.training import DropoutLora, TrainingLora
from parallm.model.shared_model import SharedModel

RowsOf = Callable[..., SegmentedLora]


@pytest.fixture
def model(load_tiny: Callable[..., SharedModel]) -> SharedModel:
    """With groups of targets as they are formed on CUDA."""
    tiny = load_tiny("llama")
    alone = [target for target in tiny.targets if not any(target in targets for targets in tiny.joined)]
    return replace(tiny, groups=(*tiny.joined, *((target,) for target in alone)))


@pytest.fixture
def loras(model: SharedModel) -> LoraSelector:
    return LoraSelector(model)


@pytest.fixture
def rows_of(model: SharedModel, loras: LoraSelector, variant: Callable[..., Adapter]) -> RowsOf:
    """The view of rows that use these versions; 0 is the base."""
    made: dict[int, Adapter] = {}

    def rows(*versions: int, rank: int = 8) -> SegmentedLora:
        for version in versions:
            if version and version not in made:
                made[version] = variant(model, version, rank=rank)
        lora = loras.select([made.get(version) for version in versions])
        assert isinstance(lora, SegmentedLora)
        return lora

    return rows


def factors_of_rows(lora: SegmentedLora, num_rows: int) -> list[mx.array | None]:
    """What each row's version has in the first array."""
    pairs = sorted(lora.order_B2.tolist()[:num_rows])
    return [None if place < 0 else lora.weights.arrays[0][place] for _, place in pairs]


def share_factors(loras: Sequence[SegmentedLora]) -> bool:
    return all(lora.weights.arrays[0] is loras[0].weights.arrays[0] for lora in loras)


def test_rows_of_the_same_versions_share_their_factors(rows_of: RowsOf) -> None:
    first, again, other = rows_of(1, 0, 2), rows_of(1, 0, 2), rows_of(2, 1, 2, 1)
    assert again is first
    assert share_factors([first, other])
    assert first.order_B2.tolist() == [[1, -1], [0, 0], [2, 1]]
    assert other.order_B2.tolist() == [[1, 0], [3, 0], [0, 1], [2, 1]]


def test_rows_of_the_base_need_no_view(loras: LoraSelector) -> None:
    assert loras.select([None, None]) is None


def test_versions_whose_rows_end_stay_where_they_are(rows_of: RowsOf) -> None:
    before, fewer = rows_of(1, 2, 3, 4), rows_of(4, 2, 4)
    assert share_factors([before, fewer, rows_of(3, 1)])
    assert fewer.order_B2.tolist() == [[1, 1], [0, 3], [2, 3]]


def test_each_row_gets_the_factors_of_its_version(rows_of: RowsOf) -> None:
    alone = {version: factors_of_rows(rows_of(version), 1)[0] for version in range(1, 6)}
    for versions in ((2, 1), (3, 0, 1), (1, 3), (5, 4, 3, 1), (4, 4), (2, 5), (1, 2, 3, 4, 5)):
        found_B = factors_of_rows(rows_of(*versions), len(versions))
        for version, found in zip(versions, found_B, strict=True):
            assert found is None if version == 0 else mx.array_equal(found, alone[version]).item()


def test_a_new_version_takes_the_place_of_one_that_no_row_uses(rows_of: RowsOf) -> None:
    rows_of(1, 2, 3, 4)
    rows_of(1, 3, 4)
    after = rows_of(1, 3, 4, 5)
    assert after.weights.num_versions == 4
    assert not share_factors([after, rows_of(1, 2)])


def test_versions_that_were_used_last_stay_where_there_is_room(rows_of: RowsOf) -> None:
    rows_of(1, 2, 3, 4)
    rows_of(1, 2)
    rows_of(2, 3)
    after = rows_of(2, 3, 5)
    assert after.weights.num_versions == 4
    assert share_factors([after, rows_of(1, 5), rows_of(1, 2, 3)])


def test_rows_that_take_turns_with_others_have_room_beside_them(rows_of: RowsOf) -> None:
    rows_of(1, 2)
    assert rows_of(3, 4).weights.num_versions == 2
    both = rows_of(1, 2)
    assert both.weights.num_versions == 4
    assert share_factors([both, rows_of(3, 4), rows_of(1, 2)])


@pytest.mark.parametrize(("count", "places"), [(1, 1), (2, 2), (5, 8), (8, 8), (9, 16), (33, 64)])
def test_any_number_of_versions_has_one_of_few_numbers_of_places(rows_of: RowsOf, count: int, places: int) -> None:
    lora = rows_of(*range(1, count + 1))
    assert {array.shape[0] for array in lora.weights.arrays} == {places}
    assert len({place for _, place in lora.order_B2.tolist() if place >= 0}) == count


def test_a_version_in_the_stack_is_not_kept_twice(rows_of: RowsOf, loras: LoraSelector) -> None:
    rows_of(1)
    rows_of(3)
    rows_of(1, 2)
    assert list(loras._packed._alone) == [("policy", 3)]
    assert rows_of(1, 0).weights.num_versions == 1
    assert list(loras._packed._alone) == [("policy", 3)]


def test_versions_of_different_ranks_are_served_apart(
    rows_of: RowsOf, loras: LoraSelector, model: SharedModel, variant: Callable[..., Adapter]
) -> None:
    before = rows_of(1, 2)
    other = variant(model, 3, rank=32)
    assert not isinstance(loras.select([other, variant(model, 1, rank=8)]), SegmentedLora)
    assert isinstance(loras.select([other]), SegmentedLora)
    assert share_factors([before, rows_of(2, 1)])


def test_what_is_forgotten_is_made_anew(rows_of: RowsOf, loras: LoraSelector) -> None:
    before = rows_of(1, 2)
    loras.clear()
    assert not share_factors([before, rows_of(1, 2)])


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("versions", "expected"),
    [((0, 0), type(None)), ((1, 1), SingleLora), ((1, 0), ConcatenatedLora), (tuple(range(1, 10)), ConcatenatedLora)],
)
def test_the_versions_of_the_rows_choose_the_implementation(
    versions: tuple[int, ...],
    expected: type[LoraBinding],
    load_tiny: Callable[..., SharedModel],
    variant: Callable[..., Adapter],
) -> None:
    model = load_tiny("llama")
    made = {version: variant(model, version) for version in {*versions} - {0}}
    assert type(LoraSelector(model).select([made.get(version) for version in versions])) is expected


@pytest.mark.parametrize(
    ("has_cuda", "dropout", "expected"), [(True, 0, TrainingLora), (False, 0, SingleLora), (True, 0.5, DropoutLora)]
)
def test_training_has_an_implementation_for_each_device(
    has_cuda: bool, dropout: float, expected: type[LoraBinding], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("parallm.model.lora.selector.on_cuda", lambda: has_cuda)
    adapter = SingleLora({"target": mx.ones((3, 16))}, {"target": mx.ones((16, 2))}, {})
    assert type(training_lora(adapter, dropout, mx.random.key(0))) is expected
