"""What `install_recurrence` changes in the modules of models."""

from collections.abc import Callable

import mlx.core as mx
import pytest

from parallm.model.patches import forward
from parallm.model.patches.forward import FusedNorm
from parallm.model.patches.recurrence import install_recurrence
from parallm.model.shared_model import SharedModel


def test_a_model_whose_layers_have_classes_of_ours_computes(
    load_tiny: Callable[..., SharedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with CUDA, where norms are ours before recurrences are installed and no operation takes the fast exp."""
    model = load_tiny("qwen3_5", rank=3)
    for layer in model.trunk.layers:
        layer.input_layernorm.__class__ = FusedNorm
    install_recurrence(model.base)
    monkeypatch.setattr(forward, "is_slow", lambda _: False)
    hidden = model.hidden(mx.array([[1, 2, 3]]), model.make_cache(), None)
    assert mx.isfinite(hidden).all()
