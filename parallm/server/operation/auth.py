"""API keys, the role that each route needs, and the check before every route.

Keys are read once at the start, kept as digests and compared in constant time. `auth_dependency` is a dependency of
all routes: role and key, then draining, then the request's deadline, before anything of the body is read.
"""

import asyncio
import hashlib
import hmac
import math
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.requests import Request

from parallm.errors import ConfigError, InvalidRequest
from parallm.server.failures import Draining, NotAllowed, WrongKey
from parallm.server.operation.acts import ACTS
from parallm.server.operation.middleware import Drain
from parallm.server.operation.request_context import UNIX, current_request, note_values
from parallm.server.settings import ApiKey, KeyRole, ServerSettings

MIN_KEY_LENGTH = 16
TIMEOUT_HEADER = "x-request-timeout"


@dataclass(frozen=True, slots=True)
class StoredKey:
    name: str
    role: KeyRole
    digest: bytes


def read_keys(settings: ServerSettings) -> tuple[StoredKey, ...]:
    """Return the keys with their digests. Raises ConfigError for a key that is missing, too short or named twice."""
    names = [key.name for key in settings.api_keys]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"server.api_keys: the name {twice[0]} stands there twice; give each key a name of its own")
    return tuple(StoredKey(key.name, key.role, _digest(key, os.environ)) for key in settings.api_keys)


def owner_key(token: str) -> StoredKey:
    """Return the key of whoever can read the token beside a unix socket."""
    return StoredKey("owner", "admin", hashlib.sha256(token.encode()).digest())


def presented_key(headers: Headers) -> str | None:
    """Return the key of `Authorization: Bearer KEY` or `x-api-key: KEY`."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return headers.get("x-api-key")


def find_key(presented: str, keys: tuple[StoredKey, ...]) -> StoredKey | None:
    """Compare all digests, so that every wrong key takes the same time."""
    digest = hashlib.sha256(presented.encode()).digest()
    matches = [key for key in keys if hmac.compare_digest(key.digest, digest)]
    return matches[0] if matches else None


def _digest(key: ApiKey, environment: Mapping[str, str]) -> bytes:
    where = f"server.api_keys {key.name}"
    match key.env, key.file, key.sha256:
        case str(variable), None, None:
            if variable not in environment:
                raise ConfigError(f"{where}: the environment variable {variable} is not set; set it to the key")
            return _digest_of(environment[variable], f"{where}: the environment variable {variable}")
        case None, str(path), None:
            return _digest_of(_read(path, where), f"{where}: the file {path}")
        case None, None, str(digest):
            return bytes.fromhex(digest)
        case _:
            raise ConfigError(f"{where}: give exactly one of env, file and sha256")


def _read(path: str, where: str) -> str:
    try:
        return Path(path).expanduser().read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: the file {path} cannot be read: {error}") from error


def _digest_of(text: str, where: str) -> bytes:
    key = text.strip()
    if len(key) < MIN_KEY_LENGTH:
        raise ConfigError(
            f"{where} holds {len(key)} characters; a key has at least {MIN_KEY_LENGTH}, "
            "such as those of `openssl rand -hex 24`"
        )
    return hashlib.sha256(key.encode()).digest()


Role = Literal["public"] | KeyRole

_ROUTES: Mapping[Role, Mapping[str, str]] = {
    "public": {
        "GET": """
            /health /ready /v2/health/live /v2/health/ready / /api/version
            /dashboard /dashboard/ /dashboard/{digest}/{path}
        """,
        "HEAD": "/ /api/version",
    },
    "inference": {
        "GET": """
            /models /v1/models /v1/models/loaded /v1/models/{name}
            /model_info /get_model_info /get_weight_version /weight_info /get_world_size /get_world_size/
            /health_generate /is_paused /metrics /v1/metrics /v1/status /v1/queue /v1/queue/stats
            /v1/adapters /v1/shares /v1/splits /v1/trajectories /info
            /v1/rl/policies /v2 /v1/session
            /v2/models/{name} /v2/models/{name}/ready
            /v2/models/{name}/versions/{version} /v2/models/{name}/versions/{version}/ready
            /v1/files /v1/files/{file_id} /v1/files/{file_id}/content /v1/batches /v1/batches/{batch_id}
            /api/tags /api/ps /api/status
        """,
        "HEAD": "/api/tags",
        "POST": """
            /v1/chat/completions /v1/completions /v1/responses /v1/embeddings /embeddings
            /rerank /v1/rerank /v2/rerank /score /v1/score /pooling /v1/pooling
            /classify /v1/classify /v1/classifications /embed /predict /similarity
            /generate /generate/ //generate /inference/v1/generate /tokenize /detokenize
            /v1/requests/{request_id}/cancel
            /v1/rl/act /v1/rl/rollout /v1/predict
            /v2/models/{name}/infer /v2/models/{name}/versions/{version}/infer
            /v1/files /v1/batches /v1/batches/{batch_id}/cancel
            /v1/rewards /v1/rewards/score /v1/trajectories/{trajectory_id}/reward
            /api/generate /api/chat /api/embed /api/embeddings /api/show
        """,
        "DELETE": "/v1/files/{file_id}",
    },
    "training": {
        "GET": """
            /debug/training /v1/training/status
            /v1/runs/{run}/rollouts /v1/runs/{run}/rollouts/{step} /v1/runs/{run}/rollouts/{step}/{group}
            /v1/trajectories/recent
            /v1/events /v1/runs /v1/runs/{run} /v1/runs/{run}/config /v1/runs/{run}/history
            /v1/runs/{run}/evaluations /v1/runs/{run}/happenings /v1/runs/{run}/checkpoints
            /v1/runs/{run}/faults /v1/runs/{run}/faults/{step} /v1/runs/{run}/log
            /v1/device /v1/device/timeline /v1/device/rows
            /v1/fine_tuning/jobs /v1/fine_tuning/jobs/{job_id}
            /v1/fine_tuning/jobs/{job_id}/events /v1/fine_tuning/jobs/{job_id}/checkpoints
            /v1/adapters/{model}/archive
        """,
        "PUT": "/v1/replica/versions/{version}",
        "POST": """
            /v1/training/pause /v1/training/resume /v1/training/update
            /training/checkpoint /v1/training/checkpoint
            /v1/training/evaluate /v1/training/stop
            /v1/fine_tuning/jobs /v1/fine_tuning/jobs/{job_id}/cancel
            /v1/fine_tuning/jobs/{job_id}/pause /v1/fine_tuning/jobs/{job_id}/resume
            /v1/replica/join /v1/replica/generate /v1/replica/leave
        """,
    },
    "admin": {
        "GET": "/flush_cache",
        "PUT": "/v1/adapters/{name} /v1/shares /v1/splits/{name} /v1/rl/policies/{name}",
        "HEAD": "/api/blobs/{digest}",
        "DELETE": """
            /v1/models/{name} /v1/adapters/{model} /v1/adapters/{name}/aliases/{alias} /v1/splits/{name}
            /v1/rl/policies/{model} /api/delete
        """,
        "POST": """
            /pause /pause_generation /areal_pause_generation
            /resume /continue_generation /areal_continue_generation
            /abort_request /abort_requests /flush_cache /reset_prefix_cache /v1/warmup
            /v1/models/load /v1/models/unload /v1/models/scan /v1/models/copy /v1/models/create
            /v1/adapters/load /v1/adapters/promote /v1/adapters/rollback /v1/adapters/aliases
            /load_adapter /upload_adapter /update_adapter_weights /model/switch-lora
            /load_lora_adapter /skyrl/v1/load_lora_adapter /v1/load_lora_adapter
            /unload_lora_adapter /v1/unload_lora_adapter /load_lora_adapter_from_tensors
            /api/pull /api/create /api/copy /api/blobs/{digest} /api/push /api/me /api/signout
            /init_communicator/ /init_weight_transfer_engine /init_weights_update_group
            /start_weight_update /finish_weight_update /update_named_param/
            /update_weights /update_weights_from_disk /update_weights_from_distributed /update_weights_from_tensor
        """,
    },
}
ROLES: Mapping[str, Role] = {
    f"{method} {path}": role
    for role, methods in _ROUTES.items()
    for method, paths in methods.items()
    for path in paths.split()
}
"""Role of each route; `create_app` refuses routes without one."""
RANK: Mapping[Role, int] = {"public": 0, "inference": 1, "training": 2, "admin": 3}


def role_of(http: Request) -> Role:
    return ROLES[f"{http.method} {http.scope['route'].path_format}"]


def authorize(role: Role, headers: Headers, keys: tuple[StoredKey, ...], settings: ServerSettings) -> None:
    """Check the key of a request for a route of this role and note its name. Raises WrongKey, NotAllowed."""
    if role == "public":
        return
    if keys:
        _check_key(headers, role, keys)
    if RANK[role] > RANK["inference"] and not settings.control_routes:
        raise NotAllowed("this route is off; the server runs with server.control_routes=false")


def check_roles(routers: Iterable[APIRouter]) -> None:
    """Raise LookupError for a route without a row in `ROLES`, so that none is open by oversight."""
    for router in routers:
        for route in router.routes:
            assert isinstance(route, APIRoute), "routers are not nested: their paths stand whole where they are defined"
            if missing := [row for row in rows_of(route) if row not in ROLES]:
                raise LookupError(f"{missing[0]} has no role; add it to server/operation/auth.py")


def rows_of(route: APIRoute) -> list[str]:
    return [f"{method} {route.path_format}" for method in sorted(route.methods or ())]


def _check_key(headers: Headers, role: Role, keys: tuple[StoredKey, ...]) -> None:
    presented = presented_key(headers)
    if presented is None:
        raise WrongKey("this server needs an API key; send it as `Authorization: Bearer KEY` or as `x-api-key: KEY`")
    key = find_key(presented, keys)
    if key is None:
        raise WrongKey("the API key is not one of this server's")
    if context := current_request.get():
        # before a refusal, since the log names the key of refused requests, too
        context.api_key, context.api_role = key.name, key.role
    if RANK[key.role] < RANK[role]:
        raise NotAllowed(f"this route needs a key with the role {role}; yours has the role {key.role}")


def auth_dependency(
    keys: tuple[StoredKey, ...], settings: ServerSettings, drain: Drain
) -> Callable[[Request], Awaitable[None]]:

    async def check(http: Request) -> None:
        context = current_request.get()
        assert context is not None, "middleware.py is around every request"
        context.route = http.scope["route"].path_format
        context.act = ACTS.get(f"{http.method} {context.route}")
        if context.act is not None:
            note_values(http.path_params)
        if context.is_local:
            context.api_role = "admin"
        else:
            authorize(role_of(http), http.headers, keys + http.scope.get(UNIX, ()), settings)
        if drain.is_draining and not context.is_local and _asks_for_work(http):
            seconds = math.ceil(settings.drain_seconds)
            raise Draining(f"the server shuts down and takes no new requests; try again in {seconds} s", seconds)
        if context.deadline is None:  # else time has passed since it was set
            context.deadline = deadline_of(http.headers, settings)

    return check


def _asks_for_work(http: Request) -> bool:
    """Return whether draining refuses it: `/metrics` and other views, and control of training, go on to the end."""
    return role_of(http) == "inference" and (http.method == "POST" or http.url.path == "/health_generate")


def deadline_of(headers: Headers, settings: ServerSettings) -> float | None:
    """Return when an answer that begins now has to be complete, on the clock of the event loop. Raises
    InvalidRequest."""
    seconds = _seconds_left(headers, settings)
    return None if seconds is None else asyncio.get_running_loop().time() + seconds


def _seconds_left(headers: Headers, settings: ServerSettings) -> float | None:
    """Return the shorter of the limits of server and client. Raises InvalidRequest."""
    given = headers.get(TIMEOUT_HEADER)
    if given is None:
        return settings.request_seconds
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise InvalidRequest(f"the header {TIMEOUT_HEADER} is {given[:60]!r} and must be a number of seconds above 0")
    return seconds if settings.request_seconds is None else min(seconds, settings.request_seconds)
