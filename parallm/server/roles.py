"""Who may use which route: the one table, and the check of keys."""

from collections.abc import Iterable, Mapping
from typing import Literal
from urllib.parse import urlsplit

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.requests import Request

from parallm.server.failures import ForeignOrigin, NotAllowed, WrongKey
from parallm.server.keys import StoredKey, find_key, presented_key
from parallm.server.settings import KeyRole, ServerSettings

Role = Literal["public"] | KeyRole

ROLES: Mapping[str, Role] = {
    "GET /health": "public",
    "GET /ready": "public",
    "GET /metrics": "inference",
    "GET /v1/models": "inference",
    "POST /v1/chat/completions": "inference",
    "POST /v1/completions": "inference",
    "GET /v1/training/status": "training",
}
"""Every route has one row; `create_app` refuses routes without."""
RANK: Mapping[Role, int] = {"public": 0, "inference": 1, "training": 2, "admin": 3}


def role_of(http: Request) -> Role:
    return ROLES[f"{http.method} {http.scope['route'].path}"]


def authorize(http: Request, keys: tuple[StoredKey, ...], settings: ServerSettings) -> StoredKey | None:
    """The key that the request came with, if the route needs one. Raises WrongKey, NotAllowed, ForeignOrigin."""
    role = role_of(http)
    if role == "public":
        return None
    if RANK[role] > RANK["inference"] and not settings.control_routes:
        raise NotAllowed("this route is off; the server runs with server.control_routes=false")
    if keys:
        return _checked_key(http, role, keys)
    _check_origin(http, settings)
    return None


def check_roles(routers: Iterable[APIRouter]) -> None:
    """Raises LookupError for a route without a row in the table, so that none is open by oversight."""
    for router in routers:
        for route in router.routes:
            assert isinstance(route, APIRoute), "routers are not nested: their paths stand whole where they are defined"
            if missing := [row for row in rows_of(route) if row not in ROLES]:
                raise LookupError(f"{missing[0]} has no role; add it to server/roles.py")


def rows_of(route: APIRoute) -> list[str]:
    return [f"{method} {route.path}" for method in sorted(route.methods or ())]


def _checked_key(http: Request, role: Role, keys: tuple[StoredKey, ...]) -> StoredKey:
    presented = presented_key(http.headers)
    if presented is None:
        raise WrongKey("this server needs an API key; send it as `Authorization: Bearer KEY` or as `x-api-key: KEY`")
    key = find_key(presented, keys)
    if key is None:
        raise WrongKey("the API key is not one of this server's")
    if RANK[key.role] < RANK[role]:
        raise NotAllowed(f"this route needs a key with the role {role}; yours has the role {key.role}")
    return key


def _check_origin(http: Request, settings: ServerSettings) -> None:
    """Without keys, any page that a browser on this machine shows could post here: only pages of ours may."""
    origin = http.headers.get("origin")
    if origin is None or {origin, "*"} & set(settings.cors_origins) or urlsplit(origin).netloc == http.url.netloc:
        return
    raise ForeignOrigin("requests of pages from other origins are refused; name the origin in server.cors_origins")
