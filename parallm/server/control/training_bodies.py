"""Wire types of the routes about training."""

import math
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, Field, PlainValidator

from parallm.server.answer_schemas import WeightVersions
from parallm.server.openai.translate import MIN_TEMPERATURE
from parallm.server.schemas import FIRST_FAULT, LARGEST_INT, Wire, is_tokens

MAX_TRAJECTORIES = 4096


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
    """Return the list. Faster than a validator for each item, and strict."""
    if not isinstance(value, list) or not all(type(item) in (int, float) and -math.inf < item <= 0 for item in value):
        raise ValueError("should be a list of log-probabilities, which are 0 or less")
    return [float(item) for item in value]


def read_mask(value: object) -> list[bool]:
    if not isinstance(value, list) or not all(item in (0, 1) for item in value) or not any(value):
        raise ValueError("should be a list of true and false, or 1 and 0, with one true at least")
    return [bool(item) for item in value]


def fits_float32(value: float) -> float:
    """Return the value, which the learner computes with."""
    if abs(value) > float(np.finfo(np.float32).max):
        raise ValueError("should be a number that float32 can hold")
    return value


TextOrTokens = Annotated[str | list[int], PlainValidator(read_text_or_tokens, json_schema_input_type=str | list[int])]
Tokens = Annotated[list[int], PlainValidator(read_tokens, json_schema_input_type=list[int])]


class TrajectoryBody(Wire):
    """A completion with its reward, such as an answer of `/generate` to a `policy_version`, with `reward` added."""

    prompt: TextOrTokens | None = None
    prompt_ids: Tokens | None = None
    """Prompt as token ids, in place of `prompt`."""
    completion: TextOrTokens | None = None
    """Completion. The model's end token is appended to a text unless `finish_reason` is `length`."""
    completion_ids: Tokens | None = None
    """Completion as token ids, in place of `completion`."""
    text: str | None = None
    """Text of `completion_ids`, for logs; without `completion_ids` the same as `completion`."""
    reward: Annotated[float, AfterValidator(fits_float32)]
    group: str | int | None = None
    """Trajectories of one group are compared; without groups, those of one prompt."""
    logprobs: Annotated[list[float], PlainValidator(read_logprobs, json_schema_input_type=list[float])] | None = None
    """Log-probs of the completion's tokens when they were sampled; without them they are recomputed."""
    policy_version: Annotated[int, Field(ge=0, le=LARGEST_INT)] | None = None
    """Version that sampled the completion, unless `weight_versions` says it."""
    weight_versions: Annotated[list[WeightVersions], FIRST_FAULT] | None = None
    loss_mask: Annotated[list[bool], PlainValidator(read_mask, json_schema_input_type=list[bool])] | None = None
    """True for each token of the completion to learn from; without it all."""
    temperature: Annotated[float, Field(ge=MIN_TEMPERATURE, le=2)] = 1.0
    finish_reason: Literal["stop", "length"] = "stop"
    request_id: str | None = None
    step_id: int | str | None = None
    model: str | None = None
    metadata: Any = None
    """Accepted and unused, as are `request_id`, `step_id` and `model`, so that an answer can be sent back as it is."""


class TrainingBody(Wire):
    policy: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    """One of several policies; without it all of them."""


class UpdateBody(TrainingBody):
    """An update on `trajectories`, or without them one more step of training."""

    trajectories: (
        Annotated[list[TrajectoryBody], Field(min_length=1, max_length=MAX_TRAJECTORIES, fail_fast=True)] | None
    ) = None
    update_inference: bool | None = None
    """Whether clients get the new version; without it as after a step, by `trainer.publish_if`. A version that was
    promoted stays served all the same."""
    checkpoint_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}$")] | None = None
    """Name of a checkpoint to save afterwards, which is never deleted."""


class CheckpointAnswer(Wire):
    folders: dict[str, str]
    """Folder of each policy's checkpoint, on the server's disk."""
