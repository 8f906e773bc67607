"""The context of one HTTP request, for code far from its route: id, key, deadline, and the fields of its log line.

`middleware.py` sets it; tasks that a request starts see the same one.
"""

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field

from parallm.server.settings import KeyRole

LOCAL = "parallm.local"
"""Key in the ASGI scope of a request that this process makes itself. No server sets it."""


@dataclass(slots=True, kw_only=True, eq=False)
class RequestContext:
    request_id: str
    headers: Mapping[str, str] = field(default_factory=dict)
    address: str = ""
    """Address of the other end of the connection."""
    is_local: bool = False
    """Whether this process itself asks, which needs no key and goes on while the server drains."""
    deadline: float | None = None
    """Time of the event loop at which the answer is given up."""
    give_up: Callable[[], object] | None = None
    """Ends the running work for this request with the error `Draining`."""
    is_given_up: bool = False
    """Set with `give_up`, for the next of several pieces of work."""
    route: str | None = None
    """Path of the route, with its parameters by name."""
    api_key: str | None = None
    """Name of the key."""
    api_role: KeyRole | None = None
    """Role of the key."""
    model: str | None = None
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0

    @property
    def client(self) -> str:
        """Name of the key, else the address."""
        return self.api_key or self.address


current_request: ContextVar[RequestContext | None] = ContextVar("current_request", default=None)
