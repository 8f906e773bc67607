"""Requests that come: their completions, and the order in which prompts wait."""

import secrets
from collections import Counter, deque
from collections.abc import Sequence as Ordered

from parallm.engine.sequence import Prompt, Sequence
from parallm.errors import InvalidRequest
from parallm.model.adapter import Adapter
from parallm.seeds import mix
from parallm.types import GenerationRequest


class NamesInUse:
    """Ids of the requests whose completions have not all ended."""

    def __init__(self) -> None:
        self._unfinished: Counter[str] = Counter()

    def begin(self, members: Ordered[Sequence]) -> None:
        """Take the id of a request with these completions. Raises InvalidRequest if it is in use."""
        name = members[0].request.request_id
        if name in self._unfinished:
            raise InvalidRequest(f"request id {name!r} is in use", "request_id")
        self._unfinished[name] = len(members)

    def end(self, sequence: Sequence) -> None:
        name = sequence.request.request_id
        self._unfinished[name] -= 1
        if not self._unfinished[name]:
            del self._unfinished[name]


def begin_completions(
    request: GenerationRequest, adapter: Adapter | None, *, streams: bool, arrival: int
) -> list[Sequence]:
    """The completions of a new request. Raises InvalidRequest for a grammar that allows nothing."""
    seed = secrets.randbits(64) if request.sampling.seed is None else request.sampling.seed
    members = [
        Sequence(request=request, index=index, seed=mix(seed, index), adapter=adapter, streams=streams, arrival=arrival)
        for index in range(request.n)
    ]
    if not all(member.begin_grammar() for member in members):
        raise InvalidRequest("the grammar allows no token to begin with", "grammar")
    return members


def insert(prompts: deque[Prompt], prompt: Prompt) -> None:
    """Put `prompt` at its place: the lowest priority number first, and first come, first served among equals."""
    position = len(prompts)
    while position and prompt.place < prompts[position - 1].place:
        position -= 1
    prompts.insert(position, prompt)
