"""The requests of one traffic class: jobs that wait, and sequences that decode."""

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from itertools import islice, takewhile

import mlx.core as mx

from parallm.engine.decoder import Decoder, Step
from parallm.engine.sequence import MIN_SORT_KEY, PrefillJob, Sequence, SortKey


@dataclass(slots=True)
class RequestQueue:
    """The requests of one traffic class: jobs that wait, and sequences that decode. Each class can step alone."""

    decoders: list[Decoder]
    """One per stream."""
    waiting: deque[PrefillJob] = field(default_factory=deque)
    """Jobs that are not computed, or have sequences that do not decode yet; sorted by key."""
    newest_admitted: SortKey = MIN_SORT_KEY
    """Largest key of any job that was ever admitted: no job after it holds memory."""
    in_flight: tuple[Ordered[mx.array], Ordered[Sequence]] = ((), ())
    """Prefill that the device computes and that was not waited for, and its sequences."""
    num_decodes: int = 0
    """Decode units since the last prefill."""
    is_paused: bool = False
    is_blocked: bool = False
    """The last unit found no memory and did nothing; there is no work until another class had a unit."""
    num_tokens: int = 0
    """Tokens sampled since the start."""

    @property
    def num_running(self) -> int:
        return sum(len(decoder.sequences) for decoder in self.decoders)

    @property
    def has_running(self) -> bool:
        """Whether a sequence decodes, or a step is in flight."""
        return any(decoder.sequences or decoder.in_flight for decoder in self.decoders)

    @property
    def has_computed(self) -> bool:
        """Whether a computed prompt waits for its first step."""
        return any(job.is_computed for job in self.waiting)

    def running(self) -> list[Sequence]:
        return [sequence for decoder in self.decoders for sequence in decoder.sequences]

    def sequences(self) -> Iterable[Sequence]:
        """All that wait, and all that decode."""
        for job in self.waiting:
            yield from job.sequences
        yield from self.running()

    def add(self, job: PrefillJob) -> None:
        """Insert a job by its key; equal keys keep the order of arrival."""
        position = len(self.waiting)
        while position and job.sort_key < self.waiting[position - 1].sort_key:
            position -= 1
        self.waiting.insert(position, job)

    def admit(self, job: PrefillJob, num_bytes: int) -> None:
        job.num_bytes = num_bytes
        self.newest_admitted = max(self.newest_admitted, job.sort_key)

    def admitted(self) -> list[PrefillJob]:
        """Jobs that hold memory."""
        up_to_newest = takewhile(lambda job: job.sort_key <= self.newest_admitted, self.waiting)
        return [job for job in up_to_newest if job.num_bytes]

    @property
    def holds_memory(self) -> bool:
        return bool(self.num_running or self.admitted())

    def switching(self) -> list[Sequence]:
        """Sequences that switch versions in flight, of running requests and of jobs that have not begun."""
        running = [sequence for sequence in self.running() if sequence.request.switches_in_flight]
        jobs = (job for job in self.waiting if job.request.switches_in_flight and job.num_computed == 0)
        return [*running, *(sequence for job in jobs for sequence in job.sequences)]

    def least_loaded(self) -> Decoder:
        """The decoder that the next sequence joins."""
        return min(self.decoders, key=lambda decoder: len(decoder.sequences))

    def assigned(
        self, computed: Iterable[PrefillJob], num_free: int
    ) -> list[tuple[Decoder, list[tuple[PrefillJob, Sequence]]]]:
        """The first `num_free` sequences of computed jobs by decoder, each assigned to the least loaded one."""
        shares: list[tuple[Decoder, list[tuple[PrefillJob, Sequence]]]] = [(one, []) for one in self.decoders]
        for joining in islice(((job, sequence) for job in computed for sequence in job.sequences), num_free):
            min(shares, key=lambda share: len(share[0].sequences) + len(share[1]))[1].append(joining)
        return [share for share in shares if share[1]]

    def take_steps(self) -> list[Step]:
        """The steps in flight; the caller reads them now."""
        return [step for decoder in self.decoders if (step := decoder.take()) is not None]
