"""The prompts and rows of one traffic class."""

import secrets
from collections import Counter, deque
from collections.abc import Iterable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from itertools import islice, takewhile

import mlx.core as mx

from parallm.engine.decode import Decoder, Step
from parallm.engine.sequence import MIN_SORT_KEY, PrefillJob, Sequence, SortKey
from parallm.errors import InvalidRequest
from parallm.model.adapters.adapter import Adapter
from parallm.seeds import mix
from parallm.types import GenerationRequest


@dataclass(slots=True)
class RequestQueue:
    """Each class has rows of its own, so that each can step alone."""

    decoders: list[Decoder]
    """One per lane."""
    prompts: deque[PrefillJob] = field(default_factory=deque)
    """Not yet computed, or computed with members that wait for a row; in the order of their places."""
    newest_admitted: SortKey = MIN_SORT_KEY
    """The last place of a prompt that ever was: none behind it holds memory."""
    computing: tuple[Ordered[mx.array], Ordered[Sequence]] = ((), ())
    """What the device computes of prompts that nobody has waited for yet, and whose it is."""
    decoded_last: bool = False
    is_paused: bool = False
    """Nothing is computed until `release`."""
    is_blocked: bool = False
    """Its last unit found no room and did nothing; until another class's unit it has no work."""
    num_tokens: int = 0
    """Sampled since the start."""

    @property
    def num_rows(self) -> int:
        return sum(len(decoder.rows) for decoder in self.decoders)

    def rows(self) -> list[Sequence]:
        return [row for decoder in self.decoders for row in decoder.rows]

    def sequences(self) -> Iterable[Sequence]:
        """Those that wait, and those that run."""
        for prompt in self.prompts:
            yield from prompt.waiting
        yield from self.rows()

    def switching(self) -> list[Sequence]:
        """What switches versions in flight: rows, and prompts not yet begun."""
        rows = [row for row in self.rows() if row.request.switches_in_flight]
        switching = (one for one in self.prompts if one.request.switches_in_flight and one.num_computed == 0)
        return [*rows, *(member for prompt in switching for member in prompt.waiting)]

    def admit(self, prompt: PrefillJob, num_bytes: int) -> None:
        prompt.num_bytes = num_bytes
        self.newest_admitted = max(self.newest_admitted, prompt.sort_key)

    def admitted(self) -> list[PrefillJob]:
        """Prompts that hold memory."""
        up_to_newest = takewhile(lambda prompt: prompt.sort_key <= self.newest_admitted, self.prompts)
        return [prompt for prompt in up_to_newest if prompt.num_bytes]

    def emptiest(self) -> Decoder:
        """Where the next row joins."""
        return min(self.decoders, key=lambda decoder: len(decoder.rows))

    def shared_out(
        self, computed: Iterable[PrefillJob], num_free: int
    ) -> list[tuple[Decoder, list[tuple[PrefillJob, Sequence]]]]:
        """Members of computed prompts for so many free rows, by the decoder that each joins: the emptiest one."""
        shares: list[tuple[Decoder, list[tuple[PrefillJob, Sequence]]]] = [(decoder, []) for decoder in self.decoders]
        for joining in islice(((prompt, member) for prompt in computed for member in prompt.waiting), num_free):
            min(shares, key=lambda share: len(share[0].rows) + len(share[1]))[1].append(joining)
        return [share for share in shares if share[1]]

    @property
    def has_rows(self) -> bool:
        """Rows that run, or whose step is in flight."""
        return any(decoder.rows or decoder.in_flight for decoder in self.decoders)

    def steps_to_read_first(self) -> list[Step]:
        """The steps in flight, if one of them is to be read before the next is launched."""
        return self.take_steps() if any(decoder.waits_to_be_read for decoder in self.decoders) else []

    def take_steps(self) -> list[Step]:
        """The steps in flight, to be read now."""
        return [step for decoder in self.decoders if (step := decoder.take()) is not None]


class ActiveRequestIds:
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


def make_sequences(
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


def insert(prompts: deque[PrefillJob], prompt: PrefillJob) -> None:
    """Put `prompt` at its place: the lowest priority number first, and first come, first served among equals."""
    position = len(prompts)
    while position and prompt.sort_key < prompts[position - 1].sort_key:
        position -= 1
    prompts.insert(position, prompt)
