"""Decides which requests hold memory, which jobs are computed next, and which sequences decode.

Memory comes from the prefix cache first, then from buffers that are larger than needed, then from preemption: rollouts
before serving, and within a class the largest priority number and the newest first. A preempted sequence goes back to
the queue with its tokens and is computed again later.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from itertools import compress, islice, takewhile
from typing import Protocol

import mlx.core as mx

from parallm.engine.decoder import Decoder, Step
from parallm.engine.sequence import MIN_SORT_KEY, PrefillJob, Sequence, SortKey
from parallm.types import TrafficClass


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


class Memory(Protocol):
    """The memory of keys and values as the scheduler sees it, pages or slots; see `SlotMemory`."""

    def fits(self, job: PrefillJob, decoder: Decoder) -> bool: ...

    def allocate(self, job: PrefillJob) -> int: ...

    def resize(self, decoder: Decoder, sequences: Ordered[Sequence]) -> bool: ...

    def resize_to_grow(self, decoder: Decoder, sequences: Ordered[Sequence]) -> bool: ...


class Scheduler:
    def __init__(
        self,
        memory: Memory,
        queues: Mapping[TrafficClass, RequestQueue],
        max_rows: int,
        flush: Callable[[RequestQueue], None],
    ) -> None:
        """`flush` reads the steps that a class has in flight."""
        self.num_preempted = 0
        """Times that a sequence or a job has given up its memory."""
        self._memory = memory
        self._queues = queues
        self._max_rows = max_rows
        self._flush = flush

    def schedule_prefill(self, traffic: TrafficClass, max_jobs: int, min_jobs: int) -> list[PrefillJob]:
        """Jobs to compute now: up to `max_jobs`, each with memory and with a free row for its sequences.

        Up to `min_jobs` come along without a free row, because their streams have no other work; not jobs that could
        begin with a newer version later.
        """
        queue = self._queues[traffic]
        num_free = self._max_rows - queue.num_running
        jobs: list[PrefillJob] = []
        for job in list(queue.waiting):
            has_stream = 0 < len(jobs) < min_jobs and not job.request.switches_in_flight
            if len(jobs) == max_jobs or (num_free <= 0 and not has_stream):
                break
            if not job.is_computed:
                if not job.num_bytes and not self._admit(traffic, job):
                    break
                jobs.append(job)
            num_free -= len(job.sequences)
        return jobs

    def _admit(self, traffic: TrafficClass, job: PrefillJob) -> bool:
        """Give a job its memory, if it and the first positions of a sequence fit."""
        queue = self._queues[traffic]
        decoder = queue.least_loaded()
        fits = self._free_until(
            traffic,
            lambda: self._memory.fits(job, decoder),
            lambda: [other for other in queue.admitted() if other.sort_key > job.sort_key],
        )
        if fits:
            queue.admit(job, self._memory.allocate(job))
        return fits

    def _free_until(
        self, traffic: TrafficClass, fits: Callable[[], bool], droppable: Callable[[], list[PrefillJob]]
    ) -> bool:
        """Take memory from rollouts, where serving asks, then from the last of the droppable jobs, until it fits."""
        while not fits():
            if traffic == "serving" and self._preempt_one("rollout", spared=None):
                continue
            jobs = droppable()
            if not jobs:
                return False
            self._drop(max(jobs, key=lambda job: job.sort_key))
        return True

    def schedule_decode(self, traffic: TrafficClass) -> None:
        """Reserve the next position of each running sequence, and let sequences of computed jobs join."""
        for decoder in self._queues[traffic].decoders:
            while decoder.sequences and not self._memory.resize(decoder, decoder.sequences):
                if not self._preempt_one(traffic, spared=self._oldest(traffic)):
                    break
        self._join(traffic)

    def _join(self, traffic: TrafficClass) -> None:
        """Fill free rows with sequences of computed jobs: all at once where there is memory, else one by one."""
        queue = self._queues[traffic]
        computed = [job for job in queue.admitted() if job.is_computed]
        shares = queue.assigned(computed, self._max_rows - queue.num_running)
        fit = [self._resize_for(*share) for share in shares]
        if not all(fit):
            self._flush(queue)  # before any join: sequences that end would move those whose first step comes next
            shares = queue.assigned(computed, self._max_rows - queue.num_running)
            fit = [self._resize_for(*share) for share in shares]
        for decoder, joining in compress(shares, fit):
            decoder.join(joining)
            for job, sequence in joining:
                job.sequences.remove(sequence)
        for job in [job for job in computed if not job.sequences]:
            queue.waiting.remove(job)  # before it might be dropped to make room for others
        for job in [job for job in queue.admitted() if job.is_computed]:
            while job.logits_V is not None and job.sequences and queue.num_running < self._max_rows:
                decoder, sequence = queue.least_loaded(), job.sequences[0]
                if not self._make_room(traffic, decoder, sequence, job):
                    return
                decoder.join([(job, sequence)])
                job.sequences.pop(0)
            if not job.sequences:
                queue.waiting.remove(job)

    def _resize_for(self, decoder: Decoder, joining: Ordered[tuple[PrefillJob, Sequence]]) -> bool:
        return self._memory.resize_to_grow(decoder, [*decoder.sequences, *(sequence for _, sequence in joining)])

    def _make_room(self, traffic: TrafficClass, decoder: Decoder, sequence: Sequence, job: PrefillJob) -> bool:
        """Make room for one more sequence; False if it has to wait until others end."""
        queue = self._queues[traffic]
        return self._free_until(
            traffic,
            lambda: self._memory.resize(decoder, [*decoder.sequences, sequence]),
            lambda: [] if queue.num_running else [other for other in queue.admitted() if other is not job],
        )

    def preempt(self, queue: RequestQueue, decoder: Decoder, sequence: Sequence) -> None:
        """Move a sequence, of which nothing is in flight, from its slot back to the queue."""
        decoder.leave([decoder.sequences.index(sequence)], waits=True)
        sequence.restart()
        queue.add(PrefillJob.of([sequence]))
        self.num_preempted += 1

    def requeue(self, queue: RequestQueue, decoders: list[Decoder], failed: Collection[str]) -> RequestQueue:
        """A queue with new decoders, which computes all requests but `failed` again from the tokens that they have."""
        running = [
            sequence
            for sequence in queue.running()
            if sequence.request.request_id not in failed and sequence.finish_reason is None
        ]
        jobs = [job for job in queue.waiting if job.request.request_id not in failed]
        for job in jobs:
            job.restart()
        for sequence in running:
            sequence.restart()
        self.num_preempted += len(running)
        jobs += [PrefillJob.of([sequence]) for sequence in running]
        waiting = sorted((job for job in jobs if job.sequences), key=lambda job: job.sort_key)
        return RequestQueue(decoders, waiting=deque(waiting), num_tokens=queue.num_tokens, is_paused=queue.is_paused)

    def _preempt_one(self, traffic: TrafficClass, spared: Sequence | None) -> bool:
        """Preempt the last job or sequence, of rollouts or else of class `traffic`; False if there is none."""
        in_flight = [queue for queue in self._queues.values() if any(one.in_flight for one in queue.decoders)]
        if in_flight:  # sequences may end with what is in flight
            for queue in in_flight:
                self._flush(queue)
            return True
        for queue in [self._queues["rollout"]] + ([self._queues[traffic]] if traffic != "rollout" else []):
            running = [(one, decoder) for decoder in queue.decoders for one in decoder.sequences if one is not spared]
            jobs = queue.admitted()
            newest = max((job.sort_key for job in jobs), default=MIN_SORT_KEY)
            if jobs and newest >= max((sequence.sort_key for sequence, _ in running), default=MIN_SORT_KEY):
                self._drop(next(job for job in jobs if job.sort_key == newest))
                return True
            if running:
                sequence, decoder = max(running, key=lambda pair: (pair[0].sort_key, pair[0].index))
                self.preempt(queue, decoder, sequence)
                return True
        return False

    def _drop(self, job: PrefillJob) -> None:
        """Take a job's memory; it is computed again."""
        job.restart()
        self.num_preempted += 1

    def _oldest(self, traffic: TrafficClass) -> Sequence | None:
        """The sequence that always goes on; None for rollouts while serving holds memory, which will end."""
        if traffic == "rollout" and self._queues["serving"].holds_memory:
            return None
        running = self._queues[traffic].running()
        return min(running, key=lambda sequence: (sequence.sort_key, sequence.index), default=None)
