"""What belongs to one HTTP request and is needed far from its route: its id, its deadline, what its log line tells."""

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field

from parallm.server.settings import KeyRole


@dataclass(slots=True, kw_only=True, eq=False)
class RequestContext:
    """Made by `front.py` for each request; tasks that a request starts see the same one."""

    request_id: str
    headers: Mapping[str, str] = field(default_factory=dict)
    address: str = ""
    """Of the other end of the connection."""
    deadline: float | None = None
    """Time of the event loop at which the answer is given up."""
    give_up: Callable[[], object] | None = None
    """Ends the work for this request with the error `Draining`, as long as there is any."""
    is_given_up: bool = False
    """Set with that, for the next of several pieces of work."""
    route: str | None = None
    """Path of the route, with its parameters by name."""
    api_key: str | None = None
    """Name of the key."""
    api_role: KeyRole | None = None
    """Its role."""
    model: str | None = None
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0

    @property
    def client(self) -> str:
        """Who asks, as far as that is known: the key, else the address."""
        return self.api_key or self.address


current_request: ContextVar[RequestContext | None] = ContextVar("current_request", default=None)
