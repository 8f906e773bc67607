"""Continuous batching: prompts are computed in chunks, then their sequences join a decode batch and decode together.

The device thread calls `step` for one unit of work: prompts of each stream, or one decode step of all sequences of a
traffic class, with one host synchronisation. With asynchronous scheduling a step is launched before the one before is
read, so that the device computes while Python works. Everything here runs on the device thread.

Finite weights can have products that are not, as of an adapter that has diverged. NaN touches no other sequence:
products and attention keep rows apart, and a slot is cleared when its sequence leaves (`SlotCache.clear`). A client's
request fails with the name of the adapter; a rollout ends with the NaN, which the learner leaves out.
"""

import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping

import mlx.core as mx

from parallm.device.memory import is_out_of_memory
from parallm.device.streams import DeviceStreams
from parallm.engine.decoder import Decoder, Step
from parallm.engine.kv.budget import max_context
from parallm.engine.memory import make_memory
from parallm.engine.prefill import make_prefill
from parallm.engine.scheduler import RequestQueue, Scheduler
from parallm.engine.sequence import PrefillJob, Sequence, make_sequences
from parallm.engine.settings import EngineSettings
from parallm.engine.speculation import make_speculation
from parallm.errors import EngineFull, EngineStopped, InvalidRequest, NotFinite, ParallmError
from parallm.model.adapters.adapter import Adapter
from parallm.model.adapters.names import versioned
from parallm.model.adapters.table import AdapterTable
from parallm.model.chat.tokenizer import ChatTokenizer
from parallm.model.lora.selector import LoraSelector
from parallm.model.shared_model import SharedModel
from parallm.types import TASK_ROUTES, EngineRow, GenerationRequest, TaskSpec, TokenEvent, TrafficClass

logger = logging.getLogger(__name__)

TRAFFIC_CLASSES: tuple[TrafficClass, ...] = ("serving", "rollout")
PATIENCE = 4
"""Decode units for which a rollout's prompt waits for another one, so that no stream is idle while it is computed."""
MANY_ANSWERS = 32
"""A device that computes several prompts in one forward lets a prompt wait so, too, while as many answers run: that is
30 ms of an 8B shape on an H200, and a forward for each prompt would stop all answers for 10 to 20."""
LONG_STEPS = 4
"""Steps whose held events are emitted before other work begins, which may take long. Those of fewer stay held, so that
classes that take turns do not undo it."""


class Engine:
    """Turns requests into token events. `emit` gets the events of each unit, or held ones later (`hold_events`), and
    `report` the requests that failed."""

    def __init__(
        self,
        model: SharedModel,
        adapters: AdapterTable,
        streams: DeviceStreams,
        settings: EngineSettings,
        *,
        emit: Callable[[list[TokenEvent]], None],
        report: Callable[[list[str], Exception], None],
        async_scheduling: bool = False,
    ) -> None:
        """`async_scheduling` pays where a GPU waits for Python."""
        self.model = model
        self.settings = settings
        self.max_context = max_context(settings, model)
        self._adapters = adapters
        self._streams = streams
        self._loras = LoraSelector(model)
        self._outbox = Outbox(model.tokenizer, emit)
        self._report = report
        self._async_scheduling = async_scheduling
        self.speculation = make_speculation(settings.speculation, model)
        self._queues: dict[TrafficClass, RequestQueue] = {traffic: RequestQueue([]) for traffic in TRAFFIC_CLASSES}
        self.memory = make_memory(model, settings, self._queues, adapters.holds)
        self.kv_budget = self.memory.budget
        for queue in self._queues.values():
            queue.decoders = self._make_decoders()
        self.scheduler = Scheduler(self.memory, self._queues, self.kv_budget.max_rows, self._flush)
        self.prefill = make_prefill(model, streams, self._loras, self.memory, settings, adapters.holds)
        self._preparations = self.memory.compilations()
        self._warned: set[str] = set()  # of models that computed NaN in a rollout
        self._num_requests = 0
        self._at_work: list[Sequence] | None = None  # sequences of the unit at work; None between units

    def add(self, request: GenerationRequest, is_streaming: bool) -> None:
        """Queue a validated request with an id of its own. Raises UnknownModel, EngineFull (not for rollouts),
        InvalidRequest, ContextTooLong."""
        self.kv_budget.check(request)  # on this thread, which lowers the limit when memory runs out
        queue = self._queues[request.traffic]
        if request.traffic == "serving" and len(queue.waiting) >= self.settings.max_waiting:
            raise EngineFull(f"{len(queue.waiting)} requests wait already; try later or raise engine.max_waiting")
        adapter = self._adapters.resolve(request.model)
        if (adapter is not None and adapter.spec is not None) or not self.model.writes_text:
            raise InvalidRequest(_way_out(request.model, None if adapter is None else adapter.spec), "model")
        self._num_requests += 1
        arrival, context = self._num_requests, self.max_context
        sequences = make_sequences(request, adapter, is_streaming=is_streaming, arrival=arrival, max_context=context)
        for _ in sequences:
            self._adapters.acquire(adapter)
        queue.add(PrefillJob.of(sequences))
        queue.is_blocked = False

    def abort(self, *request_ids: str) -> None:
        """End all completions of these requests before the next unit. Unknown or finished ids are fine."""
        aborted = frozenset(request_ids)
        for queue in self._queues.values():
            for job in [job for job in queue.waiting if job.request.request_id in aborted]:
                queue.waiting.remove(job)
                self._release(job.sequences)
            self._drop(queue, lambda sequence: sequence.request.request_id in aborted)
            queue.is_blocked = False
        self._count()

    def cancel(self, *request_ids: str) -> None:
        """`abort`, and emit what these requests have so far, as completions that end with `abort`."""
        sequences = [sequence for queue in self._queues.values() for sequence in queue.sequences()]
        cancelled = [sequence for sequence in sequences if sequence.request.request_id in request_ids]
        for sequence in cancelled:
            sequence.finish_reason = "abort"
        self.abort(*request_ids)
        self._outbox.put(cancelled)

    def rows(self) -> list[EngineRow]:
        """Return all completions that decode or wait."""
        running = {id(sequence) for queue in self._queues.values() for sequence in queue.running()}
        sequences = [sequence for queue in self._queues.values() for sequence in queue.sequences()]
        return [sequence.row(is_running=id(sequence) in running) for sequence in sequences]

    def pause(self, traffic: TrafficClass) -> None:
        """Freeze a class where it is: requests may come, and nothing is computed for any until `resume`."""
        self.flush(traffic)
        self._queues[traffic].is_paused = True

    def resume(self, traffic: TrafficClass) -> None:
        queue = self._queues[traffic]
        queue.is_paused = queue.is_blocked = False

    def hold_events(self, is_holding: bool) -> None:
        """Emit all held events. If `is_holding`, later events of a stream are held until the next call, or until other
        work begins after several steps. The first and the last event of a completion are never held."""
        self._outbox.is_holding = is_holding
        self._outbox.flush()

    def reset_caches(self) -> None:
        """Free memory that only saves work: the prefix cache, LoRA weights of versions and MLX's free buffers."""
        self.memory.prefixes.clear()
        self._loras.clear()
        mx.clear_cache()
        self._count()

    def has_work(self, traffic: TrafficClass) -> bool:
        queue = self._queues[traffic]
        if queue.is_paused:
            return False
        return queue.has_running or bool(queue.waiting and not queue.is_blocked)

    def step(self, traffic: TrafficClass) -> None:
        """One unit of work of a class. With asynchronous scheduling a step's tokens come with the next unit."""
        queue = self._queues[traffic]
        self._at_work = queue.running()
        self._switch_versions(queue)
        jobs = self.scheduler.schedule_prefill(traffic, self.prefill.max_jobs, self._streams.width)
        # Rollouts fill their rows first, but a prompt that would leave a stream idle waits a little for others. Serving
        # alternates, so that a long prompt does not stall running answers
        fills = traffic == "rollout" and len(jobs) >= self._streams.width
        waits = traffic == "rollout" or self._waits_for_others(queue, jobs)
        patience = PATIENCE if waits else 1
        is_idle = queue.num_running == 0 and not (self.prefill.takes_turns and queue.has_computed)
        if jobs and (fills or queue.num_decodes >= patience or is_idle):
            queue.num_decodes = 0
            self._compute(queue, jobs)
            has_worked = True
        else:
            queue.num_decodes += 1
            has_worked = self._decode(traffic)
        self._count()
        for other in self._queues.values():
            other.is_blocked = other is queue and not has_worked
        self._at_work = None

    def _waits_for_others(self, queue: RequestQueue, jobs: list[PrefillJob]) -> bool:
        """Whether few prompts of which none has begun would stop many answers."""
        if not self._async_scheduling or queue.num_running < MANY_ANSWERS:
            return False
        return len(jobs) < min(PATIENCE, self.prefill.max_jobs) and not any(job.num_computed for job in jobs)

    def flush(self, traffic: TrafficClass) -> None:
        """Read what is still in flight of a class, if anything is, before other work begins."""
        queue = self._queues[traffic]
        self._at_work = queue.running()
        self._wait_for_prefill(queue)
        self._flush(queue)
        self._outbox.flush_before_other_work()
        self._count()
        self._at_work = None

    def prepare(self) -> bool:
        """Capture or compile one more kind of decode step, before a request waits for it; False if nothing is left."""
        try:
            return next(self._preparations, None) is not None
        except Exception as error:  # noqa: BLE001  # no request has asked for it, and none shall fail by it
            logger.warning("decode steps are prepared as requests need them, after: %s", error)
            self._preparations = iter(())
            return False

    def fail(self, traffic: TrafficClass, error: Exception) -> None:
        """End the requests of the unit that raised `error`, or those of the whole class where no unit raised it. When
        memory ran out, all requests are computed again within a lower limit, as long as it can be lowered."""
        at_work, self._at_work = self._at_work, None
        self._outbox.flush()
        requests = [sequence.request for queue in self._queues.values() for sequence in queue.sequences()]
        if at_work is not None and is_out_of_memory(error) and self.memory.lower(requests):
            for name in self._queues:
                self._requeue(name, frozenset())
            self._loras.clear()
            mx.clear_cache()
        else:
            ends_all = at_work is None or isinstance(error, EngineStopped)
            ended = list(self._queues[traffic].sequences()) if ends_all else at_work or []
            failed = frozenset(sequence.request.request_id for sequence in ended)
            self._requeue(traffic, failed)
            self._report(sorted(failed), error)
        self._count()

    def _requeue(self, traffic: TrafficClass, failed: Collection[str]) -> None:
        """End the requests `failed`, and drop all that a class has computed, since the failed part may be among it."""
        queue = self._queues[traffic]
        self._release(
            sequence
            for sequence in queue.sequences()
            if sequence.request.request_id in failed or sequence.finish_reason
        )
        self.speculation.leave(queue.running())
        self._queues[traffic] = self.scheduler.requeue(queue, self._make_decoders(), failed)
        self.memory.prefixes.clear()

    def num_running(self) -> int:
        return sum(queue.num_running for queue in self._queues.values())

    def num_waiting(self) -> int:
        return sum(len(queue.waiting) for queue in self._queues.values())

    def num_tokens(self) -> Mapping[TrafficClass, int]:
        return {traffic: queue.num_tokens for traffic, queue in self._queues.items()}

    def _count(self) -> None:
        self.kv_budget.used = self.memory.num_held_bytes()

    def _make_decoders(self) -> list[Decoder]:
        handles = self._streams.handles
        return [
            Decoder(self.model, self._loras, self.memory.make_batch(), self.speculation, stream) for stream in handles
        ]

    def _switch_versions(self, queue: RequestQueue) -> None:
        """Move sequences that switch versions in flight to the newest one, once the tokens in flight are read."""
        switching = queue.switching()
        newest = {name: self._adapters.resolve(name) for name in {one.request.model for one in switching}}
        moving = [sequence for sequence in switching if sequence.adapter is not newest[sequence.request.model]]
        if moving:
            self._flush(queue)
        for sequence in moving:
            if not sequence.has_left:
                adapter = newest[sequence.request.model]
                self._adapters.acquire(adapter)
                self._adapters.release(sequence.adapter)
                sequence.adapter = adapter

    def _compute(self, queue: RequestQueue, jobs: list[PrefillJob]) -> None:
        """Compute a chunk of a job on each stream, or several jobs whole; read meanwhile what was in flight."""
        jobs = self.prefill.for_one_unit(jobs)
        self._at_work = sequences = [sequence for job in jobs for sequence in job.sequences]
        chunks = self.prefill.compute(jobs)
        if self._async_scheduling:
            mx.async_eval(chunks)
        self._at_work = sequences + queue.running()
        self._flush(queue)
        self._outbox.flush_before_other_work()
        self._wait_for_prefill(queue)
        self._at_work = sequences
        if self._async_scheduling:  # the next chunk, or a step, is built while the device computes this one
            queue.in_flight = (chunks, sequences)
        else:
            mx.eval(chunks)
        for job in [job for job in jobs if job.is_computed]:
            self._finish_prefill(queue, job)

    def _wait_for_prefill(self, queue: RequestQueue) -> None:
        """Wait for the chunks in flight, if there are any; an error is that of their sequences."""
        at_work, (arrays, sequences) = self._at_work, queue.in_flight
        if arrays:
            queue.in_flight, self._at_work = ((), ()), list(sequences)
            mx.eval(arrays)
            self._at_work = at_work

    def _finish_prefill(self, queue: RequestQueue, job: PrefillJob) -> None:
        """Hand out the prompt's log-probs; a request without tokens to sample ends here."""
        if job.scorer is not None:
            logprobs = job.scorer.read()
            for sequence in job.sequences:
                sequence.prompt_logprobs = logprobs
                sequence.is_broken = any(one is not None and math.isnan(one.logprob) for one in logprobs)
            self._give_up(self._failures(job.sequences))
        if job.request.sampling.max_tokens == 0 and job in queue.waiting:
            for sequence in job.sequences:
                sequence.end_unsampled()
            queue.waiting.remove(job)
            self._release(job.sequences)
            self._outbox.put(job.sequences)

    def _decode(self, traffic: TrafficClass) -> bool:
        """Launch the next step of all sequences and read the one before, or both of one; False without either."""
        queue = self._queues[traffic]
        if any(decoder.waits_to_be_read for decoder in queue.decoders):
            self._flush(queue)
        self.scheduler.schedule_decode(traffic)
        self._at_work = queue.running()
        active = [decoder for decoder in queue.decoders if decoder.has_next_step]
        idle = [decoder for decoder in queue.decoders if decoder not in active]
        before = [decoder.in_flight for decoder in active] + [decoder.take() for decoder in idle]
        launched = self._streams.run(Decoder.launch, active)
        if self._async_scheduling:
            mx.async_eval(launched)
        self._wait_for_prefill(queue)
        self._collect(queue, [step for step in before if step is not None])
        masked = [decoder for decoder in active if decoder.waits_for_masks]
        sampled = self._streams.run(Decoder.sample, masked)
        if self._async_scheduling:
            mx.async_eval(sampled)
        else:
            self._flush(queue)
        return bool(launched or any(before))

    def _flush(self, queue: RequestQueue) -> None:
        """Read the steps in flight."""
        self._collect(queue, queue.take_steps())

    def _collect(self, queue: RequestQueue, steps: list[Step]) -> None:
        """Wait for steps, emit their tokens, and remove the sequences that have ended."""
        if not steps:
            return
        mx.eval([step.arrays() for step in steps])
        sequences: list[Sequence] = []
        for step in steps:
            read, num_tokens = step.read(self.model.tokenizer)
            sequences += read
            queue.num_tokens += num_tokens
        shown = [sequence for sequence in sequences if sequence.has_event]
        ended = [sequence for sequence in shown if sequence.finish_reason is not None]
        failures = self._failures(ended)
        # first of all: sampled tokens are emitted, whatever fails later
        self._outbox.put(sequence for sequence in shown if sequence.request.request_id not in failures)
        if not ended:
            return
        self._give_up(failures)
        kept = [array for decoder in queue.decoders for array in self.prefill.keep_ended(decoder)]
        if kept:
            (mx.async_eval if self._async_scheduling else mx.eval)(kept)
        self._drop(queue, lambda sequence: sequence.finish_reason is not None)

    def _failures(self, sequences: Iterable[Sequence]) -> dict[str, NotFinite]:
        """Errors of clients' requests with a broken sequence, by request id; warns of broken rollouts."""
        errors = [(one.request, _not_finite(one.adapter)) for one in sequences if one.is_broken]
        for message in {str(error) for request, error in errors if request.traffic == "rollout"} - self._warned:
            self._warned.add(message)
            logger.warning("a rollout ends where it is: %s", message)
        return {request.request_id: error for request, error in errors if request.traffic == "serving"}

    def _give_up(self, failures: Mapping[str, ParallmError]) -> None:
        for request_id, error in failures.items():
            self.abort(request_id)
            self._report([request_id], error)

    def _drop(self, queue: RequestQueue, leaves: Callable[[Sequence], bool]) -> None:
        for decoder in queue.decoders:
            indices = [index for index, sequence in enumerate(decoder.sequences) if leaves(sequence)]
            self._release([decoder.sequences[index] for index in indices])
            decoder.leave(indices, waits=not self._async_scheduling)

    def _release(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            self._adapters.release(sequence.adapter)
            self._outbox.drop(sequence)


class Outbox:
    """Events of sequences on their way out: with each step, or several steps of a stream together."""

    def __init__(self, tokenizer: ChatTokenizer, emit: Callable[[list[TokenEvent]], None]) -> None:
        self.is_holding = False
        """Whether events wait for `flush`, but for the first and the last one of each completion."""
        self._tokenizer = tokenizer
        self._emit = emit
        self._held: dict[Sequence, None] = {}  # with tokens not emitted yet, in the order of their first
        self._num_steps = 0  # whose events are held

    def put(self, sequences: Iterable[Sequence]) -> None:
        """Take the sequences that have new tokens, or have ended, after one step."""
        if self.is_holding:
            new = list(sequences)
            held = dict.fromkeys(sequence for sequence in new if sequence.may_be_held)
            self._num_steps += bool(held)
            self._held |= held
            sequences = [sequence for sequence in new if sequence not in held]
        if events := [sequence.event(self._tokenizer) for sequence in sequences]:
            self._emit(events)

    def drop(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended or was aborted."""
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


def _way_out(model: str, spec: TaskSpec | None) -> str:
    """The error of a request for text from what writes none."""
    if spec is None:
        return f"{model} has no language model's head, so it writes no text; ask {', '.join(TASK_ROUTES.values())}"
    does = {"embed": "makes vectors", "score": "scores texts", "classify": "classifies texts"}[spec.task]
    return f"{model} {does} and writes no text; ask {TASK_ROUTES[spec.task]}"


def _not_finite(adapter: Adapter | None) -> NotFinite:
    if adapter is None:
        return NotFinite(
            "the base computes numbers that are not finite for this prompt; try model.dtype=bfloat16 or float32"
        )
    return NotFinite(
        f"with {versioned(*adapter.key)} the model computes numbers that are not finite, so no token can be sampled; "
        "ask another model, or load other weights under this name"
    )
