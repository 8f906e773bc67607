"""The environments of an Atropos run as a source of training data: batches of run-api -> the groups of a step.

Read by `LiveTrainer`. A step's groups are those of one batch, and no batch is asked for before a step waits for one.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx

from parallm.integrations.atropos.intake import Decode, Intake, Quarantine, Rescorer
from parallm.integrations.atropos.sample_store import SampleStore
from parallm.integrations.atropos.scored_group import Limits
from parallm.integrations.atropos.trainer_client import ApiFacts, Registration, Sizes, TrainerClient, TrajectoryApi
from parallm.rollout.collector import StepBatch
from parallm.rollout.settings import RolloutSettings
from parallm.rollout.staleness import is_stale
from parallm.types import TrajectoryGroup

SECONDS_BETWEEN_MESSAGES = 5.0
MAX_SECONDS_BETWEEN_TRIES = 5.0
"""The longest pause before an API that does not answer is asked again; the first pauses are shorter."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AtroposFacts:
    """A snapshot, from which `diagnosis` says why no batch comes.

    Counts are since a step last took groups, or since the newest registration.
    """

    url: str
    sizes: Sizes
    """The sizes that this run registers."""
    api: ApiFacts
    waiting_since: float | None = None
    """Begin of the present wait for groups, by `time.monotonic`; None: no step waits."""
    num_completions: int = 0
    """Completions of the policy that clients have got."""
    refused: Mapping[str, int] = field(default_factory=dict)
    """Groups that were not trained on, by reason."""
    num_failed_batches: int = 0


class AtroposSource:
    """The source of one policy. Used on the asyncio thread.

    Loop contract: consumes batches of the API / waits for a step to want one / produces the groups of one step / ends
    with `close`.
    """

    waiting: Mapping[str, float] = {}
    """Nothing waits here: run-api holds the queue and reports it itself."""

    def __init__(
        self,
        settings: RolloutSettings,
        folder: Path,
        registration: Callable[[], Registration],
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`registration` makes the body of each registration at run-api; `transport` leads to another API."""
        self._settings = settings.atropos
        self._registration = registration
        self.sample_store = SampleStore(settings.atropos)
        self._quarantine = Quarantine(folder)
        self._api = TrajectoryApi(settings.atropos, transport)
        self.client = TrainerClient(self._api, registration, may_reset=settings.atropos.reset)
        self._intake: Intake | None = None
        self._task: asyncio.Task[None] | None = None
        self._wanted = asyncio.Event()
        self._groups: Sequence[TrajectoryGroup] = ()  # one batch, until a step takes it
        self._version = 0
        self._num_stale = 0
        self._registered_at: float | None = None
        self._waiting_since: float | None = None
        self._num_recorded_before = self._num_failed_before = 0  # at the begin of the wait, as the next
        self._refused_before: Counter[str] = Counter()
        self.explain: Callable[[AtroposFacts], str | None] = lambda facts: facts.api.problem or None
        """Says why there is no batch."""
        self.message = ""
        """The newest explanation, while a step waits."""
        self._explained_at = time.monotonic()

    def connect(self, limits: Limits, rescorer: Rescorer, decode: Decode, version: int) -> None:
        """Begin: register, let environments in and ask for the first batch. `version` is the learner's."""
        self._version = version
        self._intake = Intake(
            settings=self._settings,
            sample_store=self.sample_store,
            quarantine=self._quarantine,
            limits=limits,
            rescorer=rescorer,
            decode=decode,
        )
        self._wanted.set()
        self._task = asyncio.create_task(self._work(self._intake))

    def is_ready(self, version: int, limit: int) -> bool:
        """Whether a step may begin; drops groups that are more than `limit` versions older than `version`.

        Raises what asking for batches has raised.
        """
        assert self._task is not None, "connect comes first"
        if self._task.done():
            self._task.result()
        self._version = version
        self._drop_stale(version, limit)
        if any(group.has_signal for group in self._groups):
            self.message = ""
            return True
        self._groups = ()
        self._wanted.set()
        now = time.monotonic()
        if self._waiting_since is None:
            self._waiting_since = now
        if now - self._explained_at >= SECONDS_BETWEEN_MESSAGES:
            self._explained_at = now
            self.message = self.explain(self.facts()) or ""
        return False

    def take(self, step: int, *, needs_all_groups: bool = False) -> StepBatch:
        """Return the groups of one batch, after `is_ready`. `needs_all_groups`: also train on those whose rewards are
        equal."""
        groups, self._groups = tuple(self._groups), ()
        num_stale, self._num_stale = self._num_stale, 0
        self._explained_at = time.monotonic()
        self._reset_wait()
        with_signal = tuple(group for group in groups if group.has_signal)
        return StepBatch(
            groups=groups,
            with_signal=with_signal,
            trained=groups if needs_all_groups else with_signal,
            num_stale=num_stale,
            figures=self._figures(),
        )

    def facts(self) -> AtroposFacts:
        return AtroposFacts(
            url=self._api.url,
            sizes=self._registration().sizes,
            api=replace(self.client.facts),
            waiting_since=self._waiting_since,
            num_completions=self.sample_store.num_recorded - self._num_recorded_before,
            refused=self._quarantine.counts - self._refused_before,
            num_failed_batches=self.client.facts.num_failed_batches - self._num_failed_before,
        )

    def end(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def close(self) -> None:
        """Cancel a question under way and wait until the file of refused groups holds everything."""
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
                self._reset_wait()
            if batch is None:
                num_failed = num_failed + 1 if self.client.facts.problem else 0
                await asyncio.sleep(self._delay(num_failed))
                continue
            num_failed = 0
            groups = await intake.read(batch, self._version)
            if any(group.has_signal for group in groups):
                self._wanted.clear()
                self._groups = groups
            else:
                self._quarantine.counts["no_signal"] += len(groups)

    def _reset_wait(self) -> None:
        self._waiting_since = None
        self._num_recorded_before = self.sample_store.num_recorded
        self._num_failed_before = self.client.facts.num_failed_batches
        self._refused_before = self._quarantine.counts.copy()

    def _delay(self, num_failed: int) -> float:
        """Seconds before the next question, doubled with each failure."""
        poll = self._settings.poll_seconds
        return poll if num_failed == 0 else max(poll, min(0.1 * 2**num_failed, MAX_SECONDS_BETWEEN_TRIES))

    def _drop_stale(self, version: int, limit: int) -> None:
        """Drop each group with a token that is too old: the rest of the group would be compared without its samples."""
        fresh = [group for group in self._groups if not is_stale(group.trajectories, version, limit)]
        num_stale = len(self._groups) - len(fresh)
        self._quarantine.counts["stale"] += num_stale
        self._num_stale += num_stale
        self._groups = fresh

    def _figures(self) -> dict[str, float]:
        intake, api, refused = self._intake, self.client.facts, self._quarantine.counts
        assert intake is not None, "there are groups to take"
        return {
            "atropos/queue": api.num_queued,
            "atropos/api_step": api.step,
            "atropos/batches": api.num_batches,
            "atropos/groups": intake.num_groups,
            "atropos/sequences": intake.num_sequences,
            "atropos/joined_fraction": intake.num_joined / max(1, intake.num_read),
            "atropos/recomputed": intake.num_recomputed,
            "atropos/refused": refused.total(),
            **{f"atropos/refused/{reason}": count for reason, count in sorted(refused.items()) if count},
            "atropos/lost": api.num_lost,
            "atropos/failed_batches": api.num_failed_batches,
            "atropos/ledger_tokens": self.sample_store.num_tokens,
        }
