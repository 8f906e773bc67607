"""Policy nets over HTTP: `POST /v1/rl/act`, and their versions at `/v1/rl/policies`. Wire types and routes.

An environment's state stays with the client: hidden states come with a request and go back with its answer.
"""

import secrets
import uuid
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter
from pydantic import Field, PlainValidator, create_model
from starlette.requests import Request
from starlette.responses import Response

from parallm.errors import InvalidRequest, Unavailable
from parallm.model.adapters.names import versioned
from parallm.seeds import mix_all
from parallm.server.connection import json_response, received, uploaded, while_connected
from parallm.server.interfaces import Actor
from parallm.server.schemas import Done, ModelName, Wire, parse_body
from parallm.server.service import Service
from parallm.server.tasks.predictions import check_answer
from parallm.server.tasks.tensors import (
    MAX_ROWS,
    SECONDS_PER_NUMBER,
    Encoding,
    GivenTensor,
    TensorBody,
    check_rows,
    read_inputs,
    read_tensors,
    tensor_of,
    unread,
)
from parallm.tensors import Actions, ActRequest, Array, Datatype, PolicyCard, Role, TensorSpec, datatype_of

MAX_SEED = (1 << 64) - 1
Returned = Literal["action_log_probs", "value_estimates", "entropy"]


class ActFields(Wire):
    model: ModelName
    """A policy net, `agent`, or one version of it, `agent@3`."""
    observations: Annotated[
        Any, PlainValidator(unread, json_schema_input_type=dict[str, TensorBody | list[Any]] | TensorBody | list[Any])
    ]
    """Tensors by name; a single one may stand alone, also as a nested list."""
    hidden_states: dict[str, GivenTensor] | None = None
    """`new_hidden_states` of the answer before; absent: zeros."""
    episode_start: Annotated[list[bool], Field(max_length=MAX_ROWS, fail_fast=True)] | None = None
    """Rows that begin an episode: their hidden states are taken for zeros."""
    deterministic: bool = False
    """Take each distribution's mode: the likeliest action, or the mean."""
    seed: int | Annotated[list[int], Field(max_length=MAX_ROWS, fail_fast=True)] | None = None
    """From 0 to 2^64 - 1. One for the request, from which each row gets its own by its number, or one for each row;
    absent: a new one, which the answer has."""
    encoding: Encoding = "json"
    """Form of the answer's tensors: numbers, or little-endian bytes in base64."""

    @property
    def returned(self) -> frozenset[Returned]:
        given: list[Returned] | None = getattr(self, RETURN)
        return frozenset(("action_log_probs", "value_estimates") if given is None else given)


RETURN = "return"
_RETURN: dict[str, Any] = {
    RETURN: Annotated[
        list[Returned] | None,
        Field(default=None, description="What to answer beside the actions; absent: log-probs, and values if any."),
    ]
}
ActBody = create_model("ActBody", __base__=ActFields, **_RETURN)  # no class statement can have a field `return`


class RowUsage(Wire):
    rows: int


class ActAnswer(Wire):
    id: str
    object: Literal["rl.actions"]
    model: str
    """The exact version, which has acted."""
    policy_version: int
    actions: TensorBody
    clipped_actions: TensorBody | None = None
    """The actions within the bounds of a box, for the environment; `action_log_probs` are those of `actions`."""
    action_log_probs: TensorBody | None = None
    value_estimates: TensorBody | None = None
    entropy: TensorBody | None = None
    new_hidden_states: dict[str, TensorBody] | None = None
    seed: int | list[int]
    usage: RowUsage


class TensorEntry(Wire):
    name: str
    datatype: Datatype
    shape: list[int]
    """-1 is any size; the first axis is that of rows."""
    role: Role | None = None


class PolicyEntry(Wire):
    id: str
    name: str
    version: int
    model_type: str
    is_served: bool
    num_bytes: int
    inputs: list[TensorEntry]
    outputs: list[TensorEntry]


class PolicyList(Wire):
    data: list[PolicyEntry]


def rl_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/rl/act")
    @router.post("/v1/rl/rollout")
    async def act(http: Request) -> Response:
        """Act on observations by a policy net."""
        body, request = await received(service, http, partial(_parse, service))
        actions = await while_connected(http.receive, actor_of(service).act(request))
        seconds = 0.0 if body.encoding == "b64" else _num_numbers(actions) * SECONDS_PER_NUMBER
        return await service.workers.run_if_long(partial(_answer, body, request, actions), seconds=seconds)

    @router.get("/v1/rl/policies")
    async def policies() -> Response:
        """Every version of a policy net in memory, with its signature."""
        return json_response(PolicyList(data=[policy_entry(card) for card in actor_of(service).cards()]))

    @router.put("/v1/rl/policies/{name}")
    async def publish(name: str, http: Request) -> Response:
        """Take a safetensors file, whose metadata has the text of its config.json as `config`, as the next version of a
        policy net, and serve it; without `config` it is a net as the one before."""
        async with uploaded(service, http) as weights:
            return json_response(policy_entry(await actor_of(service).publish(name, weights)))

    @router.delete("/v1/rl/policies/{model}")
    async def unload(model: str) -> Response:
        """Forget `name`, or one version `name@3`. Requests that run on it finish."""
        await actor_of(service).unload(model)
        return json_response(Done(status="ok"))

    return router


def actor_of(service: Service) -> Actor:
    """Raises Unavailable."""
    if service.actor is None:
        raise Unavailable("this process has no policy nets")
    return service.actor


def policy_entry(card: PolicyCard) -> PolicyEntry:
    return PolicyEntry(
        id=versioned(card.name, card.version),
        name=card.name,
        version=card.version,
        model_type=card.model_type,
        is_served=card.is_served,
        num_bytes=card.num_bytes,
        inputs=list(map(_tensor_entry, card.signature.inputs)),
        outputs=list(map(_tensor_entry, card.signature.outputs)),
    )


def _tensor_entry(spec: TensorSpec) -> TensorEntry:
    role = {} if spec.role is None else {"role": spec.role}
    return TensorEntry(name=spec.name, datatype=spec.datatype, shape=list(spec.shape), **role)


def _parse(service: Service, text: bytes) -> tuple[ActFields, ActRequest]:
    """Raises InvalidRequest, UnknownModel, Unavailable."""
    body = parse_body(text, ActBody)
    card = actor_of(service).card(body.model)
    inputs = read_inputs(body.observations, card.signature.observations, "observations")
    hidden = {} if body.hidden_states is None else body.hidden_states
    inputs |= read_tensors(hidden, card.signature.hidden, "hidden_states")
    num_rows = check_rows(inputs, "observations")
    check_answer(service, card.signature.outputs, inputs)
    if body.episode_start is not None:
        if len(body.episode_start) != num_rows:
            raise InvalidRequest(
                f"episode_start has {len(body.episode_start)} rows, and observations have {num_rows}", "episode_start"
            )
        if card.signature.hidden:  # other nets remember nothing of an episode
            inputs["episode_start"] = np.array(body.episode_start)
    has_values = any(spec.name == "value" for spec in card.signature.outputs)
    if RETURN in body.model_fields_set and "value_estimates" in body.returned and not has_values:
        raise InvalidRequest(f"{card.name} has no value head (critic: null in its config.json)", RETURN)
    seeds = secrets.randbits(63) if body.seed is None else body.seed
    body = body.model_copy(update={"seed": seeds})
    return body, ActRequest(
        model=versioned(card.name, card.version),
        inputs=inputs,
        seeds_N=_row_seeds(seeds, num_rows),
        is_deterministic=body.deterministic,
        wants_entropy="entropy" in body.returned,
    )


def _row_seeds(seeds: int | list[int], num_rows: int) -> Array:
    """Return the seed of each row, uint64. Raises InvalidRequest."""
    if not all(0 <= seed <= MAX_SEED for seed in ([seeds] if isinstance(seeds, int) else seeds)):
        raise InvalidRequest("seed should be from 0 to 2^64 - 1", "seed")
    if isinstance(seeds, int):
        return mix_all(np.full(num_rows, seeds, np.uint64), np.arange(num_rows, dtype=np.uint64))
    if len(seeds) != num_rows:
        raise InvalidRequest(f"seed has {len(seeds)} numbers for {num_rows} rows; send one of each row, or one", "seed")
    return np.array(seeds, np.uint64)


def _num_numbers(actions: Actions) -> int:
    return actions.actions.size + sum(array.size for array in actions.hidden.values()) + 3 * len(actions.log_probs_N)


def _answer(body: ActFields, request: ActRequest, actions: Actions) -> Response:
    written = {
        "clipped_actions": (actions.clipped, True),
        "action_log_probs": (actions.log_probs_N, "action_log_probs" in body.returned),
        "value_estimates": (actions.values_N, "value_estimates" in body.returned),
        "entropy": (actions.entropy_N, True),
    }
    tensors: dict[str, Any] = {
        name: tensor_of(array, "FP32", body.encoding)
        for name, (array, is_wanted) in written.items()
        if array is not None and is_wanted
    }
    if actions.hidden:
        tensors["new_hidden_states"] = {
            name: tensor_of(array, "FP32", body.encoding) for name, array in actions.hidden.items()
        }
    return json_response(
        ActAnswer(
            id=f"act-{uuid.uuid4().hex}",
            object="rl.actions",
            model=request.model,
            policy_version=int(request.model.rpartition("@")[2]),
            actions=tensor_of(actions.actions, datatype_of(actions.actions), body.encoding),
            seed=body.seed if body.seed is not None else 0,
            usage=RowUsage(rows=len(actions.log_probs_N)),
            **tensors,
        )
    )
