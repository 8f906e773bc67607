"""Wire types of the routes about training."""

import math
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, Field, PlainValidator

from parallm.server.answer_schemas import WeightVersions
from parallm.server.schemas import FIRST_FAULT, LARGEST_INT, Wire, is_tokens

MOST_TRAJECTORIES = 4096
LEAST_TEMPERATURE = 0.01


def read_tokens(value: object) -> list[int]:
    if not isinstance(value, list) or not value or not is_tokens(value):
        raise ValueError("should be a list of token ids that is not empty")
    return value


def read_text_or_tokens(value: object) -> str | list[int]:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and is_tokens(value):
        return value
    raise ValueError("should be a text or a list of token ids, and not empty")


def read_logprobs(value: object) -> list[float]:
    """By hand: strict and stops at the first wrong item."""
    if not isinstance(value, list) or not all(type(item) in (int, float) and -math.inf < item <= 0 for item in value):
        raise ValueError("should be a list of log-probabilities, which are 0 or less")
    return [float(item) for item in value]


def read_mask(value: object) -> list[bool]:
    if not isinstance(value, list) or not all(item in (0, 1) for item in value) or not any(value):
        raise ValueError("should be a list of true and false, or 1 and 0, with one true at least")
    return [bool(item) for item in value]


def fits_float32(value: float) -> float:
    """What the learner computes with."""
    if abs(value) > float(np.finfo(np.float32).max):
        raise ValueError("should be a number that float32 can hold")
    return value


TextOrTokens = Annotated[str | list[int], PlainValidator(read_text_or_tokens, json_schema_input_type=str | list[int])]
Tokens = Annotated[list[int], PlainValidator(read_tokens, json_schema_input_type=list[int])]


class TrajectoryBody(Wire):
    """A completion with its reward. An answer of `/generate` with a `policy_version` is one, with `reward` added."""

    prompt: TextOrTokens | None = None
    prompt_ids: Tokens | None = None
    """Exactly one of these two."""
    completion: TextOrTokens | None = None
    """A text is taken to its end, with the model's end token unless `finish_reason` is `length`."""
    completion_ids: Tokens | None = None
    """Exactly one of these two, or `text` alone."""
    text: str | None = None
    """Of `completion_ids`, for people; without them it is what `completion` is."""
    reward: Annotated[float, AfterValidator(fits_float32)]
    group: str | int | None = None
    """Trajectories of one group are compared; without it those of one prompt."""
    logprobs: Annotated[list[float], PlainValidator(read_logprobs, json_schema_input_type=list[float])] | None = None
    """Of the completion's tokens as they were sampled; without them they are recomputed."""
    policy_version: Annotated[int, Field(ge=0, le=LARGEST_INT)] | None = None
    """That sampled it; `weight_versions` counts more."""
    weight_versions: Annotated[list[WeightVersions], FIRST_FAULT] | None = None
    loss_mask: Annotated[list[bool], PlainValidator(read_mask, json_schema_input_type=list[bool])] | None = None
    """Of the completion's tokens, those to learn from."""
    temperature: Annotated[float, Field(ge=LEAST_TEMPERATURE, le=2)] = 1.0
    finish_reason: Literal["stop", "length"] = "stop"
    request_id: str | None = None
    step_id: int | str | None = None
    model: str | None = None
    metadata: Any = None
    """These four are accepted and unused: an answer may come back as it is, and they change nothing in an update."""


class TrainingBody(Wire):
    policy: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    """One of several policies; without it all of them."""


class UpdateBody(TrainingBody):
    """Without `trajectories` one more step of training, with what it collects itself."""

    trajectories: (
        Annotated[list[TrajectoryBody], Field(min_length=1, max_length=MOST_TRAJECTORIES, fail_fast=True)] | None
    ) = None
    update_inference: bool | None = None
    """Whether clients get the new version; without it as after a step, which `trainer.publish_if` says."""
    checkpoint_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}$")] | None = None
    """Save it under this name, in a checkpoint that stays."""


class CheckpointAnswer(Wire):
    folders: dict[str, str]
    """Of each policy's checkpoint, on the server's disk."""
