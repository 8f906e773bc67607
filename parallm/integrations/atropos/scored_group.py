"""One group as an environment has posted it, read and checked. Pure; called by `Intake`.

Field names are those of atroposlib 0.4.0 (`ScoredData` in atroposlib/api/server.py). Null and empty lists mean absent.
Axis: T tokens of a sequence, prompt included.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from parallm.rollout.scoring import MAX_REWARD

MASKED = -100
"""Value in `masks` of a token that is context; a trained token stands there itself."""
REQUIRED = ("tokens", "masks", "scores")
OPTIONAL = ("inference_logprobs", "advantages", "overrides")
"""Lists of one value for each sequence."""
MAX_FLOAT32 = float(np.finfo(np.float32).max)

WELL_FORMED = {
    "stale": "older than trainer.max_off_policy_steps allows; raise it, or give environments "
    "--env.max_batches_offpolicy 1",
    "no_signal": "all scores equal in all groups of a batch",
}
"""Reasons of well-formed groups, which are not kept in quarantine.jsonl."""


class GroupRefused(Exception):
    """A group that must not be trained on. The README of this folder lists the reasons."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    max_tokens: int
    """Longest sequence."""
    num_token_ids: int
    """Size of the model's vocabulary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredSequence:
    tokens_T: np.ndarray
    """int32."""
    trained_T: np.ndarray
    """bool."""
    score: float
    logprobs_T: np.ndarray | None
    """float32, the log-probs that the environment got when it sampled; they count at trained tokens only."""
    advantages_T: np.ndarray | None
    """float32, where the environment sends its own."""
    temperature: float | None
    """Temperature that the environment names; mostly none."""
    is_zeroed: bool
    """Whether its score counts in its group, while nothing is learned from its tokens."""
    is_demonstration: bool
    """Whether it is to be imitated: no model has sampled it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    sequences: tuple[ScoredSequence, ...]
    env_id: int | None


def read_group(value: object, limits: Limits) -> ScoredGroup:
    """Read what an environment has posted. Raises GroupRefused."""
    if not isinstance(value, Mapping):
        raise GroupRefused("malformed", f"a group should be an object, not {type(value).__name__}")
    if value.get("images"):
        raise GroupRefused("images", "the model reads no images")
    rows = _rows(value, "tokens")
    if not rows:
        raise GroupRefused("empty", "the group has no sequence")
    columns = {name: _rows(value, name, len(rows)) for name in REQUIRED}
    columns |= {name: _rows(value, name, len(rows)) for name in OPTIONAL if value.get(name)}
    shared = [_object(value, name) for name in ("generation_params", "group_overrides")]
    sequences = tuple(
        _sequence(f"sequence {index}", {name: column[index] for name, column in columns.items()}, shared, limits)
        for index in range(len(rows))
    )
    if not any(sequence.trained_T.any() for sequence in sequences):
        raise GroupRefused("no_trained_token", "every token of the group is masked")
    env_id = value.get("env_id")
    return ScoredGroup(sequences=sequences, env_id=env_id if isinstance(env_id, int) else None)


def _sequence(
    where: str, values: Mapping[str, Any], shared: Sequence[Mapping[str, Any]], limits: Limits
) -> ScoredSequence:
    """`shared` are options of the sampling and of the group; the first that names a value counts, after its own."""
    tokens_T = _integers(values["tokens"], f"tokens of {where}")
    if len(tokens_T) > limits.max_tokens:
        raise GroupRefused("too_long", f"{where} has {len(tokens_T)} tokens, the limit is {limits.max_tokens}")
    masks_T = _integers(values["masks"], f"masks of {where}")
    if len(masks_T) != len(tokens_T):
        raise GroupRefused("ragged", f"{where} has {len(tokens_T)} tokens and {len(masks_T)} masks")
    _check_tokens(tokens_T, masks_T, where, limits)
    trained_T = masks_T != MASKED
    own, of_group = _object(values, "overrides"), shared[-1]
    logprobs_T = _floats(values, "inference_logprobs", where, trained_T)
    if logprobs_T is not None and (wrong_T := trained_T & (logprobs_T > 0)).any():
        index = int(np.flatnonzero(wrong_T)[0])
        detail = f"{where}, place {index}: a trained token has {logprobs_T[index]:g}, no log-prob"
        raise GroupRefused("wrong_logprobs", detail)
    advantages_T = _floats(values, "advantages", where, trained_T)
    if advantages_T is not None and (np.abs(advantages_T[trained_T]) > MAX_REWARD).any():
        raise GroupRefused("too_large", f"advantages of {where} are beyond {MAX_REWARD:g}")
    return ScoredSequence(
        tokens_T=tokens_T.astype(np.int32),
        trained_T=trained_T,
        score=_score(values["scores"], where),
        logprobs_T=logprobs_T,
        advantages_T=advantages_T,
        temperature=_temperature([own, *shared], where),
        is_zeroed=bool(own.get("set_advantage_to_zero", False)),
        is_demonstration=bool(own.get("sft", of_group.get("sft", False))),
    )


def _check_tokens(tokens_T: np.ndarray, masks_T: np.ndarray, where: str, limits: Limits) -> None:
    unknown_T = (tokens_T < 0) | (tokens_T >= limits.num_token_ids)
    if unknown_T.any():
        token = int(tokens_T[unknown_T][0])
        raise GroupRefused("unknown_token", f"{where} has token {token}; the model has {limits.num_token_ids}")
    wrong_T = (masks_T != MASKED) & (masks_T != tokens_T)
    if wrong_T.any():
        index = int(np.flatnonzero(wrong_T)[0])
        mask, token = int(masks_T[index]), int(tokens_T[index])
        raise GroupRefused("wrong_mask", f"{where}, place {index}: {mask} is neither {MASKED} nor token {token}")
    if len(masks_T) and masks_T[0] != MASKED:
        raise GroupRefused("wrong_mask", f"{where}: the first token is trained, but nothing predicts it")


def _score(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise GroupRefused("malformed", f"the score of {where} is no number")
    if not abs(value) <= MAX_REWARD:
        reason = "too_large" if isinstance(value, int) or math.isfinite(value) else "not_finite"
        raise GroupRefused(reason, f"the score of {where} is {value}; the limit is {MAX_REWARD:g} either way")
    return float(value)


def _floats(values: Mapping[str, Any], name: str, where: str, trained_T: np.ndarray) -> np.ndarray | None:
    """float32 (T,), finite at trained tokens; None without values."""
    value, what = values.get(name), f"{name} of {where}"
    if value is None or value == []:
        return None
    values_T = _array(value, what)
    if values_T.dtype.kind not in "if":
        raise GroupRefused("malformed", f"{what} are no numbers")
    if len(values_T) != len(trained_T):
        raise GroupRefused("ragged", f"{what}: {len(values_T)} for {len(trained_T)} tokens")
    with np.errstate(over="ignore"):
        values_T = values_T.astype(np.float32)
    if not np.isfinite(values_T[trained_T]).all():
        raise GroupRefused("not_finite", f"{what} are not all finite")
    return values_T


def _integers(value: object, what: str) -> np.ndarray:
    values_T = _array(value, what)
    if len(values_T) and values_T.dtype.kind != "i":
        raise GroupRefused("malformed", f"{what} are no integers")
    return values_T.astype(np.int64)


def _array(value: object, what: str) -> np.ndarray:
    try:
        values_T = np.array(value) if isinstance(value, list) else None
    except ValueError:  # nested lists of several lengths
        values_T = None
    if values_T is None or values_T.ndim != 1:
        raise GroupRefused("malformed", f"{what} should be a list of numbers")
    return values_T


def _temperature(options: Sequence[Mapping[str, Any]], where: str) -> float | None:
    value = next((part["temperature"] for part in options if part.get("temperature") is not None), None)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_FLOAT32:
        raise GroupRefused("malformed", f"the temperature of {where} is {value!r}")
    return float(value)


def _rows(value: Mapping[str, Any], name: str, count: int | None = None) -> list[Any]:
    rows = value.get(name)
    if not isinstance(rows, list):
        raise GroupRefused("malformed", f"{name} should be a list")
    if count is not None and len(rows) != count:
        raise GroupRefused("ragged", f"{name}: {len(rows)} for {count} sequences")
    return rows


def _object(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    member = values.get(name) or {}
    if not isinstance(member, Mapping):
        raise GroupRefused("malformed", f"{name} should be an object, not {type(member).__name__}")
    return member
