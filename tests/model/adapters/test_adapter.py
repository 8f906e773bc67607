import mlx.core as mx
import pytest

from parallm.errors import AdapterError, AdapterNotFinite
from parallm.model.adapters.adapter import Adapter, checksums, make_adapter, next_version

TARGET = "model.layers.0.self_attn.q_proj"


def arrays(value: float = 1.0) -> dict[str, mx.array]:
    return {f"{TARGET}.lora_a": mx.full((6, 2), value), f"{TARGET}.lora_b": mx.zeros((2, 4))}


def adapter(version: int, name: str = "policy") -> Adapter:
    return make_adapter(arrays(version), name=name, version=version, parent=version - 1, step=version, rank=2, alpha=4)


def test_an_adapter_counts_its_parameters_and_bytes() -> None:
    made = adapter(1)
    assert (made.nbytes, made.targets) == (80, (TARGET,))


def test_the_digest_depends_on_the_values_and_not_on_order_or_version() -> None:
    one = arrays(1.0)
    same = make_adapter(dict(reversed(one.items())), version=7, rank=2, alpha=4)
    assert same.digest == make_adapter(one, version=1, rank=2, alpha=4).digest != adapter(2).digest


def test_the_digest_reads_transposed_arrays_in_their_logical_order() -> None:
    values = mx.arange(12.0).reshape(2, 6)
    transposed = arrays() | {f"{TARGET}.lora_a": values.T}
    copied = arrays() | {f"{TARGET}.lora_a": mx.contiguous(values.T)}
    assert (
        make_adapter(transposed, version=1, rank=2, alpha=4).digest
        == make_adapter(copied, version=1, rank=2, alpha=4).digest
    )


def test_a_half_precision_adapter_becomes_float32() -> None:
    half = {name: array.astype(mx.bfloat16) for name, array in arrays().items()}
    made = make_adapter(half, version=1, rank=2, alpha=4)
    assert {array.dtype for array in made.arrays.values()} == {mx.float32}


def test_arrays_of_an_adapter_cannot_be_replaced() -> None:
    with pytest.raises(TypeError):
        adapter(1).arrays[f"{TARGET}.lora_a"] = mx.zeros((6, 2))  # type: ignore[index]  # the point of the test


def test_a_target_without_its_second_array_is_refused_by_name() -> None:
    with pytest.raises(AdapterError, match=r"q_proj lacks its lora_b"):
        make_adapter({f"{TARGET}.lora_a": mx.zeros((6, 2))}, version=1, rank=2, alpha=4)


def test_arrays_of_another_rank_are_refused_with_both_shapes() -> None:
    with pytest.raises(AdapterError, match=r"lora_a \(6, 2\), lora_b \(2, 4\); rank 3 needs \(inputs, 3\)"):
        make_adapter(arrays(), version=1, rank=3, alpha=4)


@pytest.mark.parametrize(
    ("name", "value", "alpha"),
    [
        *(("lora_b", 1.0, alpha) for alpha in (2e39, 1e308)),
        *(("lora_b", 0.0, 1e308), ("lora_b", 1e37, 400.0)),
        *((name, 3.395e38, 2.0) for name in ("lora_a", "lora_b")),
    ],
)
def test_what_a_scale_makes_infinite_is_refused(name: str, value: float, alpha: float) -> None:
    given = arrays() | {f"{TARGET}.{name}": mx.full(arrays()[f"{TARGET}.{name}"].shape, value)}
    with pytest.raises(
        AdapterNotFinite, match=r"times the adapter's largest scale .* is more than float32 and bfloat16"
    ):
        make_adapter(given, version=1, rank=2, alpha=alpha)


def test_a_trained_version_is_refused_by_its_checksums() -> None:
    start = make_adapter(arrays(), version=1, rank=2, alpha=4000.0)
    large = arrays() | {f"{TARGET}.lora_b": mx.full((2, 4), 1e36)}
    with pytest.raises(AdapterNotFinite, match=r"lora_b times the adapter's largest scale 2000"):
        next_version(start, large, checksums(large, start.max_scale), step=1)
    assert next_version(start, arrays(), checksums(arrays(), start.max_scale), step=1).version == 2


def test_the_largest_scale_is_that_of_any_target() -> None:
    other = TARGET.replace("q_proj", "k_proj")
    both = arrays() | {f"{other}.lora_a": mx.zeros((6, 1)), f"{other}.lora_b": mx.zeros((1, 4))}
    made = make_adapter(both, version=1, rank=2, alpha=4, ranks={other: 1}, alphas={other: 9.0})
    assert made.max_scale == 9.0
