"""Casting leaves alone what mlx-lm keeps as it is stored, so numbers are those of mlx-lm's own forward. On CUDA a base
in bfloat16 computes in float16."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.utils import load_model

from parallm.errors import ModelError
from parallm.model.adapters.adapter import Adapter
from parallm.model.adapters.fuse import fuse
from parallm.model.load import load_base, load_shared_model
from parallm.model.precision import may_be_float16
from parallm.model.quantized import arrange_quantized, stored_dtype
from parallm.model.settings import LoraSettings, ModelSettings
from parallm.model.shared_model import SharedModel

TOKENS = mx.array([[5, 300, 17, 9, 44, 2, 120, 7]])
KEPT = {
    "qwen3_5": {"A_log"},
    "nemotron_h": {"A_log", "e_score_correction_bias"},
    "deepseek_v3": {"e_score_correction_bias"},
    "lfm2_moe": {"expert_bias"},
    "kimi_linear": {"A_log", "dt_bias", "e_score_correction_bias"},
}
"""Architecture -> last names of the arrays that its class in mlx-lm never casts."""


@pytest.fixture(scope="module")
def half_model(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A folder in bfloat16 whose `KEPT` arrays are float32 and of use; `packs`: its experts have 8 bits."""

    def make(architecture: str, *, packs: bool = False) -> Path:
        folder = tmp_path_factory.mktemp(architecture)
        shutil.copytree(tiny_model(architecture), folder, dirs_exist_ok=True)
        base, config = load_model(folder)
        if packs:
            nn.quantize(base, 32, 8, class_predicate=lambda _, module: isinstance(module, SwitchLinear))
            (folder / "config.json").write_text(json.dumps(config | {"quantization": {"group_size": 32, "bits": 8}}))
        kept = KEPT.get(architecture, set())
        arrays = {name: half(name, array, kept) for name, array in tree_flatten(base.parameters())}
        mx.save_safetensors(str(folder / "model.safetensors"), arrays, metadata={"format": "mlx"})
        return folder

    return make


@pytest.fixture
def stored_half(tiny_model: Callable[[str], Path], tmp_path: Path) -> Callable[..., Path]:
    """A llama's folder in bfloat16, its embeddings times a factor."""

    def make(factor: float = 1.0) -> Path:
        folder = tmp_path / f"llama-{factor}"
        shutil.copytree(tiny_model("llama"), folder)
        arrays = dict(tree_flatten(load_model(folder)[0].parameters()))
        arrays["model.embed_tokens.weight"] *= factor
        arrays = {name: array.astype(mx.bfloat16) for name, array in arrays.items()}
        mx.save_safetensors(str(folder / "model.safetensors"), arrays, metadata={"format": "mlx"})
        return folder

    return make


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parallm.model.precision.on_cuda", lambda: True)


def half(name: str, array: mx.array, kept: set[str]) -> mx.array:
    if name.rpartition(".")[2] in kept:
        low = -3.0 if name.endswith("A_log") else 100.0  # slow and fast decays; biases that 16 bits would make equal
        return mx.random.uniform(low, low + 0.4, array.shape, key=mx.random.key(len(name)))
    return array.astype(mx.bfloat16) if mx.issubdtype(array.dtype, mx.floating) else array


def load(folder: Path, **settings: object) -> SharedModel:
    lora = LoraSettings(rank=4)
    return load_shared_model(ModelSettings(path=str(folder), lora=lora, **settings))  # type: ignore[arg-type]


def kept_names(base: nn.Module, dtype: mx.Dtype) -> set[str]:
    """Last names of the floating arrays of another type than `dtype`."""
    arrays = tree_flatten(base.parameters())
    return {name.rpartition(".")[2] for name, a in arrays if mx.issubdtype(a.dtype, mx.floating) and a.dtype != dtype}


@pytest.mark.parametrize(("architecture", "packs"), [("qwen3_5", False), ("lfm2_moe", True)])
def test_log_probs_in_bfloat16_are_those_of_mlx_lm_to_the_bit(
    architecture: str, packs: bool, half_model: Callable[..., Path]
) -> None:
    folder = half_model(architecture, packs=packs)
    model = load(folder, dtype="bfloat16", **({"quantized": "packed"} if packs else {}))
    expected = load_model(folder)[0](TOKENS)
    logits = model.head(model.hidden(TOKENS, model.make_cache(), None)[0])
    assert (model.dtype, logits.dtype) == (mx.bfloat16, mx.bfloat16)
    assert mx.array_equal(logits, expected[0]).item()


@pytest.mark.parametrize("architecture", sorted(KEPT))
def test_fusing_casts_only_what_mlx_lm_casts(
    architecture: str, half_model: Callable[..., Path], variant: Callable[..., Adapter]
) -> None:
    folder = half_model(architecture)
    base, config = load_base(folder, str(folder))
    fuse(base, config, variant(load(folder)), mx.float16, None)
    assert kept_names(base, mx.float16) == KEPT[architecture]


def test_unpacking_casts_only_what_mlx_lm_casts(half_model: Callable[..., Path]) -> None:
    model = load(half_model("lfm2_moe", packs=True), quantized="unpacked")
    assert kept_names(model.base, mx.float32) == set()  # stored in float32 as all else is computed
    base, _ = load_base(half_model("lfm2_moe", packs=True), "")
    arrange_quantized(base, "unpacked", mx.float16)
    assert kept_names(base, mx.float16) == {"expert_bias"}


def test_the_stored_type_is_that_of_most_numbers(half_model: Callable[..., Path]) -> None:
    base, _ = load_base(half_model("qwen3_5"), "")
    base.language_model.model.norm.weight = base.language_model.model.norm.weight.astype(mx.float32)
    assert stored_dtype(base) == mx.bfloat16


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("packs", [False, True])
def test_a_mixture_in_16_bits_on_a_cpu_is_refused_before_its_weights_are_read(
    dtype: str, packs: bool, half_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("parallm.model.load.fingerprint", lambda _: pytest.fail("weights were read"))
    with pytest.raises(ModelError, match=rf"model\.dtype={dtype}: lfm2_moe has experts.*CPU; set model\.dtype=float32"):
        load(half_model("lfm2_moe", packs=packs), dtype=dtype)


def test_on_cuda_a_base_in_bfloat16_computes_in_float16(on_cuda: None, stored_half: Callable[..., Path]) -> None:
    folder = stored_half()
    model, exact, coarse = load(folder), load(folder, dtype="float32"), load(folder, dtype="bfloat16")
    found, expected, rounded = (
        each.head(each.hidden(TOKENS, each.make_cache(), None)[0]).astype(mx.float32) for each in (model, exact, coarse)
    )
    assert (model.dtype, model.sha256) == (mx.float16, exact.sha256)  # of what `auto` chooses without it
    assert mx.linalg.norm(found - expected).item() <= 0.25 * mx.linalg.norm(rounded - expected).item()


@pytest.mark.parametrize("factor", [2e4, 1e6])
def test_on_cuda_a_base_beyond_the_range_of_float16_computes_as_without_it(
    on_cuda: None, stored_half: Callable[..., Path], factor: float
) -> None:
    assert load(stored_half(1e3)).dtype == mx.float16
    assert load(stored_half(factor)).dtype == mx.float32  # as `auto` does on a CPU


def test_a_type_that_is_asked_for_is_the_type(on_cuda: None, stored_half: Callable[..., Path]) -> None:
    assert load(stored_half(), dtype="bfloat16").dtype == mx.bfloat16


def test_only_plain_bases_in_bfloat16_are_tried(
    on_cuda: None,
    stored_half: Callable[..., Path],
    half_model: Callable[..., Path],
    tiny_model: Callable[[str], Path],
    tiny_quantized: Callable[..., Path],
) -> None:
    folders = (
        stored_half(),
        tiny_model("llama"),
        tiny_quantized("llama", bits=4),
        half_model("qwen3_5"),
        half_model("mixtral"),
    )
    found = [may_be_float16(base, config["model_type"]) for base, config in (load_base(one, "") for one in folders)]
    assert found == [True, False, False, False, False]  # float32, quantized, recurrent, experts
