"""Which speculation the settings mean for a model on this device."""

import logging

import mlx.core as mx

from parallm.engine.draft_speculation import DraftSpeculation
from parallm.engine.settings import SpeculationSettings
from parallm.engine.speculation import FIXED_COST, NgramSpeculation, Speculation
from parallm.errors import ConfigError, ModelError
from parallm.model.attention import MIN_ROWS
from parallm.model.load import load_shared_model
from parallm.model.settings import ModelSettings
from parallm.model.shared_model import SharedModel

NUM_COMPARED = 256
"""Tokens whose texts are compared to tell whether two tokenizers are the same."""

logger = logging.getLogger(__name__)


def make_speculation(settings: SpeculationSettings, model: SharedModel, max_context: int) -> Speculation:
    """Speculation for this model on this device; loads the draft model, on the device thread.

    Raises ConfigError where it is asked for by name and cannot be.
    """
    is_on = settings.method != "none"
    if is_on and not model.is_batch_invariant:
        reason = f"{model.name} runs row by row, and what a row has computed cannot be taken back"
        if settings.method != "auto":
            raise ConfigError(f"engine.speculation.method={settings.method}: {reason}; use auto or none")
        logger.info("no speculation: %s", reason)
        is_on = False
    if settings.method == "draft":
        return _with_draft_model(settings, model, max_context)
    if settings.method == "auto" and mx.default_device() != mx.Device(mx.cpu):
        is_on = False  # a step is bounded by Python there, runs ahead, and has kernels for one token a row
    return NgramSpeculation(settings, is_on=is_on, max_context=max_context)


def _with_draft_model(settings: SpeculationSettings, model: SharedModel, max_context: int) -> DraftSpeculation:
    assert settings.draft_model is not None, "the settings are checked"
    name = f"engine.speculation.draft_model={settings.draft_model}"
    try:
        draft = load_shared_model(ModelSettings(path=settings.draft_model, trust_remote_code=model.trusts_code))
    except ModelError as error:
        raise ConfigError(f"{name}: {error}") from error
    if not draft.is_batch_invariant:
        raise ConfigError(f"{name}: what it has computed cannot be taken back; use a model with plain attention")
    if draft.max_context < max_context:
        raise ConfigError(f"{name}: it knows {draft.max_context} positions; set engine.max_context to no more")
    if _texts(draft) != _texts(model):
        raise ConfigError(f"{name}: its tokenizer is not that of {model.name}; use a smaller model of the same family")
    cost = (FIXED_COST + MIN_ROWS) * draft.base_bytes / model.base_bytes
    return DraftSpeculation(model=draft, most=settings.num_tokens, cost=cost, max_context=max_context)


def _texts(model: SharedModel) -> list[str]:
    """What some of the tokens mean, and all that end a text."""
    tokens = model.tokenizer.encode("".join(chr(place) for place in range(32, 127)))
    texts = [model.tokenizer.token_text(token) for token in range(NUM_COMPARED)]
    return [*map(str, tokens), *texts, *map(str, sorted(model.tokenizer.eos_token_ids))]
