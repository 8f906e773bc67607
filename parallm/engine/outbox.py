"""Events of sequences on their way out: with each step, or several steps of a stream together while many are open."""

from collections.abc import Callable, Iterable

from parallm.engine.sequence import Sequence
from parallm.model.chat.tokenizer import ChatTokenizer
from parallm.types import TokenEvent

LONG_STEPS = 4
"""Steps whose held events are emitted before other work begins, which may take long. Those of fewer stay held, so that
classes that take turns do not undo it."""


class Outbox:
    def __init__(self, tokenizer: ChatTokenizer, emit: Callable[[list[TokenEvent]], None]) -> None:
        self.is_holding = False
        """Whether events wait for `flush`, but for the first and the last one of each completion."""
        self._tokenizer = tokenizer
        self._emit = emit
        self._held: dict[Sequence, None] = {}  # with tokens not emitted yet, in the order of their first
        self._num_steps = 0  # whose events are held

    def put(self, sequences: Iterable[Sequence]) -> None:
        """Take sequences with new tokens, or an end, of one step."""
        if self.is_holding:
            self._num_steps += 1
            new = list(sequences)
            self._held |= dict.fromkeys(sequence for sequence in new if sequence.may_be_held)
            sequences = [sequence for sequence in new if not sequence.may_be_held]
        if events := [sequence.event(self._tokenizer) for sequence in sequences]:
            self._emit(events)

    def drop(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended, or whose request nobody waits for."""
        self._held.pop(sequence, None)

    def flush(self) -> None:
        """Emit what is held."""
        held, self._held, self._num_steps = self._held, {}, 0
        if held:
            self._emit([sequence.event(self._tokenizer) for sequence in held])

    def flush_before_other_work(self) -> None:
        """Emit what is held of several steps."""
        if self._num_steps >= LONG_STEPS:
            self.flush()
