"""How much a pass computes at once, and whether it keeps all of it for its backward."""

import mlx.nn as nn

from parallm.device.memory import device_memory
from parallm.errors import ConfigError
from parallm.learner.checkpointing import can_checkpoint
from parallm.learner.settings import LearnerSettings
from parallm.model.cuda import on_cuda
from parallm.model.shared_model import SharedModel

TOKENS = 1024
CUDA_TOKENS = 5120
"""8B shape on an H200: passes of 4 rows of 1,024 are 9% faster than of 2, and 1% slower than of 8, which need 12 GB
more. Not measured on Metal, where the longest wait of decoding would grow with it."""
KEPT_SHARE = 0.5
"""Of the device's memory beside the base, for what a pass keeps."""


def pass_tokens(settings: LearnerSettings) -> int:
    """Tokens of one forward and backward pass, padding included."""
    if settings.micro_batch_tokens != "auto":
        return settings.micro_batch_tokens
    return CUDA_TOKENS if on_cuda() else TOKENS


def checkpoints_layers(settings: LearnerSettings, model: SharedModel, num_tokens: int) -> bool:
    """Whether passes that compute `num_tokens` at the same time checkpoint their layers.

    Raises ConfigError if they must and the model cannot.
    """
    possible = can_checkpoint(model)
    if settings.checkpoint_layers == "all" and not possible:
        raise ConfigError(
            "learner.checkpoint_layers=all: this architecture does not keep its layers in a list called layers; use "
            "none, and a smaller learner.micro_batch_tokens"
        )
    if settings.checkpoint_layers != "auto":
        return settings.checkpoint_layers == "all"
    room = KEPT_SHARE * max(0, device_memory() - model.base_bytes)
    return possible and num_tokens * kept_bytes(model) > room


def kept_bytes(model: SharedModel) -> int:
    """What a pass keeps for each token: about the inputs and outputs of all linear layers."""
    linears = [module for module in model.base.modules() if isinstance(module, nn.Linear | nn.QuantizedLinear)]
    return sum(map(_columns, linears)) * model.dtype.size


def _columns(linear: nn.Module) -> int:
    outputs, inputs = linear.weight.shape
    if isinstance(linear, nn.QuantizedLinear):
        inputs = inputs * 32 // linear.bits
    return int(inputs + outputs)
