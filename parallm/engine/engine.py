"""Continuous batching: prompts are computed in chunks, their completions join as rows and decode together.

One heartbeat: a unit is either one prompt chunk per lane or one decode step of all rows of a traffic class, with one
host synchronisation. An engine that runs ahead launches a step before it reads the one before, so that the device
computes while Python works. Knows nothing of learning or HTTP. Everything here runs on the device thread.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as Ordered

import mlx.core as mx

from parallm.device.streams import DeviceStreams
from parallm.engine.decode import Decoder, Step
from parallm.engine.kv.budget import KvBudget, max_context, max_rows
from parallm.engine.prefill import Prefill
from parallm.engine.request_queue import ActiveRequestIds, RequestQueue, insert, make_sequences
from parallm.engine.scheduler import Scheduler
from parallm.engine.sequence import PrefillJob, Sequence
from parallm.engine.settings import EngineSettings
from parallm.engine.speculation_choice import make_speculation
from parallm.engine.step_failures import BrokenRows, has_nan, is_out_of_memory
from parallm.errors import EngineFull, EngineStopped, ParallmError
from parallm.model.adapters.table import AdapterTable
from parallm.model.lora.selector import LoraSelector
from parallm.model.shared_model import SharedModel
from parallm.types import GenerationRequest, TokenEvent, TrafficClass


def switch_versions(switching: Ordered[Sequence], adapters: AdapterTable, read: Callable[[], None]) -> None:
    """Move rows, and prompts not yet begun, to the newest version. `read` waits for the tokens in flight, which are of
    the versions before.

    A row keeps its keys and values, which the versions before have made.
    """
    newest = {name: adapters.resolve(name) for name in {one.request.model for one in switching}}
    moving = [one for one in switching if one.adapter is not newest[one.request.model]]
    if moving:
        read()
    for one in moving:
        if not one.has_left:
            adapter = newest[one.request.model]
            adapters.acquire(adapter)
            adapters.release(one.adapter)
            one.adapter = adapter


TRAFFIC_CLASSES: tuple[TrafficClass, ...] = ("serving", "rollout")


class Engine:
    """Turns requests into token events. `emit` gets the events of each unit, `report` the requests that failed."""

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
        """`async_scheduling`: launch each decode step before the one before is read, as pays where a GPU waits for Python."""
        self.model = model
        self.settings = settings
        self.max_context = max_context(settings, model)
        self._adapters = adapters
        self._streams = streams
        self._loras = LoraSelector(model)
        self._emit = emit
        self._report = report
        self._async_scheduling = async_scheduling
        self.memory = KvBudget(model, settings)
        self.speculation = make_speculation(settings.speculation, model, self.max_context)
        self._traffic = {name: RequestQueue(self._make_decoders()) for name in TRAFFIC_CLASSES}
        self.scheduler = Scheduler(self.memory, self._traffic, lambda state: self._read(state, state.take_steps()))
        self.prefill = Prefill(model, streams, self._loras, self.memory, settings, adapters.holds, self.scheduler.left)
        self._broken = BrokenRows()
        self._names = ActiveRequestIds()
        self._num_requests = 0
        self._at_work: list[Sequence] | None = None  # whose unit it is; None between units

    def add(self, request: GenerationRequest, streams: bool) -> None:
        """Queue a validated request. Raises UnknownModel, EngineFull (not for rollouts), InvalidRequest."""
        traffic = self._traffic[request.traffic]
        if request.traffic == "serving" and len(traffic.prompts) >= self.settings.max_waiting:
            raise EngineFull(f"{len(traffic.prompts)} requests wait already; try later or raise engine.max_waiting")
        self._num_requests += 1
        adapter = self._adapters.resolve(request.model)
        members = make_sequences(request, adapter, streams=streams, arrival=self._num_requests)
        self._names.begin(members)
        for _ in members:
            self._adapters.acquire(adapter)
        insert(traffic.prompts, PrefillJob.of(members))
        traffic.is_blocked = False

    def abort(self, *request_ids: str) -> None:
        """End all completions of these requests before the next unit. Unknown or finished ids are fine."""
        doomed = frozenset(request_ids)
        for traffic in self._traffic.values():
            for prompt in [prompt for prompt in traffic.prompts if prompt.request.request_id in doomed]:
                traffic.prompts.remove(prompt)
                self._end(prompt.waiting)
            self._drop_rows(traffic, lambda row: row.request.request_id in doomed)
            traffic.is_blocked = False
        self._count()

    def cancel(self, *request_ids: str) -> None:
        """`abort` that tells what these requests have so far, as completions that end with `abort`."""
        doomed = frozenset(request_ids)
        ended = [one for state in self._traffic.values() for one in state.sequences()]
        events = [one.aborted(self.model.tokenizer) for one in ended if one.request.request_id in doomed]
        self.abort(*request_ids)
        if events:
            self._emit(events)

    def hold(self, traffic: TrafficClass) -> None:
        """Freeze a class where it is: requests may come, and nothing is computed for any until `release`."""
        self.settle(traffic)
        self._traffic[traffic].is_paused = True

    def release(self, traffic: TrafficClass) -> None:
        state = self._traffic[traffic]
        state.is_paused = state.is_blocked = False

    def reset_caches(self) -> None:
        """Give back memory that only saves work: beginnings of prompts, views of adapters and MLX's free buffers."""
        self.memory.prefixes.clear()
        self._loras.clear()
        mx.clear_cache()
        self._count()

    def has_work(self, traffic: TrafficClass) -> bool:
        state = self._traffic[traffic]
        if state.is_paused:
            return False
        return state.has_rows or bool(state.prompts and not state.is_blocked)

    def step(self, traffic: TrafficClass) -> None:
        """One unit of work for one traffic class. Running ahead, a decode step's tokens come with the next unit."""
        state = self._traffic[traffic]
        self._at_work = state.rows()
        switch_versions(state.switching(), self._adapters, lambda: self._read(state, state.take_steps()))
        prompts = self.scheduler.schedule_prefill(
            traffic, max_rows(self.settings), self.prefill.most_prompts, self._streams.width
        )
        # Rollouts fill their rows first; serving takes turns, so that a long prompt does not stall running answers
        if prompts and (traffic == "rollout" or state.decoded_last or state.num_rows == 0):
            state.decoded_last = False
            self._compute_prompts(state, prompts)
            has_worked = True
        else:
            state.decoded_last = True
            has_worked = self._decode(traffic)
        self._count()
        for one in self._traffic.values():
            one.is_blocked = one is state and not has_worked
        self._at_work = None

    def settle(self, traffic: TrafficClass) -> None:
        """Read what is still in flight of a class, if anything is."""
        state = self._traffic[traffic]
        self._at_work = state.rows()
        self._wait_for_chunk(state)
        self._read(state, state.take_steps())
        self._count()
        self._at_work = None

    def fail(self, traffic: TrafficClass, error: Exception) -> None:
        """Give up the requests of the unit that raised `error`, or those of the whole class where it was no unit's.

        Where memory ran out, all rows are computed again within a lower limit instead, as long as it can be lowered.
        """
        at_work, self._at_work = self._at_work, None
        everybody = [one for state in self._traffic.values() for one in state.sequences()]
        if at_work is not None and is_out_of_memory(error) and self.memory.lower(one.request for one in everybody):
            for name in self._traffic:
                self._begin_again(name, frozenset())
            self._loras.clear()
            mx.clear_cache()
        else:
            everything = at_work is None or isinstance(error, EngineStopped)
            ended = list(self._traffic[traffic].sequences()) if everything else at_work or []
            doomed = frozenset(one.request.request_id for one in ended)
            self._begin_again(traffic, doomed)
            self._report(sorted(doomed), error)
        self._count()

    def _begin_again(self, traffic: TrafficClass, doomed: Collection[str]) -> None:
        """Forget all that a class has computed, as what failed may be among it, and the requests `doomed`."""
        state = self._traffic[traffic]
        self._end(one for one in state.sequences() if one.request.request_id in doomed or one.finish_reason)
        self._traffic[traffic] = self.scheduler.requeue(state, self._make_decoders(), doomed)
        self.memory.prefixes.clear()

    def num_running(self) -> int:
        return sum(state.num_rows for state in self._traffic.values())

    def num_waiting(self) -> int:
        return sum(len(state.prompts) for state in self._traffic.values())

    def num_tokens(self) -> Mapping[TrafficClass, int]:
        return {name: state.num_tokens for name, state in self._traffic.items()}

    def _count(self) -> None:
        self.memory.used = self.memory.total(self._traffic.values())

    def _make_decoders(self) -> list[Decoder]:
        streams = self._streams.streams
        return [Decoder(self.model, self._loras, self.memory.shard(), self.speculation, one) for one in streams]

    def _compute_prompts(self, state: RequestQueue, prompts: list[PrefillJob]) -> None:
        """One chunk of each prompt, or the first of them whole; what was in flight is read meanwhile."""
        prompts = self.prefill.for_one_unit(prompts)
        self._at_work = members = [member for prompt in prompts for member in prompt.waiting]
        chunks = self.prefill.compute(prompts)
        if self._async_scheduling:
            mx.async_eval(chunks)
        self._at_work = members + state.rows()
        self._read(state, state.take_steps())
        self._wait_for_chunk(state)
        self._at_work = members
        if self._async_scheduling:  # the next chunk, or a step, is built while the device computes this one
            state.computing = (chunks, members)
        else:
            mx.eval(chunks)
        for prompt in [prompt for prompt in prompts if prompt.is_computed]:
            self._tell_prompt(state, prompt)

    def _wait_for_chunk(self, state: RequestQueue) -> None:
        """Wait for the chunk of prompts that is still being computed, if there is one: what fails is its own."""
        at_work, (arrays, members) = self._at_work, state.computing
        if arrays:
            state.computing, self._at_work = ((), ()), list(members)
            mx.eval(arrays)
            self._at_work = at_work

    def _tell_prompt(self, state: RequestQueue, prompt: PrefillJob) -> None:
        """Hand out what is known once a prompt is computed; that is all where no token is to be sampled."""
        if prompt.scores is not None:
            told = prompt.scores.read()
            for member in prompt.waiting:
                member.prompt_logprobs, member.is_broken = told, has_nan(told)
            self._give_up(self._broken.failures(prompt.waiting))
        if prompt.request.sampling.max_tokens == 0 and prompt in state.prompts:
            for member in prompt.waiting:
                member.end_unsampled()
            state.prompts.remove(prompt)
            self._end(prompt.waiting)
            self._emit([event for one in prompt.waiting if (event := one.event(self.model.tokenizer)) is not None])

    def _decode(self, traffic: TrafficClass) -> bool:
        """Launch the next step of all rows and read the one before, or both of one; False if there was neither."""
        state = self._traffic[traffic]
        self._read(state, state.steps_to_read_first())
        self.scheduler.reserve_step(traffic)
        self.scheduler.join(traffic, max_rows(self.settings))
        self._at_work = state.rows()
        active = [decoder for decoder in state.decoders if decoder.goes_on(self.max_context)]
        resting = [decoder for decoder in state.decoders if decoder not in active]
        before = [decoder.in_flight for decoder in active] + [decoder.take() for decoder in resting]
        launched = self._streams.run(Decoder.launch, active)
        if self._async_scheduling:
            mx.async_eval(launched)
        self._wait_for_chunk(state)
        self._read(state, [step for step in before if step is not None])
        masked = [decoder for decoder in active if decoder.waits_for_masks]
        sampled = self._streams.run(Decoder.sample, masked)
        if self._async_scheduling:
            mx.async_eval(sampled)
        else:
            self._read(state, state.take_steps())
        return bool(launched or any(before))

    def _read(self, state: RequestQueue, steps: list[Step]) -> None:
        """Wait for steps, hand out their tokens, and let the rows leave that have ended."""
        if not steps:
            return
        mx.eval([step.arrays() for step in steps])
        rows = [row for step in steps for row in step.read(self.model.tokenizer, self.max_context)]
        state.num_tokens += sum(row.num_unemitted for row in rows)
        failed = self._broken.failures(rows)
        whole = [row for row in rows if row.request.request_id not in failed]
        events = [event for row in whole if (event := row.event(self.model.tokenizer)) is not None]
        if events:
            self._emit(events)  # first of all: what was sampled is told, whatever fails behind it
        self._give_up(failed)
        self._keep_rows(state)
        self._drop_rows(state, lambda row: row.finish_reason is not None)

    def _give_up(self, failed: Mapping[str, ParallmError]) -> None:
        for request_id, error in failed.items():
            self.abort(request_id)
            self._report([request_id], error)

    def _keep_rows(self, state: RequestQueue) -> None:
        """Keep what rows that have ended have computed, for a turn that goes on from there."""
        kept = [array for decoder in state.decoders for array in self.prefill.keep_ended(decoder)]
        if kept:
            (mx.async_eval if self._async_scheduling else mx.eval)(kept)

    def _drop_rows(self, state: RequestQueue, leaves: Callable[[Sequence], bool]) -> None:
        for decoder in state.decoders:
            places = [place for place, row in enumerate(decoder.rows) if leaves(row)]
            self._end([decoder.rows[place] for place in places])
            decoder.leave(places, waits=not self._async_scheduling)

    def _end(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            self._names.end(sequence)
            self._adapters.release(sequence.adapter)
