"""The first model of a process decides whether MLX's products of float32 are rounded, and others are told."""

import os

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.switch_layers import SwitchGLU

from parallm.device import tf32
from parallm.model.quantized import wants_tf32


@pytest.fixture(autouse=True)
def _new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(tf32, "_choice", tf32._Choice())


@pytest.mark.parametrize(("wants", "value"), [(True, "1"), (False, "0"), (None, "0")])
def test_the_first_model_decides(wants: bool | None, value: str) -> None:
    tf32.set_default()
    assert os.environ["MLX_ENABLE_TF32"] == "0"
    tf32.choose_tf32("first", wants)
    tf32.choose_tf32("second", not wants)
    assert os.environ["MLX_ENABLE_TF32"] == value


@pytest.mark.parametrize("given", ["0", "1"])
def test_what_the_environment_has_stays(given: str, caplog: pytest.LogCaptureFixture) -> None:
    os.environ["MLX_ENABLE_TF32"] = given
    tf32.set_default()
    for wants in (True, False):
        tf32.choose_tf32("model", wants)
    assert os.environ["MLX_ENABLE_TF32"] == given
    assert not caplog.records


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (None, True, "mixture: its experts do without tensor cores, since first was loaded first"),
        (True, False, "mixture: its float32 products are rounded to TF32, since first was loaded first"),
        (True, None, ""),
        (True, True, ""),
        (None, False, ""),
    ],
)
def test_a_later_model_is_told(
    first: bool | None, second: bool | None, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    tf32.set_default()
    tf32.choose_tf32("first", first)
    tf32.choose_tf32("mixture", second)
    assert caplog.text.count("since") == bool(said)
    assert said in caplog.text


def test_mixtures_want_it_in_16_bits() -> None:
    dense, mixture = nn.Sequential(nn.Linear(8, 8)), nn.Sequential(SwitchGLU(8, 8, 2))
    assert wants_tf32(mixture, mx.bfloat16) is True
    assert wants_tf32(mixture, mx.float32) is False
    assert wants_tf32(dense, mx.bfloat16) is None
    assert wants_tf32(dense, mx.float32) is False
