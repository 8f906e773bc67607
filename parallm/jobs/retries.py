"""When to come back to what could not be done: 2 s later, then twice as long each time, 10 minutes at most."""

from collections.abc import Callable, Iterable

FIRST_SECONDS, MAX_SECONDS = 2.0, 600.0


class Retries:
    """Times by name; a name that never failed is due. Memory holds them, so a new process tries at once."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waits: dict[str, tuple[float, float]] = {}
        """The last delay in seconds, and the time at which it ends."""

    def is_due(self, name: str) -> bool:
        return self._clock() >= self._waits.get(name, (0.0, 0.0))[1]

    def failed(self, name: str, *, has_progressed: bool = False, within: float = MAX_SECONDS) -> None:
        """Wait once more, from the first delay on if something was done meanwhile, for `within` seconds at most."""
        last = 0.0 if has_progressed else self._waits.get(name, (0.0, 0.0))[0]
        delay = min(max(FIRST_SECONDS, 2 * last), MAX_SECONDS)
        self._waits[name] = (delay, self._clock() + min(delay, within))

    def forget(self, name: str) -> None:
        self._waits.pop(name, None)

    def seconds_until(self, names: Iterable[str]) -> float | None:
        """Return the seconds until the first of these is due; None if there are none."""
        times = [self._waits.get(name, (0.0, 0.0))[1] for name in names]
        return max(0.0, min(times) - self._clock()) if times else None
