"""Training: status, pause, steps, updates on given trajectories, checkpoints, evaluation, end: wire types and routes.

The routes call the trainers' `Training` interface. Texts of given trajectories become tokens here.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter
from pydantic import AfterValidator, Field, PlainValidator
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from parallm.errors import InvalidRequest, Unavailable
from parallm.reports import TrainingStatus
from parallm.server.catalog import card_of, checkpoint_names, served_policy
from parallm.server.connection import body_of, json_response, received, while_connected
from parallm.server.interfaces import Tokenizer, Training
from parallm.server.openai.completion_schemas import WeightVersions
from parallm.server.openai.translate import MIN_TEMPERATURE
from parallm.server.operation.request_context import note_values
from parallm.server.request_limits import check_items, check_text, too_long
from parallm.server.schemas import FIRST_FAULT, MAX_INT, Tokens, Wire, is_tokens, parse_body
from parallm.server.service import Service
from parallm.types import GivenTrajectory, WeightSpan

FINAL_STATES = ("serving", "finished", "failed")
"""States without further steps."""
MAX_TRAJECTORIES = 4096


def read_text_or_tokens(value: object) -> str | list[int]:
    if isinstance(value, str | list) and value and (isinstance(value, str) or is_tokens(value)):
        return value
    raise ValueError("should be a text or a list of token ids, and not empty")


def read_logprobs(value: object) -> list[float]:
    """Check by hand: faster than a validator for each item, and strict."""
    if not isinstance(value, list) or not all(type(item) in (int, float) and -math.inf < item <= 0 for item in value):
        raise ValueError("should be a list of log-probabilities, which are 0 or less")
    return [float(item) for item in value]


def read_mask(value: object) -> list[bool]:
    if not isinstance(value, list) or not all(item in (0, 1) for item in value) or not any(value):
        raise ValueError("should be a list of true and false, or 1 and 0, with one true at least")
    return [bool(item) for item in value]


def fits_float32(value: float) -> float:
    if abs(value) > float(np.finfo(np.float32).max):
        raise ValueError("should be a number that float32 can hold")
    return value


TextOrTokens = Annotated[str | list[int], PlainValidator(read_text_or_tokens, json_schema_input_type=str | list[int])]


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
    policy_version: Annotated[int, Field(ge=0, le=MAX_INT)] | None = None
    """Version that sampled the completion, unless `weight_versions` says it."""
    weight_versions: Annotated[list[WeightVersions], FIRST_FAULT] | None = None
    loss_mask: Annotated[list[bool], PlainValidator(read_mask, json_schema_input_type=list[bool])] | None = None
    """True for each token of the completion to learn from; all of them without it."""
    temperature: Annotated[float, Field(ge=MIN_TEMPERATURE, le=2)] = 1.0
    finish_reason: Literal["stop", "length"] = "stop"
    request_id: str | None = None
    step_id: int | str | None = None
    model: str | None = None
    metadata: Any = None
    """Accepted and unused, as are `request_id`, `step_id` and `model`, so that an answer can be sent back as it is."""


class TrainingBody(Wire):
    policy: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    """One of several policies; all of them without it."""


class UpdateBody(TrainingBody):
    """An update on `trajectories`, or without them one more step of training."""

    trajectories: (
        Annotated[list[TrajectoryBody], Field(min_length=1, max_length=MAX_TRAJECTORIES, fail_fast=True)] | None
    ) = None
    update_inference: bool | None = None
    """Whether clients get the new version; without it `trainer.publish_if` decides, as after a step. A version that was
    promoted stays served all the same."""
    checkpoint_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}$")] | None = None
    """Name of a checkpoint to save afterwards. It is never deleted."""


class EvaluationAnswer(Wire):
    evaluations: dict[str, dict[str, Any]]
    """Row of each policy, as in `evaluations.jsonl`."""


class CheckpointAnswer(Wire):
    folders: dict[str, str]
    """Folder of each policy's checkpoint, on the server's disk."""


def parse_trajectory(body: TrajectoryBody, index: int, tokenizer: Tokenizer, max_context: int) -> GivenTrajectory:
    """Return the trajectory as tokens. Raises InvalidRequest that names it by its `index`."""
    name = f"trajectories.{index}"
    for value in (body.prompt, body.prompt_ids, body.completion, body.completion_ids, body.text):
        if isinstance(value, str):
            check_text(value, name, tokenizer, max_context)
        check_items(value, "tokens", name, max_context)
    prompt = _tokens(body, name, tokenizer)
    tokens, text = _completion(body, name, tokenizer)
    if len(prompt) + len(tokens) > max_context:
        raise too_long(name, f"{len(prompt) + len(tokens)} tokens", str(max_context))
    for field in ("logprobs", "loss_mask"):
        values = getattr(body, field)
        if values is not None and len(values) != len(tokens):
            raise InvalidRequest(
                f"{name}.{field} has {len(values)} items for {len(tokens)} tokens of the completion", f"{name}.{field}"
            )
    return GivenTrajectory(
        prompt_tokens=prompt,
        tokens=tokens,
        reward=body.reward,
        group=None if body.group is None else str(body.group),
        logprobs=None if body.logprobs is None else tuple(body.logprobs),
        weight_versions=_spans(body, name, len(tokens)),
        loss_mask=(True,) * len(tokens) if body.loss_mask is None else tuple(body.loss_mask),
        temperature=body.temperature,
        text=text,
        finish_reason=body.finish_reason,
    )


def _tokens(body: TrajectoryBody, name: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    if (body.prompt is None) == (body.prompt_ids is None):
        raise InvalidRequest(f"{name} needs either prompt or prompt_ids", f"{name}.prompt")
    prompt = body.prompt if body.prompt_ids is None else body.prompt_ids
    assert prompt is not None, "the body has exactly one of the two"
    return tokenizer.encode(prompt) if isinstance(prompt, str) else tuple(prompt)


def _completion(body: TrajectoryBody, name: str, tokenizer: Tokenizer) -> tuple[tuple[int, ...], str]:
    """Return tokens and text."""
    completion = body.completion if body.completion_ids is None else body.completion_ids
    if body.completion is not None and body.completion_ids is not None:
        raise InvalidRequest(f"{name} needs either completion or completion_ids", f"{name}.completion")
    if isinstance(completion, list):
        return tuple(completion), tokenizer.decode(completion) if body.text is None else body.text
    if completion is not None and body.text is not None and completion != body.text:
        raise InvalidRequest(f"completion and text of {name} differ; leave one of them out", f"{name}.text")
    text = body.text if completion is None else completion
    if not text:
        raise InvalidRequest(f"{name} needs a completion: completion, completion_ids or text", f"{name}.completion")
    if body.logprobs is not None or body.loss_mask is not None:
        field = "logprobs" if body.logprobs is not None else "loss_mask"
        raise InvalidRequest(f"{name}.{field} is about tokens; send completion_ids with it", f"{name}.{field}")
    end = () if body.finish_reason == "length" else (tokenizer.end_token,)
    return (*tokenizer.encode_more(text), *end), text


def _spans(body: TrajectoryBody, name: str, num_tokens: int) -> tuple[WeightSpan, ...]:
    """Return the versions of the tokens; empty if they are unknown."""
    spans = body.weight_versions
    if spans:
        starts = [0, *(span.end for span in spans)]
        if starts[-1] != num_tokens or not all(map(_continues, spans, starts)):
            raise InvalidRequest(
                f"{name}.weight_versions should cover its {num_tokens} tokens without gaps, each with a version's "
                "number",
                f"{name}.weight_versions",
            )
        return tuple(WeightSpan(version=int(span.version), start=span.start, end=span.end) for span in spans)
    if body.policy_version is not None:
        return (WeightSpan(version=body.policy_version, start=0, end=num_tokens),)
    if body.logprobs is not None:
        raise InvalidRequest(
            f"{name}.logprobs are those of a version of the policy; send its policy_version, or leave them out",
            f"{name}.policy_version",
        )
    return ()


def _continues(span: WeightVersions, start: int) -> bool:
    return span.version.isdecimal() and len(span.version) <= 9 and span.start == start < span.end


def training_routes(service: Service) -> APIRouter:
    router, given = APIRouter(), service.training

    @router.get("/v1/training/status")
    @router.get("/debug/training")
    async def training_status() -> Response:
        """What the trainer does now, and the numbers of its last step."""
        return _status_answer(service)

    @router.post("/v1/training/pause")
    async def pause(http: Request) -> Response:
        """Begin no further step. The present one ends first; then the status says `paused`."""
        body = await body_of(service, http, TrainingBody)
        training(given).pause(body.policy)
        return _status_answer(service)

    @router.post("/v1/training/resume")
    async def resume(http: Request) -> Response:
        """Begin steps again."""
        body = await body_of(service, http, TrainingBody)
        training(given).resume(body.policy)
        return _status_answer(service)

    @router.post("/v1/training/update")
    async def update(http: Request) -> Response:
        """Train on these trajectories after the present step; without any, wait for one more step."""
        body, trajectories = await received(service, http, partial(_parse_update, service))
        note_values({**body.model_dump(exclude_unset=True, exclude={"trajectories"}), **_number_of(trajectories)})
        if trajectories is None:
            return await _step(service, http, training(given), body)
        return await _train_on(service, http, training(given), body, trajectories)

    @router.post("/v1/training/checkpoint")
    @router.post("/training/checkpoint")
    async def checkpoint(http: Request) -> Response:
        """Save after the present step; answers when the checkpoint is on the disk."""
        body = await body_of(service, http, TrainingBody)
        folders = await while_connected(http.receive, training(given).checkpoint(body.policy))
        return json_response(CheckpointAnswer(folders=dict(folders)))

    @router.post("/v1/training/evaluate")
    async def evaluate(http: Request) -> Response:
        """Evaluate the newest version after the present step, unless it was; answers when it is done."""
        body = await body_of(service, http, TrainingBody)
        rows = await while_connected(http.receive, training(given).evaluate(body.policy))
        return _answer({"evaluations": {name: dict(row) for name, row in rows.items()}})

    @router.post("/v1/training/stop")
    async def stop(http: Request) -> Response:
        """End training after the present step and go on serving; answers when the checkpoint is on the disk."""
        body = await body_of(service, http, TrainingBody)
        await while_connected(http.receive, training(given).stop(body.policy))
        return _status_answer(service)

    return router


def _parse_update(service: Service, text: bytes) -> tuple[UpdateBody, list[GivenTrajectory] | None]:
    """Return the body and its trajectories as tokens. Raises InvalidRequest."""
    body = parse_body(text or b"{}", UpdateBody)
    if body.trajectories is None:
        return body, None
    tokenizer, max_context = service.tokenizer, service.engine.max_context
    return body, [
        parse_trajectory(trajectory, index, tokenizer, max_context)
        for index, trajectory in enumerate(body.trajectories)
    ]


def _number_of(trajectories: Sequence[GivenTrajectory] | None) -> dict[str, int]:
    return {} if trajectories is None else {"trajectories": len(trajectories)}


async def _step(service: Service, http: Request, trainers: Training, body: UpdateBody) -> Response:
    """Wait for a new step where training is paused, which it stays, or else for the present step."""
    if body.update_inference is not None:
        raise InvalidRequest(
            "update_inference needs trajectories; trainer.publish_if decides which versions of steps are served",
            "update_inference",
        )
    folders = await while_connected(http.receive, trainers.step(body.policy, body.checkpoint_name))
    return _status_answer(service, **({"folders": dict(folders)} if folders else {}))


async def _train_on(
    service: Service, http: Request, trainers: Training, body: UpdateBody, trajectories: Sequence[GivenTrajectory]
) -> Response:
    work = trainers.train_on(
        body.policy, trajectories, serve=body.update_inference, checkpoint_name=body.checkpoint_name
    )
    update = await while_connected(http.receive, work)
    return _status_answer(service, update=dataclasses.asdict(update))


def training(given: Training | None) -> Training:
    if given is None:
        raise Unavailable("this process serves and does not train; start it with python -m parallm.train")
    return given


def _status_answer(service: Service, **more: object) -> Response:
    """Return the status, and `more` fields of a route."""
    return _answer(_fields(_complete_status(service)) | more)


def _answer(fields: Mapping[str, object]) -> Response:
    # a loss can be NaN, which JSON does not have; NumPy scalars become what their text says
    return Response(to_json(fields, inf_nan_mode="null", fallback=str), media_type="application/json")


def _complete_status(service: Service) -> TrainingStatus:
    status = service.status()
    policies = {name: _complete(service, own, name) for name, own in status.policies.items()}
    return dataclasses.replace(_complete(service, status, served_policy(service)), policies=policies)


def _complete(service: Service, status: TrainingStatus, policy: str) -> TrainingStatus:
    card, traffic = card_of(policy, service.catalog()), service.trajectories.get(policy)
    return dataclasses.replace(
        status,
        training_enabled=status.state not in FINAL_STATES,
        current_lora=None if card is None else f"checkpoint-{card.version}",
        available_checkpoints=tuple(checkpoint_names(service, policy)),
        trajectories_collected=status.trajectories_collected if traffic is None else traffic.report().num_collected,
        shares={} if service.device is None else dict(service.device.shares()),
    )


def _fields(status: TrainingStatus) -> dict[str, object]:
    fields = {field.name: getattr(status, field.name) for field in dataclasses.fields(status)}
    policies = {name: _fields(policy) for name, policy in status.policies.items()}
    return fields | {"metrics": dict(status.metrics), "policies": policies}
