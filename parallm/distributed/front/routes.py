"""Which workers a route is for. Paths and roles are those of one server (`server/operation/auth.py`)."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from parallm.server.operation.auth import ROLES, Role

Way = Literal["one", "owner", "leader", "all", "sum", "metrics", "probe"]
"""`one`: any worker; `owner`: the one that gave an id; `leader`: rank 0; `all`: the leader, then the others; `sum`: all
at a time, and the numbers of their answers are added; `metrics` and `probe`: the front itself."""


@dataclass(frozen=True, slots=True)
class Route:
    path: str | None
    """The path with its parameters by name; None for a path that no server has, which the leader refuses."""
    role: Role
    way: Way


_WAYS: Mapping[Way, str] = {
    "owner": """
        POST /v1/requests/{request_id}/cancel
        POST /v1/rewards
        POST /v1/trajectories/{trajectory_id}/reward
    """,
    "leader": "POST /init_communicator/ POST /init_weight_transfer_engine POST /init_weights_update_group",
    "sum": """
        GET /v1/queue GET /v1/queue/stats GET /v1/splits GET /v1/trajectories
        POST /abort_request POST /abort_requests
    """,
    "metrics": "GET /metrics GET /v1/metrics",
    "probe": "GET /health GET /ready",
    "one": "GET /health_generate",
    "all": "GET /flush_cache",
}
_WAY_OF: Mapping[str, Way] = {
    f"{method} {path}": way
    for way, text in _WAYS.items()
    for method, path in zip(text.split()[::2], text.split()[1::2], strict=True)
}


def _way(row: str, role: Role) -> Way:
    if row in _WAY_OF:
        return _WAY_OF[row]
    if row.startswith("GET ") or role == "training":
        return "leader"
    return "all" if role == "admin" else "one"


_ROUTES = {row: Route(row.partition(" ")[2], role, _way(row, role)) for row, role in ROLES.items()}
_PATTERNS = [
    (re.compile(re.sub(r"\\\{\w+\\\}", "(.+)", re.escape(row))), _ROUTES[row])
    for row in sorted(_ROUTES, key=len, reverse=True)  # the longer of two that match says more
    if "{" in row
]
_UNKNOWN = Route(None, "public", "leader")


@lru_cache(maxsize=1024)
def find(method: str, path: str) -> Route:
    row = f"{method} {path}"
    if row in _ROUTES:
        return _ROUTES[row]
    return next((route for pattern, route in _PATTERNS if pattern.fullmatch(row)), _UNKNOWN)


def parameter(method: str, path: str) -> str:
    """Return the value of the parameter in a path that has one; empty otherwise."""
    return next((match[1] for pattern, _ in _PATTERNS if (match := pattern.fullmatch(f"{method} {path}"))), "")
