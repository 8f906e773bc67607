"""LoRA on quantized bases: gradients are those on the same base with its weights written out."""

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.convert import convert

from parallm.device.streams import DeviceStreams
from parallm.learner.learner import Learner
from parallm.learner.passes import gradient
from parallm.learner.settings import LearnerSettings
from parallm.model import quantized as quantized_module
from parallm.model.adapters.adapter import Adapter
from parallm.model.kernels import unpack
from parallm.model.load import load_shared_model
from parallm.model.quantized import UnpackingEmbedding, UnpackingLinear
from parallm.model.settings import LoraSettings, ModelSettings
from parallm.model.shared_model import SharedModel
from parallm.reports import UpdateReport
from parallm.types import TrajectoryGroup

Changes = dict[str, mx.array]
Update = Callable[[SharedModel], tuple[UpdateReport, Changes]]


@pytest.fixture
def update(
    streams: DeviceStreams, make_start: Callable[..., Adapter], make_group: Callable[..., TrajectoryGroup]
) -> Update:
    """The change of an adapter's arrays, which with so large an epsilon is about their gradient."""
    groups = [make_group(1, (12, 3, 1), (1.0, 0.0, 0.5)), make_group(2, (5, 6), (0.0, 1.0))]
    settings = LearnerSettings(warmup_steps=0, learning_rate=1.0, epsilon=1.0, max_gradient_norm=1e9)

    def run(model: SharedModel) -> tuple[UpdateReport, Changes]:
        start = make_start(model)
        learner = Learner(model, streams, settings, start=start, total_steps=10, seed=0)
        report = list(learner.update(groups, step=0, max_tokens=40))[-1]
        assert isinstance(report, UpdateReport)
        return report, {name: array - start.arrays[name] for name, array in learner.adapter.arrays.items()}

    return run


@pytest.fixture(params=["qwen3", "starcoder2"])
def quantized(request: pytest.FixtureRequest, tiny_quantized: Callable[..., Path]) -> Path:
    """Its head is its embedding; its linear layers have biases."""
    return tiny_quantized(request.param, bits=4)


@pytest.fixture
def written_out(quantized: Path, tmp_path: Path) -> Path:
    """The same base as a plain float32 model."""
    convert(str(quantized), str(tmp_path / "plain"), dequantize=True)
    return tmp_path / "plain"


def load(folder: Path, how: str = "auto") -> SharedModel:
    return load_shared_model(ModelSettings(path=str(folder), quantized=how, lora=LoraSettings(rank=4)))  # type: ignore[arg-type]


@pytest.mark.cpu
@pytest.mark.parametrize("how", ["packed", "unpacked"])
def test_gradients_are_to_the_bit_those_on_the_base_written_out(
    how: str, quantized: Path, written_out: Path, update: Update
) -> None:
    report, changes = update(load(quantized, how))
    plain_report, expected = update(load(written_out))
    assert report.loss == plain_report.loss
    assert {name: array.tolist() for name, array in changes.items()} == {
        name: array.tolist() for name, array in expected.items()
    }
    assert max(mx.abs(array).max().item() for array in changes.values()) > 1e-3


def test_products_of_mlx_by_packed_weights_give_them_too(
    quantized: Path, written_out: Path, update: Update, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("parallm.model.load.arrange_quantized", lambda *_: None)  # as on a GPU
    model = load(quantized)
    assert any(type(module) is nn.QuantizedLinear for module in model.base.modules())
    _, changes = update(model)
    _, expected = update(load(written_out))
    largest = max(mx.abs(array).max().item() for array in expected.values())
    for name, array in expected.items():
        assert mx.abs(changes[name] - array).max().item() < 1e-5 * largest, name


@pytest.mark.cpu
@pytest.mark.parametrize("is_kept", [True, False])
def test_a_pass_on_cuda_unpacks_its_head_once(
    is_kept: bool, quantized: Path, written_out: Path, update: Update, monkeypatch: pytest.MonkeyPatch
) -> None:
    times: Counter[type[nn.Module]] = Counter()

    def unpacked(layer: nn.Module, dtype: mx.Dtype) -> mx.array:
        times[type(layer)] += 1
        return unpack.unpacked(layer, dtype)

    model = load(quantized, "packed")
    monkeypatch.setattr(quantized_module, "on_cuda", lambda: True)
    monkeypatch.setattr(quantized_module, "MANY_ROWS", 1)
    monkeypatch.setattr(quantized_module, "unpacked", unpacked)
    if not is_kept:
        monkeypatch.setattr(gradient, "kept_unpacked", nullcontext)
    _, changes = update(model)
    assert (times[UnpackingEmbedding] == 1) == is_kept
    assert times[UnpackingLinear] > sum(type(module) is UnpackingLinear for module in model.trunk.modules())
    _, expected = update(load(written_out))
    for name, array in expected.items():
        assert mx.allclose(changes[name], array, atol=1e-5, rtol=1e-4), name
