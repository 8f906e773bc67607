"""What a run with Atropos environments looks like from here, for figures and for the question why no batch comes."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx

from parallm.integrations.atropos.api import Registration, Sizes, TrajectoryApi
from parallm.integrations.atropos.intake import Intake, Quarantine
from parallm.integrations.atropos.rescoring import Rescorer
from parallm.integrations.atropos.sample_store import SampleStore
from parallm.integrations.atropos.scored_group import GroupRefused, Limits
from parallm.integrations.atropos.trainer_client import ApiFacts, TrainerClient
from parallm.integrations.atropos.trajectories import Decode
from parallm.rollout.collector import StepBatch
from parallm.rollout.settings import RolloutSettings
from parallm.types import TrajectoryGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """For groups to train on: from the last that a step took, or from a registration behind them, to the next.

    Counts are those at its begin, taken there: who looks later would miss what came first.
    """

    number: int = 0
    since: float | None = None
    """When a step began to wait; None: none does yet."""
    num_recorded: int = 0
    refused: Mapping[str, int] = field(default_factory=dict)
    num_failed_batches: int = 0
    num_queued: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AtroposFacts:
    """A snapshot. Times are seconds of `time.monotonic`; counts are since the start of the process."""

    url: str
    sizes: Sizes
    """What this run registers."""
    api: ApiFacts
    num_groups: int
    """Received, as the next three."""
    num_sequences: int
    group_sizes: Mapping[int, int]
    """Groups by their number of sequences."""
    last_groups: Mapping[int, float]
    """When each environment's last group came, by its id."""
    refused: Mapping[str, int]
    """Groups that were not trained on, by reason."""
    ledger_completions: int
    ledger_tokens: int
    num_recorded: int
    """Completions of the policy that were given to clients."""
    last_recorded_at: float | None
    wait: Wait = Wait()


SECONDS_BETWEEN_MESSAGES = 5.0
MAX_SECONDS_BETWEEN_TRIES = 5.0
"""For an API that does not answer; the first tries come sooner."""

logger = logging.getLogger(__name__)


class AtroposSource:
    """Of one policy, for the asyncio thread. Asks for a batch when a step waits for one, and never for more.

    Loop contract: consumes batches of the API / waits for a step to want one / produces the groups of one step / ends
    with `close`.
    """

    def __init__(
        self,
        settings: RolloutSettings,
        folder: Path,
        registration: Callable[[], Registration],
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`registration` is asked for whenever the API is told of this run; `transport` leads to another API."""
        self._settings = settings.atropos
        self._registration = registration
        self.sample_store = SampleStore(settings.atropos)
        self._quarantine = Quarantine(folder)
        self._api = TrajectoryApi(settings.atropos, transport)
        self.client = TrainerClient(self._api, registration, may_reset=settings.atropos.reset)
        self._intake: Intake | None = None
        self._task: asyncio.Task[None] | None = None
        self._wanted = asyncio.Event()
        self._groups: Sequence[TrajectoryGroup] = ()  # of one batch, until a step takes them
        self._version = 0
        self._num_stale = 0
        self._last_groups: dict[int, float] = {}
        self._wait = Wait()
        self._registered_at: float | None = None
        self.explain: Callable[[AtroposFacts], str | None] = lambda facts: facts.api.problem or None
        """Why there is no batch."""
        self.message = ""
        """The last explanation, while a step waits."""
        self._explained = time.monotonic()

    def connect(self, limits: Limits, rescorer: Rescorer, decode: Decode, version: int) -> None:
        """Begin: register, let environments in and ask for the first batch. `version` is the learner's."""
        self._version = version
        self._intake = Intake(
            self._settings, self.sample_store, self._quarantine, limits=limits, rescorer=rescorer, decode=decode
        )
        self._wanted.set()
        self._task = asyncio.create_task(self._work(self._intake))

    def is_ready(self, version: int, limit: int) -> bool:
        """Whether a step may begin; lets go what is more than `limit` versions older than `version`, or of another.

        Raises what asking for batches has raised.
        """
        assert self._task is not None, "build.py connects it first"
        if self._task.done():
            self._task.result()
        self._version = version
        self._drop_stale(version, limit)
        if any(group.has_signal for group in self._groups):
            self.message = ""
            return True
        self._groups = ()
        self._wanted.set()
        if self._wait.since is None:
            self._wait = replace(self._wait, since=time.monotonic())
        self._look_at_clock()
        return False

    @property
    def waiting(self) -> Mapping[str, float]:
        """What waits is with the API, which tells it itself."""
        return {}

    def take(self, step: int) -> StepBatch:
        """The groups of one batch, after `is_ready`, whatever the step."""
        groups, self._groups = tuple(self._groups), ()
        num_stale, self._num_stale = self._num_stale, 0
        self._explained = time.monotonic()
        self._begin_wait()
        with_signal = tuple(group for group in groups if group.has_signal)
        return StepBatch(groups=groups, with_signal=with_signal, num_stale=num_stale, figures=self._figures())

    def facts(self) -> AtroposFacts:
        intake = self._intake
        sizes = {} if intake is None else dict(sorted(intake.sizes.items()))
        return AtroposFacts(
            url=self._api.url,
            sizes=self._registration().sizes,
            api=replace(self.client.facts),
            num_groups=0 if intake is None else intake.num_groups,
            num_sequences=sum(size * count for size, count in sizes.items()),
            group_sizes=sizes,
            last_groups=dict(self._last_groups),
            refused=self._refused(),
            ledger_completions=self.sample_store.num_completions,
            ledger_tokens=self.sample_store.num_tokens,
            num_recorded=self.sample_store.num_recorded,
            last_recorded_at=self.sample_store.last_recorded_at,
            wait=self._wait,
        )

    def end(self) -> None:
        """Ask for nothing any more."""
        if self._task is not None:
            self._task.cancel()

    async def close(self) -> None:
        """Give up a question under way and wait until the file of refused groups holds everything."""
        self.end()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
        await self._api.close()
        await asyncio.to_thread(self._quarantine.close)

    async def _work(self, intake: Intake) -> None:
        num_failed = 0
        while True:
            await self._wanted.wait()
            batch = await self.client.next_batch()
            if self.client.facts.registered_at != self._registered_at:
                self._registered_at = self.client.facts.registered_at
                self._begin_wait()
            if batch is None:
                num_failed = num_failed + 1 if self.client.facts.problem else 0
                await asyncio.sleep(self._delay(num_failed))
                continue
            num_failed = 0
            groups = await intake.read(batch, self._version)
            self._note(batch)
            if any(group.has_signal for group in groups):
                self._wanted.clear()
                self._groups = groups
            else:
                self._count_idle(groups)

    def _begin_wait(self) -> None:
        api = self.client.facts
        self._wait = Wait(
            number=self._wait.number + 1,
            num_recorded=self.sample_store.num_recorded,
            refused=self._refused(),
            num_failed_batches=api.num_failed_batches,
            num_queued=api.status.num_queued if api.status else 0,
        )

    def _refused(self) -> Mapping[str, int]:
        return {str(reason): count for reason, count in self._quarantine.counts.items()}

    def _delay(self, num_failed: int) -> float:
        """Doubles with each failure."""
        poll = self._settings.poll_seconds
        return poll if num_failed == 0 else max(poll, min(0.1 * 2**num_failed, MAX_SECONDS_BETWEEN_TRIES))

    def _note(self, batch: Sequence[object]) -> None:
        for value in batch:
            env_id = value.get("env_id") if isinstance(value, dict) else None
            if isinstance(env_id, int):
                self._last_groups[env_id] = time.monotonic()

    def _count_idle(self, groups: Sequence[TrajectoryGroup]) -> None:
        for _ in groups:
            self._quarantine.put(GroupRefused("no_signal", "all of its scores are equal"), None)

    def _drop_stale(self, version: int, limit: int) -> None:
        """One token that is too old condemns its group: the others would be compared with a part of it."""
        fresh = [group for group in self._groups if not is_stale(group, version, limit)]
        for _ in range(len(self._groups) - len(fresh)):
            self._quarantine.put(GroupRefused("stale", "older than trainer.max_off_policy_steps"), None)
        self._num_stale += len(self._groups) - len(fresh)
        self._groups = fresh

    def _look_at_clock(self) -> None:
        now = time.monotonic()
        if now - self._explained >= SECONDS_BETWEEN_MESSAGES:
            self._explained = now
            self.message = self.explain(self.facts()) or ""

    def _figures(self) -> dict[str, float]:
        facts, intake = self.facts(), self._intake
        assert intake is not None, "there are groups to take"
        status = facts.api.status
        return {
            "atropos/queue": 0 if status is None else status.num_queued,
            "atropos/api_step": 0 if status is None else status.step,
            "atropos/batches": facts.api.num_batches,
            "atropos/groups": facts.num_groups,
            "atropos/sequences": facts.num_sequences,
            "atropos/joined_fraction": intake.num_joined / max(1, intake.num_read),
            "atropos/recomputed": intake.num_recomputed,
            "atropos/refused": sum(facts.refused.values()),
            **{f"atropos/refused/{reason}": count for reason, count in facts.refused.items()},
            "atropos/lost": facts.api.num_lost,
            "atropos/failed_batches": facts.api.num_failed_batches,
            "atropos/ledger_tokens": facts.ledger_tokens,
        }


def is_stale(group: TrajectoryGroup, version: int, limit: int) -> bool:
    """Whether a token is more than `limit` versions older than `version`, or of a version that was abandoned."""
    spans = (span for one in group.trajectories for span in one.weight_versions)
    return any(not 0 <= version - span.version <= limit for span in spans)
