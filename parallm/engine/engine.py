"""Continuous batching: prompts are computed in chunks, their completions join as rows and decode together.

One heartbeat: a unit is either one prompt chunk per lane or one decode step of all rows of a traffic class, with one
host synchronisation. Knows nothing of learning or HTTP. Everything here runs on the device thread.
"""

import logging
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import mlx.core as mx

from parallm.device.lanes import Lanes
from parallm.engine.sampler import Sampled, sample
from parallm.engine.sequence import Prompt, Sequence
from parallm.engine.settings import EngineSettings
from parallm.engine.shard import Shard, make_shard
from parallm.engine.views import AdapterViews
from parallm.errors import EngineFull, InvalidRequest
from parallm.model.adapter_table import AdapterTable
from parallm.model.attention import LEAST_ROWS
from parallm.model.shared_model import SharedModel
from parallm.seeds import mix
from parallm.types import GenerationRequest, TokenEvent, TopLogprob, TrafficClass

logger = logging.getLogger(__name__)

TRAFFIC_CLASSES: tuple[TrafficClass, ...] = ("serving", "rollout")


@dataclass(slots=True)
class Traffic:
    """The prompts and rows of one traffic class. Each class has rows of its own, so that each can step alone."""

    shards: list[Shard]
    prompts: deque[Prompt] = field(default_factory=deque)
    """Not yet computed, or computed with members that wait for a row; first come, first served."""
    decoded_last: bool = False
    num_tokens: int = 0
    """Sampled since the start."""

    @property
    def num_rows(self) -> int:
        return sum(len(shard.rows) for shard in self.shards)


class Engine:
    """Turns requests into token events. `emit` gets the events of each unit, `report` the requests that failed."""

    def __init__(
        self,
        model: SharedModel,
        adapters: AdapterTable,
        lanes: Lanes,
        settings: EngineSettings,
        *,
        emit: Callable[[list[TokenEvent]], None],
        report: Callable[[list[str], Exception], None],
    ) -> None:
        self.model = model
        self.settings = settings
        self.max_context = settings.max_context or min(model.max_context, 8192)
        self._adapters = adapters
        self._lanes = lanes
        self._views = AdapterViews(model)
        self._emit = emit
        self._report = report
        self._traffic = {name: Traffic([make_shard(model) for _ in range(lanes.width)]) for name in TRAFFIC_CLASSES}

    def add(self, request: GenerationRequest, streams: bool) -> None:
        """Queue a validated request. Raises UnknownModel, EngineFull, or InvalidRequest for a name in use."""
        traffic = self._traffic[request.traffic]
        if len(traffic.prompts) >= self.settings.max_waiting:
            raise EngineFull(
                f"{len(traffic.prompts)} requests wait already; try again later or raise engine.max_waiting"
            )
        if any(sequence.request.request_id == request.request_id for sequence in self._sequences(traffic)):
            raise InvalidRequest(f"request id {request.request_id!r} is in use", "request_id")
        adapter = self._adapters.resolve(request.model)
        seed = request.sampling.seed
        if seed is None:
            seed = secrets.randbits(64)
        members = [
            Sequence(request=request, index=index, seed=mix(seed, index), adapter=adapter, streams=streams)
            for index in range(request.n)
        ]
        if adapter is not None:
            for _ in members:
                self._adapters.acquire(adapter)
        cache = self.model.make_cache()
        traffic.prompts.append(Prompt(request=request, cache=cache, waiting=members, streams=streams))

    def abort(self, *request_ids: str) -> None:
        """End all completions of these requests before the next unit. Unknown or finished ids are fine."""
        doomed = frozenset(request_ids)
        for traffic in self._traffic.values():
            for prompt in [prompt for prompt in traffic.prompts if prompt.request.request_id in doomed]:
                traffic.prompts.remove(prompt)
                self._end(prompt.waiting)
            for shard in traffic.shards:
                self._drop_rows(shard, [row.request.request_id in doomed for row in shard.rows])

    def has_work(self, traffic: TrafficClass) -> bool:
        state = self._traffic[traffic]
        return bool(state.prompts) or any(shard.rows for shard in state.shards)

    def step(self, traffic: TrafficClass) -> None:
        """One unit of work for one traffic class."""
        state = self._traffic[traffic]
        self._switch_versions(state)
        prompts = self._next_prompts(state)
        # Rollouts fill their rows first; serving takes turns, so that a long prompt does not stall running answers
        if prompts and (traffic == "rollout" or state.decoded_last or state.num_rows == 0):
            state.decoded_last = False
            self._compute_prompts(prompts)
        else:
            state.decoded_last = True
            self._decode(state)

    def fail(self, traffic: TrafficClass, error: Exception) -> None:
        """Give up all requests of a class after an error in its step, with their rows."""
        state = self._traffic[traffic]
        sequences = list(self._sequences(state))
        self._end(sequences)
        self._traffic[traffic] = Traffic([make_shard(self.model) for _ in state.shards], num_tokens=state.num_tokens)
        self._report(sorted({sequence.request.request_id for sequence in sequences}), error)

    def num_running(self) -> int:
        return sum(state.num_rows for state in self._traffic.values())

    def num_waiting(self) -> int:
        return sum(len(state.prompts) for state in self._traffic.values())

    def num_tokens(self) -> Mapping[TrafficClass, int]:
        return {name: state.num_tokens for name, state in self._traffic.items()}

    def _switch_versions(self, state: Traffic) -> None:
        """Move what switches in flight to the version that its name means now: rows, and prompts not yet begun.

        A row keeps its keys and values, which the versions before have made.
        """
        fresh = [one for prompt in state.prompts if prompt.num_computed == 0 for one in prompt.waiting]
        rows = [row for shard in state.shards for row in shard.rows]
        switching = [one for one in (*rows, *fresh) if one.request.switches_in_flight]
        newest = {name: self._adapters.resolve(name) for name in {one.request.model for one in switching}}
        for one in switching:
            adapter = newest[one.request.model]
            if adapter is not one.adapter:
                self._adapters.acquire(adapter)
                self._adapters.release(one.adapter)
                one.adapter = adapter

    def _next_prompts(self, state: Traffic) -> list[Prompt]:
        """Uncomputed prompts to work on now: one per lane, and none beyond the rows that will be free for them."""
        free = self.settings.max_rows - state.num_rows
        chosen: list[Prompt] = []
        for prompt in state.prompts:
            if free <= 0 or len(chosen) == self._lanes.width:
                break
            if not prompt.is_computed:
                chosen.append(prompt)
            free -= len(prompt.waiting)
        return chosen

    def _compute_prompts(self, prompts: list[Prompt]) -> None:
        """One chunk of each prompt, evaluated together."""
        mx.eval(self._lanes.run(self._compute_chunk, prompts))

    def _compute_chunk(self, prompt: Prompt) -> list[mx.array]:
        tokens = prompt.request.prompt_tokens
        chunk = tokens[prompt.num_computed : prompt.num_computed + self._chunk_size(prompt)]
        view = self._views.for_rows([prompt.waiting[0].adapter])
        hidden_1TH = self.model.hidden(mx.array([chunk], mx.int32), prompt.cache, view)
        prompt.num_computed += len(chunk)
        if prompt.num_computed < len(tokens):
            return [state for layer in prompt.cache for state in _arrays(layer.state)]
        prompt.logits_V = self.model.head(hidden_1TH[0, -1:])[0]
        return [prompt.logits_V, *(state for layer in prompt.cache for state in _arrays(layer.state))]

    def _chunk_size(self, prompt: Prompt) -> int:
        """The chunk of the settings, or a little less where the rest would be too few rows for exact products."""
        rest = len(prompt.request.prompt_tokens) - prompt.num_computed - self.settings.prefill_chunk
        return self.settings.prefill_chunk - (LEAST_ROWS if 0 < rest < LEAST_ROWS else 0)

    def _decode(self, state: Traffic) -> None:
        before = [len(shard.rows) for shard in state.shards]
        first_logits = self._join(state)
        active = [index for index, shard in enumerate(state.shards) if shard.rows]
        sampled = self._lanes.run(
            lambda index: self._sample_shard(state.shards[index], before[index], first_logits[index]), active
        )
        mx.eval([one.arrays() for one in sampled])
        for index, one in zip(active, sampled, strict=True):
            self._append(state.shards[index], one)
            state.num_tokens += len(state.shards[index].rows)
        self._finish(state)

    def _join(self, state: Traffic) -> list[list[mx.array]]:
        """Give free rows to members of computed prompts; per shard the prompt logits (V,) of each new row."""
        first_logits: list[list[mx.array]] = [[] for _ in state.shards]
        for prompt in list(state.prompts):
            while prompt.logits_V is not None and prompt.waiting and state.num_rows < self.settings.max_rows:
                index = min(range(len(state.shards)), key=lambda index: len(state.shards[index].rows))
                state.shards[index].join(prompt.waiting.pop(0), prompt.cache)
                first_logits[index].append(prompt.logits_V)
            if not prompt.waiting:
                state.prompts.remove(prompt)
        return first_logits

    def _sample_shard(self, shard: Shard, num_running: int, first_logits: list[mx.array]) -> Sampled:
        logits = [mx.stack(first_logits)] if first_logits else []
        if num_running:
            newest_B = mx.array([row.tokens[-1] for row in shard.rows[:num_running]], mx.int32)
            logits.insert(0, self.model.head(shard.forward(self._views, num_running, newest_B)))
        return sample(
            mx.concatenate(logits),
            [row.request.sampling for row in shard.rows],
            [row.seed for row in shard.rows],
            [len(row.tokens) for row in shard.rows],
        )

    def _append(self, shard: Shard, sampled: Sampled) -> None:
        tokens, logprobs = sampled.tokens_B.tolist(), sampled.logprobs_B.tolist()
        tops = _top_logprobs(sampled, len(tokens))
        for row, token, logprob, top in zip(shard.rows, tokens, logprobs, tops, strict=True):
            row.append(token, logprob, top, self.model.tokenizer, self.max_context)

    def _finish(self, state: Traffic) -> None:
        rows = [row for shard in state.shards for row in shard.rows]
        events = [event for row in rows if (event := row.event(self.model.tokenizer)) is not None]
        for shard in state.shards:
            self._drop_rows(shard, [row.finish_reason is not None for row in shard.rows])
        if events:
            self._emit(events)

    def _drop_rows(self, shard: Shard, leaves: list[bool]) -> None:
        for row in reversed(range(len(leaves))):
            if leaves[row]:
                self._end([shard.rows[row]])
                shard.leave(row)

    def _end(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            if sequence.adapter is not None:
                self._adapters.release(sequence.adapter)

    def _sequences(self, state: Traffic) -> Iterable[Sequence]:
        for prompt in state.prompts:
            yield from prompt.waiting
        for shard in state.shards:
            yield from shard.rows


def _top_logprobs(sampled: Sampled, num_rows: int) -> list[list[TopLogprob]]:
    if sampled.top_tokens_BK is None or sampled.top_logprobs_BK is None:
        return [[] for _ in range(num_rows)]
    rows = zip(sampled.top_tokens_BK.tolist(), sampled.top_logprobs_BK.tolist(), strict=True)
    return [[TopLogprob(token, logprob) for token, logprob in zip(*row, strict=True)] for row in rows]


def _arrays(state: object) -> list[mx.array]:
    if isinstance(state, mx.array):
        return [state]
    if isinstance(state, list | tuple):
        return [array for part in state for array in _arrays(part)]
    return []
