"""Which model is loaded, drained and unloaded when: one pure function over the state of all.

`decide` takes the state, a message and the time, and returns the next state and what has to be done. It reads no clock
and waits for nothing, so every race is a sequence of messages; `pool.py` carries its effects out. Times are seconds of
one clock, memory is in bytes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from parallm.errors import NoMemory, Unavailable

MIN_BACKOFF, MAX_BACKOFF = 1.0, 60.0
"""Seconds after a failed load until the next one; each failure in a row doubles them."""

Phase = Literal["absent", "loading", "ready", "draining", "unloading", "failed"]
HOLDING: tuple[Phase, ...] = ("loading", "ready", "draining", "unloading")
"""Phases that count in the budget."""


@dataclass(frozen=True, slots=True)
class Want:
    """A request for a lease of a model, or for its load. `number` tells one from another and grows."""

    key: str
    number: int
    num_bytes: int
    """What a load would take."""
    keep_alive: float
    """Seconds that the model stays after this; negative: until its memory is needed."""
    is_pinned: bool | None = None
    until: float = 0.0
    """When it gives up; set as it arrives."""


@dataclass(frozen=True, slots=True)
class Leave:
    """The client of a want is gone."""

    number: int


@dataclass(frozen=True, slots=True)
class Loaded:
    key: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class LoadFailed:
    key: str
    error: Exception
    is_memory: bool = False
    """Whether memory ran out."""


@dataclass(frozen=True, slots=True)
class Released:
    """A lease has ended."""

    key: str


@dataclass(frozen=True, slots=True)
class Unload:
    """An operator's request; `number` gets a grant when the model is gone."""

    key: str
    number: int


@dataclass(frozen=True, slots=True)
class Unloaded:
    key: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Message = Want | Leave | Loaded | LoadFailed | Released | Unload | Unloaded | Tick


@dataclass(frozen=True, slots=True)
class StartLoad:
    key: str


@dataclass(frozen=True, slots=True)
class StartUnload:
    key: str


@dataclass(frozen=True, slots=True)
class Grant:
    number: int


@dataclass(frozen=True, slots=True)
class Refuse:
    number: int
    error: Exception


Effect = StartLoad | StartUnload | Grant | Refuse


@dataclass(frozen=True, slots=True)
class Slot:
    """One model."""

    phase: Phase = "absent"
    num_bytes: int = 0
    """What it takes, or what its load will."""
    num_leases: int = 0
    waiting: tuple[Want, ...] = ()
    leaving: tuple[int, ...] = ()
    """Numbers of operators' requests that wait until it is gone."""
    keep_alive: float = 0.0
    deadline: float | None = None
    """When it leaves, if nothing asks for it before; None: it is busy, or stays until its memory is needed."""
    last_used: float = 0.0
    is_pinned: bool = False
    num_failures: int = 0
    retry_at: float = 0.0
    error: Exception | None = None
    """Why the last load failed."""
    has_made_room: bool = False
    """Whether memory ran out once already in this load, and all idle models were unloaded."""

    @property
    def is_idle(self) -> bool:
        return self.phase == "ready" and not self.num_leases and not self.waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolState:
    budget: int
    wait_seconds: float
    slots: Mapping[str, Slot] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """What all models take together."""
        return sum(slot.num_bytes for slot in self.slots.values() if slot.phase in HOLDING)


def decide(state: PoolState, message: Message, now: float) -> tuple[PoolState, tuple[Effect, ...]]:
    """Return the state after a message and what has to be done, in this order."""
    change = _Change(state, now)
    change.take(message)
    change.settle()
    kept = {key: slot for key, slot in change.slots.items() if slot != Slot(num_bytes=slot.num_bytes)}
    return replace(state, slots=kept), tuple(change.effects)


def next_time(state: PoolState) -> float | None:
    """Return when the state has to be looked at again without a message."""
    times = [slot.deadline for slot in state.slots.values() if slot.is_idle and not slot.is_pinned]
    waits = [want.until for slot in state.slots.values() if slot.phase != "loading" for want in slot.waiting]
    return min((time for time in (*times, *waits) if time is not None), default=None)


class _Change:
    """A state on its way to the next one."""

    def __init__(self, state: PoolState, now: float) -> None:
        self.slots = dict(state.slots)
        self.effects: list[Effect] = []
        self._state = state
        self._now = now

    def take(self, message: Message) -> None:
        match message:
            case Want(key=key):
                want = replace(message, until=self._now + self._state.wait_seconds)
                self._put(key, num_bytes=self._bytes(key, want), waiting=(*self._slot(key).waiting, want))
            case Leave(number=number):
                for key, slot in self.slots.items():
                    self._put(key, waiting=tuple(want for want in slot.waiting if want.number != number))
            case Loaded(key=key, num_bytes=num_bytes):
                self._put(key, phase="ready", num_bytes=num_bytes, num_failures=0, error=None, has_made_room=False)
                self._rest(key)
            case LoadFailed(key=key, error=error, is_memory=is_memory):
                self._fail(key, error, is_memory=is_memory)
            case Released(key=key):
                self._put(key, num_leases=self._slot(key).num_leases - 1)
                self._rest(key)
            case Unload(key=key, number=number):
                slot = self._slot(key)
                self._put(key, leaving=(*slot.leaving, number), is_pinned=False)
            case Unloaded(key=key):
                slot = self._slot(key)
                self.slots[key] = Slot(num_bytes=slot.num_bytes, waiting=slot.waiting, leaving=slot.leaving)
            case Tick():
                pass

    def settle(self) -> None:
        """Do all that the state allows now."""
        for key in list(self.slots):
            self._grant(key)
            self._leave(key)
            self._give_up(key)
        self._load_next()
        while (over := sum(self._held()) - self._state.budget) > 0 and self._make_room(over, partly=True):
            pass

    def _slot(self, key: str) -> Slot:
        return self.slots.get(key, Slot())

    def _put(self, key: str, **changes: object) -> None:
        self.slots[key] = replace(self._slot(key), **changes)  # type: ignore[arg-type]  # fields of Slot

    def _bytes(self, key: str, want: Want) -> int:
        slot = self._slot(key)
        return slot.num_bytes if slot.phase in HOLDING else want.num_bytes

    def _held(self) -> Iterator[int]:
        return (slot.num_bytes for slot in self.slots.values() if slot.phase in HOLDING)

    def _rest(self, key: str) -> None:
        """Begin the time that a model without leases stays."""
        slot = self._slot(key)
        stays = slot.num_leases or slot.keep_alive < 0
        self._put(key, last_used=self._now, deadline=None if stays else self._now + slot.keep_alive)

    def _grant(self, key: str) -> None:
        """Give a loaded model to those that wait for it; what leaves is loaded again for them."""
        slot = self._slot(key)
        if slot.phase == "failed" and slot.waiting:
            if self._now < slot.retry_at:
                assert slot.error is not None, "a failed load has an error"
                self._refuse(key, slot.waiting, slot.error)
            else:
                self._put(key, phase="absent")
        if slot.phase != "ready" or not slot.waiting:
            return
        self.effects += [Grant(want.number) for want in slot.waiting]
        pins = [want.is_pinned for want in slot.waiting if want.is_pinned is not None]
        self._put(
            key,
            num_leases=slot.num_leases + len(slot.waiting),
            waiting=(),
            keep_alive=slot.waiting[-1].keep_alive,
            deadline=None,
            is_pinned=pins[-1] if pins else slot.is_pinned,
        )

    def _leave(self, key: str) -> None:
        slot = self._slot(key)
        if slot.leaving and slot.phase in ("absent", "failed"):
            self.effects += [Grant(number) for number in slot.leaving]
            self._put(key, phase="absent", leaving=(), num_failures=0)
            return
        if slot.leaving and slot.phase == "ready":
            self._put(key, phase="draining")
        slot = self._slot(key)
        has_expired = slot.deadline is not None and slot.deadline <= self._now
        if (slot.phase == "draining" and not slot.num_leases) or (slot.is_idle and has_expired and not slot.is_pinned):
            self._unload(key)

    def _unload(self, key: str) -> None:
        self._put(key, phase="unloading", deadline=None)
        self.effects.append(StartUnload(key))

    def _refuse(self, key: str, wants: Sequence[Want], error: Exception) -> None:
        self.effects += [Refuse(want.number, error) for want in wants]
        self._put(key, waiting=tuple(want for want in self._slot(key).waiting if want not in wants))

    def _give_up(self, key: str) -> None:
        slot = self._slot(key)
        late = [want for want in slot.waiting if want.until <= self._now and slot.phase != "loading"]
        if late:
            self._refuse(
                key,
                late,
                NoMemory(
                    f"the model takes {slot.num_bytes} bytes, and models that answer or load hold {sum(self._held())} "
                    f"of registry.memory_bytes={self._state.budget}; try again later, or unload one"
                ),
            )

    def _fail(self, key: str, error: Exception, *, is_memory: bool) -> None:
        slot = self._slot(key)
        self._put(key, phase="absent")
        if is_memory and not slot.has_made_room and self._make_room(sum(self._held()), partly=True):
            self._put(key, has_made_room=True)
            return
        seconds = min(MIN_BACKOFF * 2**slot.num_failures, MAX_BACKOFF)
        self._put(
            key,
            phase="failed",
            num_failures=slot.num_failures + 1,
            retry_at=self._now + seconds,
            error=error,
            has_made_room=False,
        )
        self._refuse(key, slot.waiting, error)

    def _load_next(self) -> None:
        """Begin the load that was asked for first, one at a time; a later one if it fits and no room is being made.

        Only the first one makes room, so that two that do not fit together do not unload each other.
        """
        if any(slot.phase == "loading" for slot in self.slots.values()):
            return
        wanted = [key for key, slot in self.slots.items() if slot.phase == "absent" and slot.waiting]
        wanted.sort(key=lambda key: self._slot(key).waiting[0].number)
        for index, key in enumerate(wanted):
            slot, free = self._slot(key), self._state.budget - sum(self._held())
            pinned = sum(other.num_bytes for other in self.slots.values() if other.is_pinned and other.phase in HOLDING)
            is_unloading = any(other.phase == "unloading" for other in self.slots.values())
            if slot.num_bytes > self._state.budget - pinned:
                self._refuse(
                    key,
                    slot.waiting,
                    Unavailable(
                        f"the model takes {slot.num_bytes} bytes, and registry.memory_bytes={self._state.budget} "
                        f"leaves {self._state.budget - pinned} beside pinned models; raise it, or unload one of them"
                    ),
                )
            elif slot.num_bytes <= free and not (is_unloading and (index or slot.has_made_room)):
                self._put(key, phase="loading", keep_alive=slot.waiting[-1].keep_alive)
                self.effects.append(StartLoad(key))
                return
            elif index == 0:
                self._make_room(slot.num_bytes - free)

    def _make_room(self, num_bytes: int, *, partly: bool = False) -> bool:
        """Unload idle models, the least recently used first, for `num_bytes` beside what unloads already. Return
        whether any unloads; none does if they are too few, unless `partly`."""
        unloading = sum(slot.num_bytes for slot in self.slots.values() if slot.phase == "unloading")
        idle = [key for key, slot in self.slots.items() if slot.is_idle and not slot.is_pinned]
        idle.sort(key=lambda key: (self._slot(key).last_used, -self._slot(key).num_bytes))
        missing = num_bytes - unloading
        if not partly and sum(self._slot(key).num_bytes for key in idle) < missing:
            return False
        count = 0
        while missing > 0 and count < len(idle):
            missing -= self._slot(idle[count]).num_bytes
            self._unload(idle[count])
            count += 1
        return count > 0
