"""Makes room for rows and prompts within the limit: by what is kept for later prompts, by tighter pools, and by rows
that give theirs up.

A row that gives up its room goes back among the prompts with its tokens, and is computed again when there is room:
rows of rollouts before those of serving, and in each those of the highest priority number and the newest first. So the
first row of a class always goes on, and everybody ends. Rollouts never take the room of serving.
"""

from collections import deque
from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Ordered
from itertools import compress

from parallm.engine.decode import Decoder
from parallm.engine.kv.budget import KvBudget
from parallm.engine.request_queue import RequestQueue
from parallm.engine.sequence import MIN_SORT_KEY, PrefillJob, Sequence
from parallm.types import TrafficClass

AHEAD = 32
"""Tokens beyond the prompt that must fit before it is computed, so that its row does not stop at once."""


class Scheduler:
    def __init__(
        self, memory: KvBudget, traffic: Mapping[TrafficClass, RequestQueue], settle: Callable[[RequestQueue], None]
    ) -> None:
        """`settle` reads the steps that a class has in flight."""
        self.num_preempted = 0
        """Times that a row has given up its room."""
        self._memory = memory
        self._traffic = traffic
        self._settle = settle

    def left(self) -> int:
        """Bytes that may be taken without anybody giving up any."""
        return self._memory.limit - self._memory.total(self._traffic.values())

    def reserve_step(self, name: TrafficClass) -> None:
        """Room for the next position of each row of a class."""
        for decoder in self._traffic[name].decoders:
            while decoder.rows and not self._lay_out(decoder, decoder.rows):
                if not self._preempt_one(name, sparing=self._oldest(name)):
                    break

    def join(self, name: TrafficClass, max_rows: int) -> None:
        """Give free rows to members of computed prompts: to all at once where there is memory, else one by one."""
        state = self._traffic[name]
        computed = [prompt for prompt in state.admitted() if prompt.is_computed]
        shares = state.shared_out(computed, max_rows - state.num_rows)
        have_room = [self._lay_out_for(*share) for share in shares]
        if not all(have_room):
            self._settle(state)  # before anybody joins: rows that end would move those whose first step comes next
            shares = state.shared_out(computed, max_rows - state.num_rows)
            have_room = [self._lay_out_for(*share) for share in shares]
        for decoder, joining in compress(shares, have_room):
            decoder.join(joining)
            for prompt, member in joining:
                prompt.waiting.remove(member)
        for prompt in [prompt for prompt in computed if not prompt.waiting]:
            state.prompts.remove(prompt)  # before it might be dropped to make room for others
        for prompt in [prompt for prompt in state.admitted() if prompt.is_computed]:
            while prompt.logits_V is not None and prompt.waiting and state.num_rows < max_rows:
                decoder, member = state.emptiest(), prompt.waiting[0]
                if not self._make_for_join(name, decoder, member, prompt):
                    return
                decoder.join([(prompt, member)])
                prompt.waiting.pop(0)
            if not prompt.waiting:
                state.prompts.remove(prompt)

    def _lay_out_for(self, decoder: Decoder, joining: Ordered[tuple[PrefillJob, Sequence]]) -> bool:
        return self._lay_out_roomy(decoder, [*decoder.rows, *(member for _, member in joining)])

    def _make_for_join(self, name: TrafficClass, decoder: Decoder, sequence: Sequence, prompt: PrefillJob) -> bool:
        """Room for one more row; False if it has to wait for others to end."""
        while not self._lay_out(decoder, [*decoder.rows, sequence]):
            if name == "serving" and self._preempt_one("rollout", sparing=None):
                continue
            others = [one for one in self._traffic[name].admitted() if one is not prompt]
            if self._traffic[name].num_rows or not others:
                return False
            self._drop(max(others, key=lambda one: one.sort_key))
        return True

    def schedule_prefill(self, name: TrafficClass, max_rows: int, most: int, least: int) -> list[PrefillJob]:
        """Uncomputed prompts to work on now: `most` of them with memory, and none without a row for it.

        With a first one, up to `least` come along that have no row yet: the lanes beside its own had nothing to do.
        Not those that may begin with a newer version when there is a row.
        """
        state = self._traffic[name]
        free = max_rows - state.num_rows
        chosen: list[PrefillJob] = []
        for prompt in list(state.prompts):
            has_lane = 0 < len(chosen) < least and not prompt.request.switches_in_flight
            if len(chosen) == most or (free <= 0 and not has_lane):
                break
            if not prompt.is_computed:
                if not prompt.num_bytes and not self._admit(name, prompt):
                    break
                chosen.append(prompt)
            free -= len(prompt.waiting)
        return chosen

    def _admit(self, name: TrafficClass, prompt: PrefillJob) -> bool:
        """Give a prompt its memory, if it and the beginning of a row fit."""
        sequence = prompt.waiting[0]
        most = len(sequence.request.prompt_tokens) + sequence.request.sampling.max_tokens
        length = min(len(prompt.tokens) + AHEAD, most) + 1
        decoder = self._traffic[name].emptiest()
        needed = self._memory.cost.of(prompt.num_allocated)
        lengths = [*_lengths(decoder.rows), length]
        while not self._fits(decoder, lengths, needed):
            behind = [one for one in self._traffic[name].admitted() if one.sort_key > prompt.sort_key]
            if name == "serving" and self._preempt_one("rollout", sparing=None):
                continue
            if not behind:
                return False
            self._drop(max(behind, key=lambda one: one.sort_key))
        self._traffic[name].admit(prompt, needed)
        return True

    def preempt(self, state: RequestQueue, decoder: Decoder, row: Sequence) -> None:
        """Take a row, of which nothing is in flight, out of its slot and put it back among the prompts."""
        decoder.leave([decoder.rows.index(row)], waits=True)
        row.restart()
        prompts = [*state.prompts, PrefillJob.of([row])]
        state.prompts = deque(sorted(prompts, key=lambda prompt: prompt.sort_key))
        self.num_preempted += 1

    def requeue(self, state: RequestQueue, decoders: list[Decoder], doomed: Collection[str]) -> RequestQueue:
        """A class whose requests but those of `doomed` are computed again, in `decoders`, from the tokens they have."""
        rows = [row for row in state.rows() if row.request.request_id not in doomed and row.finish_reason is None]
        prompts = [prompt for prompt in state.prompts if prompt.request.request_id not in doomed]
        for prompt in prompts:
            prompt.restart()
        for row in rows:
            row.restart()
        self.num_preempted += len(rows)
        prompts += [PrefillJob.of([row]) for row in rows]
        prompts = sorted((prompt for prompt in prompts if prompt.waiting), key=lambda prompt: prompt.sort_key)
        return RequestQueue(decoders, prompts=deque(prompts), num_tokens=state.num_tokens, is_paused=state.is_paused)

    def _lay_out(self, decoder: Decoder, rows: Ordered[Sequence]) -> bool:
        """Bring a shard's pools to what these rows need, if it fits."""
        if self._lay_out_roomy(decoder, rows):
            return True
        batch, limit, lengths = decoder.batch, self._memory.limit, _lengths(rows)
        others = self._memory.total(self._traffic.values()) - batch.nbytes
        if not batch.holds(lengths) or others + batch.nbytes > limit:
            if not self._fits(decoder, lengths, 0):
                return False
            batch.lay_out(lengths, end=None)
        return True

    def _lay_out_roomy(self, decoder: Decoder, rows: Ordered[Sequence]) -> bool:
        batch, lengths, end = decoder.batch, _lengths(rows), max((row.end for row in rows), default=0)
        others = self._memory.total(self._traffic.values()) - batch.nbytes
        if others + batch.bytes_for(lengths, end=end) > self._memory.limit:
            return False
        batch.lay_out(lengths, end=end)
        return True

    def _fits(self, decoder: Decoder, lengths: Ordered[int], more: int) -> bool:
        """Whether tight pools of a shard and so many bytes more fit, be it after others give up what they can spare.

        With `more` the shard is laid out later, and until then has what it has.
        """
        batch = decoder.batch

        def beyond() -> int:
            others = self._memory.total(self._traffic.values()) - batch.nbytes
            own = max(batch.bytes_for(lengths, end=None), batch.nbytes if more else 0)
            return others + own + more - self._memory.limit

        if beyond() > 0:
            self._memory.prefixes.shrink(beyond())
        if beyond() > 0:
            for one in [one for state in self._traffic.values() for one in state.decoders]:
                spares = one.batch.bytes_for(_lengths(one.rows), end=None) < one.batch.nbytes
                if spares and (more or one is not decoder):
                    one.batch.lay_out(_lengths(one.rows), end=None)
        return beyond() <= 0

    def _preempt_one(self, name: TrafficClass, sparing: Sequence | None) -> bool:
        """Let one more give up its room, of rollouts or else of class `name`; False if nobody is left."""
        in_flight = [state for state in self._traffic.values() if any(one.in_flight for one in state.decoders)]
        if in_flight:  # rows may end with what is in flight
            for state in in_flight:
                self._settle(state)
            return True
        for state in [self._traffic["rollout"]] + ([self._traffic[name]] if name != "rollout" else []):
            prompts = state.admitted()
            newest = max((prompt.sort_key for prompt in prompts), default=MIN_SORT_KEY)
            rows = [(row.sort_key, row.index, decoder) for decoder in state.decoders for row in decoder.rows]
            rows = [found for found in rows if sparing is None or found[:2] != (sparing.sort_key, sparing.index)]
            if prompts and newest >= max((found[0] for found in rows), default=MIN_SORT_KEY):
                self._drop(next(prompt for prompt in prompts if prompt.sort_key == newest))
                return True
            if rows:
                _, _, decoder = max(rows, key=lambda found: found[:2])
                row = max(
                    (one for one in decoder.rows if one is not sparing), key=lambda one: (one.sort_key, one.index)
                )
                self.preempt(state, decoder, row)
                return True
        return False

    def _drop(self, prompt: PrefillJob) -> None:
        """Forget what was computed of a prompt."""
        prompt.restart()
        self.num_preempted += 1

    def _oldest(self, name: TrafficClass) -> Sequence | None:
        """The row that always goes on; none of rollouts while serving holds memory, which will end."""
        if name == "rollout" and self._memory.held([self._traffic["serving"]]):
            return None
        return min(self._traffic[name].rows(), key=lambda row: (row.sort_key, row.index), default=None)


def _lengths(rows: Ordered[Sequence]) -> list[int]:
    return [row.num_reserved for row in rows]
