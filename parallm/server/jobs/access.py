"""Who may see which file, batch or job: a client what was made with its key, the role admin everything.

Without keys everything belongs to everybody who can ask.
"""

from collections.abc import Mapping

from parallm.errors import InvalidRequest, Unavailable
from parallm.jobs.jobs import Jobs
from parallm.server.operation.request_context import current_request
from parallm.server.service import Service


def jobs_of(service: Service) -> Jobs:
    """Raises Unavailable."""
    if service.jobs is None:
        raise Unavailable(
            "this process keeps no files, batches and jobs; `python -m parallm.serve jobs.enabled=true` does"
        )
    return service.jobs


def owner() -> str:
    """Return the name of the request's key, empty without keys."""
    context = current_request.get()
    return "" if context is None or context.api_key is None else context.api_key


def visible_to() -> str | None:
    """Return the owner whose objects the request may see; None: all."""
    context = current_request.get()
    is_admin = context is None or context.api_role in (None, "admin")
    return None if is_admin else owner()


def read_limit(query: Mapping[str, str], *, usual: int, largest: int) -> int:
    """Return `limit` of a list. Raises InvalidRequest."""
    text = query.get("limit", str(usual))
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text[:9]) <= largest:
        raise InvalidRequest(f"limit is {text[:50]!r}; send a number from 1 to {largest}", "limit")
    return int(text)


def check_query(query: Mapping[str, str], *known: str) -> None:
    """Raise InvalidRequest for a parameter that the list does not have."""
    if unknown := sorted(query.keys() - set(known)):
        raise InvalidRequest(f"unknown parameter {unknown[0][:50]!r}; send {', '.join(known)}", unknown[0][:50])
