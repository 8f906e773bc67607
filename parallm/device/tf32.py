"""Whether MLX's CUDA build may round what float32 products read to TF32's 10 bits. MLX reads that once, at its first
product.

In float32, log-probs of engine and learner differ by 1e-5 without it and by 1e-2 with it. But MLX's grouped products,
those of experts, have tensor cores only with it, in 16 bits, too. So the first model of a process decides.
"""

import logging
import os

VARIABLE = "MLX_ENABLE_TF32"

logger = logging.getLogger(__name__)


class _Choice:
    is_given = False
    """Whether the environment has it."""
    model = ""
    """The model that has decided."""
    is_on = False


_choice = _Choice()


def set_default() -> None:
    """Turn TF32 off unless the environment has it on."""
    _choice.is_given = VARIABLE in os.environ
    os.environ.setdefault(VARIABLE, "0")


def choose_tf32(model: str, wants: bool | None) -> None:
    """Turn TF32 on if `model` wants it and is the first one here, before its first product. What the environment has
    stays. Logs a warning if another model has decided otherwise; None: both are right."""
    if _choice.is_given:
        return
    if not _choice.model:
        _choice.model, _choice.is_on = model, wants is True
        os.environ[VARIABLE] = str(int(_choice.is_on))
    elif wants is not None and wants != _choice.is_on:
        effect = "its experts do without tensor cores" if wants else "its float32 products are rounded to TF32"
        logger.warning(
            "%s: %s, since %s was loaded first; load it first, or start the process with %s=%d",
            *(model, effect, _choice.model, VARIABLE, wants),
        )
