"""Models of mlx-lm with random weights of some shape."""

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import _get_classes, load_tokenizer

from bench.workers.loads import Shape
from parallm.model.chat.tokenizer import ChatTokenizer
from parallm.model.load import NANO, share_model
from parallm.model.quantized import cast
from parallm.model.settings import LoraSettings, ModelSettings
from parallm.model.shared_model import SharedModel


def random_base(shape: Shape) -> nn.Module:
    """mlx-lm's own model: bfloat16 on a GPU, float32 on a CPU; quantized where the shape says so. Not evaluated."""
    on_gpu = mx.default_device() != mx.Device(mx.cpu)
    model_class, arguments_class = _get_classes(shape)
    base: nn.Module = model_class(arguments_class.from_dict(shape))
    cast(base, mx.bfloat16 if on_gpu else mx.float32)
    if "quantization" in shape:
        nn.quantize(base, **shape["quantization"])
    return base


def random_model(
    shape: Shape, dtype: str = "auto", tokenizer: str | None = None, targets: tuple[str, ...] | None = None
) -> SharedModel:
    """The same, as our engine and our learner use it; `auto` is as `random_base` says. `tokenizer`: its folder;
    `targets`: as `model.lora.targets`."""
    settings = ModelSettings(dtype=dtype, lora=LoraSettings(targets=targets))  # type: ignore[arg-type]  # it checks
    return share_model(random_base(shape), shape, ChatTokenizer(load_tokenizer(Path(tokenizer or NANO))), settings)
