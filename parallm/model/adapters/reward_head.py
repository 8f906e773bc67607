"""Reward models: an adapter with one more array, the head that turns the hidden state of a last token into a score.

The trunk is the base with the adapter's LoRA; nothing of the base is copied. Axes: H hidden.
"""

import logging
from pathlib import Path

import mlx.core as mx

from parallm.errors import AdapterError
from parallm.model.adapters.adapter import REWARD_HEAD, Adapter, with_arrays
from parallm.model.adapters.files import base_of, read_adapter
from parallm.model.shared_model import SharedModel
from parallm.seeds import mix

logger = logging.getLogger(__name__)


def is_reward_model(adapter: Adapter) -> bool:
    return REWARD_HEAD in adapter.arrays


def with_reward_head(adapter: Adapter, model: SharedModel, seed: int) -> Adapter:
    """`adapter` as version 0 of a reward model, with a new head; a reward model stays as it is.

    The head is drawn from a normal distribution of variance 1 / (hidden + 1), as in section 3.4 of
    https://arxiv.org/abs/2009.01325. Raises AdapterError if the base has no hidden states to read.
    """
    if is_reward_model(adapter):
        return adapter
    hidden = _hidden_size(model)
    head_H = mx.random.normal((hidden,), key=mx.random.key(mix(seed, 1))) / (hidden + 1) ** 0.5
    return with_arrays(adapter, {**adapter.arrays, REWARD_HEAD: head_H}, version=0)


def read_reward_model(folder: Path, model: SharedModel) -> Adapter:
    """The reward model in `folder`. Raises AdapterError unless it is one and was trained on this base."""
    trained_on, here = base_of(folder), model.sha256
    if not trained_on:
        logger.warning("%s does not say which base it was trained on; its shapes alone are checked", folder)
    elif trained_on != here:
        raise AdapterError(
            f"the reward model in {folder} was trained on another base (sha256 {trained_on[:12]}) than {model.name} "
            f"(sha256 {here[:12]}), which this run loads; its scores would mean nothing. Set model.path and "
            "model.dtype to those of its run, or train a reward model on this base with learner=reward_model"
        )
    adapter = read_adapter(folder, model.targets, model_type=model.model_type)
    if not is_reward_model(adapter):
        raise AdapterError(
            f"the adapter in {folder} is no reward model: it has no {REWARD_HEAD}; train one with learner=reward_model"
        )
    if adapter.arrays[REWARD_HEAD].size != _hidden_size(model):
        raise AdapterError(
            f"the reward model in {folder} reads {adapter.arrays[REWARD_HEAD].size} hidden numbers, the base has "
            f"{_hidden_size(model)}; set model.path to the base that it was trained on"
        )
    return adapter


def refuse_head(adapter: Adapter, where: str, way_out: str) -> None:
    """Raise AdapterError for a reward model or a classifier where text is to be generated; `where` names it for
    people."""
    if is_reward_model(adapter):
        raise AdapterError(f"{where} is a reward model: it scores completions and writes none; {way_out}")
    if adapter.head is not None:
        rows = len(adapter.head)
        raise AdapterError(f"{where} has a head of {rows} rows: it classifies texts and writes none; {way_out}")


def _hidden_size(model: SharedModel) -> int:
    if model.trunk_owner is None:
        raise AdapterError(
            f"{model.name} cannot be split into trunk and head, so no hidden states can be scored; choose another base"
        )
    return model.hidden(mx.zeros((1, 1), mx.int32), None, None).shape[-1]
