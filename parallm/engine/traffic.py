"""The prompts and rows of one traffic class."""

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from itertools import islice, takewhile

import mlx.core as mx

from parallm.engine.decoder import Decoder, Step
from parallm.engine.sequence import BEFORE_ALL, Place, Prompt, Sequence


@dataclass(slots=True)
class Traffic:
    """Each class has rows of its own, so that each can step alone."""

    decoders: list[Decoder]
    """One per lane."""
    prompts: deque[Prompt] = field(default_factory=deque)
    """Not yet computed, or computed with members that wait for a row; in the order of their places."""
    newest_admitted: Place = BEFORE_ALL
    """The last place of a prompt that ever was: none behind it holds memory."""
    computing: tuple[Ordered[mx.array], Ordered[Sequence]] = ((), ())
    """What the device computes of prompts that nobody has waited for yet, and whose it is."""
    decoded_last: bool = False
    is_held: bool = False
    """Nothing is computed until `release`."""
    is_stuck: bool = False
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

    def admit(self, prompt: Prompt, num_bytes: int) -> None:
        prompt.num_bytes = num_bytes
        self.newest_admitted = max(self.newest_admitted, prompt.place)

    def admitted(self) -> list[Prompt]:
        """Prompts that hold memory."""
        up_to_newest = takewhile(lambda prompt: prompt.place <= self.newest_admitted, self.prompts)
        return [prompt for prompt in up_to_newest if prompt.num_bytes]

    def emptiest(self) -> Decoder:
        """Where the next row joins."""
        return min(self.decoders, key=lambda decoder: len(decoder.rows))

    def shared_out(
        self, computed: Iterable[Prompt], num_free: int
    ) -> list[tuple[Decoder, list[tuple[Prompt, Sequence]]]]:
        """Members of computed prompts for so many free rows, by the decoder that each joins: the emptiest one."""
        shares: list[tuple[Decoder, list[tuple[Prompt, Sequence]]]] = [(decoder, []) for decoder in self.decoders]
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
