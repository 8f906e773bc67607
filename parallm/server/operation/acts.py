"""Acts of clients: requests that change training, what clients get, or what is under way, with who asks and values.

The middleware makes an `Act` of each after its answer, of refused ones, too. Strangers, who have no key of a server
with keys, act on nothing and fill no file.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from parallm.server.operation.request_context import RequestContext

MAX_TEXT = 200
"""Characters of a value that are kept."""
MAX_VALUES = 16
REFUSAL_SECONDS = 10.0
"""Refusals of one kind and key within this time are one."""

logger = logging.getLogger(__name__)

_ACTS: Mapping[str, str] = {
    "paused": "POST /v1/training/pause",
    "resumed": "POST /v1/training/resume",
    "stepped": "POST /v1/training/update",
    "saved": "POST /v1/training/checkpoint, POST /training/checkpoint",
    "evaluated": "POST /v1/training/evaluate",
    "stopped": "POST /v1/training/stop",
    "shares": "PUT /v1/shares",
    "promoted": "POST /v1/adapters/promote, POST /model/switch-lora",
    "rolled_back": "POST /v1/adapters/rollback",
    "split": "PUT /v1/splits/{name}",
    "unsplit": "DELETE /v1/splits/{name}",
    "aliased": "POST /v1/adapters/aliases",
    "unaliased": "DELETE /v1/adapters/{name}/aliases/{alias}",
    "loaded": """POST /v1/adapters/load, POST /load_adapter, POST /v1/load_lora_adapter, POST /load_lora_adapter,
        POST /skyrl/v1/load_lora_adapter""",
    "uploaded": "PUT /v1/adapters/{name}, POST /upload_adapter, POST /update_adapter_weights",
    "unloaded": "DELETE /v1/adapters/{model}, POST /v1/unload_lora_adapter, POST /unload_lora_adapter",
    "caches_cleared": "GET /flush_cache, POST /flush_cache, POST /reset_prefix_cache",
    "aborted": "POST /abort_request, POST /abort_requests, POST /v1/requests/{request_id}/cancel",
    "serving_paused": "POST /pause, POST /pause_generation, POST /areal_pause_generation",
    "serving_resumed": "POST /resume, POST /continue_generation, POST /areal_continue_generation",
}
ACTS: Mapping[str, str] = {route.strip(): kind for kind, routes in _ACTS.items() for route in routes.split(",")}
"""Kind of each route that acts, as happenings have it."""
WORDS: Mapping[str, str] = {
    "stepped": "asked for a step of",
    "shares": "set the shares of the device to",
    "rolled_back": "rolled back",
    "unsplit": "ended the split of",
    "unaliased": "removed the alias",
    "caches_cleared": "cleared the caches",
    "serving_paused": "paused serving",
    "serving_resumed": "resumed serving",
}
"""Beginnings of sentences, where the kind is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    kind: str
    by: str
    """Name of the key; empty without keys."""
    values: Mapping[str, Any]
    """Parameters of the path and fields of the body."""
    refused: str | None
    """Why it was not done; None if it was."""

    @property
    def what(self) -> str:
        """The version or name that the act is about, such as `policy@3`."""
        name = self.values.get("model") or self.values.get("name") or self.values.get("policy") or ""
        version = self.values.get("version")
        return f"{name}@{version}" if name and version is not None else str(name)

    @property
    def detail(self) -> str:
        """What a sentence for people has after the kind."""
        rest = {
            name: value for name, value in self.values.items() if name not in ("model", "name", "policy", "version")
        }
        shown = ", ".join(f"{name} {_shown(value)}" for name, value in rest.items())
        return " ".join(filter(None, (self.what, f"({shown})" if shown else "")))

    @property
    def text(self) -> str:
        """A sentence for people."""
        words = WORDS.get(self.kind, self.kind)
        if not self.what:
            words = words.removesuffix(" of")
        words = f"{words} {self.detail}".strip()
        by = f", by {self.by}" if self.by else ""
        return f"{words}{by}" if self.refused is None else f"refused: {words}{by}: {self.refused}"


class ActLog:
    """Tells acts on, in the log and to `on_act`. On the event loop only."""

    def __init__(self, on_act: Callable[[Act], None] = lambda _: None) -> None:
        self._on_act = on_act
        self._refused: dict[tuple[str, str], float] = {}

    def note(self, context: RequestContext, kind: str, status: int) -> None:
        """Note an act of this kind. A `status` below 400 means that it was done."""
        if status == 401:
            return
        values = {name: _short(value) for name, value in tuple(context.values.items())[:MAX_VALUES]}
        refused = None if status < 400 else (context.refusal or f"status {status}")[:MAX_TEXT]
        act = Act(kind=kind, by=context.api_key or "", values=values, refused=refused)
        if act.refused is not None and self._is_repeated(act):
            return
        logger.info("%s", act.text)
        self._on_act(act)

    def _is_repeated(self, act: Act) -> bool:
        key, now = (act.kind, act.by), time.monotonic()
        last = self._refused.get(key)
        self._refused[key] = now if last is None or now - last >= REFUSAL_SECONDS else last
        return last is not None and now - last < REFUSAL_SECONDS


def _short(value: object) -> object:
    """Return a value of a body, cut where it is long."""
    if isinstance(value, Mapping):
        return {str(name)[:MAX_TEXT]: _short(item) for name, item in tuple(value.items())[:MAX_VALUES]}
    if value is None or isinstance(value, bool | int | float):
        return value
    return str(value)[:MAX_TEXT]


def _shown(value: object) -> str:
    return " ".join(f"{name}={item}" for name, item in value.items()) if isinstance(value, Mapping) else str(value)
