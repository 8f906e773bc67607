"""One of several ranks: the logits of bases that are divided, for `test_tensor_parallel.py`.

`python -m tests.distributed.rank_logits OUTPUT MODEL:QUANTIZED:DTYPE ...`; rank 0 writes them.
"""

import sys
from collections.abc import Mapping

from parallm.device.blas import load_blas, set_blas_threads
from parallm.device.settings import DeviceSettings

BLAS = load_blas(DeviceSettings())
set_blas_threads(BLAS, 1)

import mlx.core as mx  # noqa: E402  # after the BLAS
import numpy as np  # noqa: E402

from parallm.model.adapters.adapter import make_adapter  # noqa: E402
from parallm.model.load import load_shared_model  # noqa: E402
from parallm.model.lora.selector import LoraSelector  # noqa: E402
from parallm.model.settings import ModelSettings  # noqa: E402
from parallm.model.shared_model import SharedModel  # noqa: E402
from parallm.model.tensor_parallel import Ranks  # noqa: E402

TOKENS = (1, 5, 9, 22, 7, 3, 8, 11, 60, 61, 62)


def settings_of(case: str) -> ModelSettings:
    path, quantized, dtype = case.split(":")
    return ModelSettings(path=path, quantized=quantized, dtype=dtype)  # type: ignore[arg-type]  # it checks


def logits_of(model: SharedModel) -> Mapping[str, np.ndarray]:
    """Logits (T, V) of a prompt by the base, by an adapter, and by rows of two adapters and the base."""
    adapters = [adapter_of(model, version) for version in (1, 2)]
    loras = LoraSelector(model)
    bindings = {
        "base": loras.select([None]),
        "lora": loras.select(adapters[:1]),
        "mixed": loras.select([adapters[0], None, adapters[1]]),
    }
    logits = {}
    for name, lora in bindings.items():
        tokens_BT = mx.array([TOKENS] * (3 if name == "mixed" else 1))
        hidden_BTH = model.hidden(tokens_BT, model.make_cache(), lora)
        logits[name] = np.array(model.head(hidden_BTH.flatten(0, 1)).astype(mx.float32))
    return logits


def adapter_of(model: SharedModel, version: int):  # type: ignore[no-untyped-def]
    arrays, key = {}, mx.random.key(version)
    for target, (inputs, outputs) in model.targets.items():
        key, key_a, key_b = mx.random.split(key, 3)
        arrays[f"{target}.lora_a"] = mx.random.normal((inputs, 4), key=key_a) * 0.2
        arrays[f"{target}.lora_b"] = mx.random.normal((4, outputs), key=key_b) * 0.2
    return make_adapter(arrays, version=version, rank=4, alpha=8.0)


def main() -> None:
    group = mx.distributed.init(strict=True, backend="ring")
    output, *cases = sys.argv[1:]
    results: dict[str, np.ndarray] = {}
    for case in cases:
        model = load_shared_model(settings_of(case), Ranks(group=group))
        results |= {f"{case} {name}": logits for name, logits in logits_of(model).items()}
        results[f"{case} sha256"] = np.array(model.sha256)
        results[f"{case} bytes"] = np.array(sum(layer.nbytes for layer in weights_of(model)))
    if group.rank() == 0:
        np.savez(output, **results)  # type: ignore[arg-type]  # no result is named allow_pickle


def weights_of(model: SharedModel) -> list[mx.array]:
    """The weights of the linear layers."""
    return [layer.linear.weight for layer in model.base.modules() if hasattr(layer, "lora_context")]


if __name__ == "__main__":
    main()
