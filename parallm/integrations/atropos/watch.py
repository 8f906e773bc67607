"""Looks at an Atropos run from outside while no batch comes, and says why once it has been too long."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from parallm.integrations.atropos.api import ApiFailed, ApiUnreachable, TrajectoryApi
from parallm.integrations.atropos.diagnosis import EnvironmentFacts, Observed, causes_of
from parallm.integrations.atropos.knocks import Knocks
from parallm.integrations.atropos.source import AtroposFacts

logger = logging.getLogger(__name__)


class Watch:
    """For the asyncio thread. What was seen is of one wait for groups (`AtroposFacts.wait`)."""

    def __init__(self, api: TrajectoryApi, why_seconds: float) -> None:
        self._api = api
        self._why_seconds = why_seconds
        self._knocks = Knocks()
        self._number = 0
        self._sizes: set[int] = set()
        self._num_queued = 0
        self._num_registered: int | None = None
        self._allocated = 0.0
        self._without_groups: list[int] = []
        self._told: dict[str, str] = {}

    async def has_begun_anew(self, facts: AtroposFacts) -> bool:
        """Whether it is another wait than the last time; what was seen is forgotten then."""
        if facts.wait.number == self._number:
            return False
        self._number, self._num_queued = facts.wait.number, facts.wait.num_queued
        self._sizes.clear()
        self._told.clear()
        await self._knocks.close()
        return True

    async def look(self, facts: AtroposFacts, now: float) -> None:
        """Ask run-api what it tells, if a step has waited for half of the time."""
        if seconds_waited(facts, now) < self._why_seconds / 2:
            return
        await self._listen(facts)
        # run-api is not there, or not well: the trainer's side knows that
        with suppress(ApiUnreachable, ApiFailed):
            await self._ask_for_environments()
            await self._ask_for_sizes(facts)

    def explain(self, facts: AtroposFacts, environments: Sequence[EnvironmentFacts], now: float) -> str | None:
        """What stops the run, if a step has waited too long. Logs each cause once in a wait."""
        seconds = seconds_waited(facts, now)
        if seconds < self._why_seconds or facts.wait.number != self._number:
            return None
        causes = causes_of(facts, self._observed(facts, environments))
        for cause in causes:
            if cause.name not in self._told:
                logger.warning("no batch for %.0f s: %s", seconds, cause.text)
                self._told[cause.name] = cause.text
        return "no batch: " + "; ".join(self._told[cause.name] for cause in causes)

    async def close(self) -> None:
        await self._knocks.close()

    async def _listen(self, facts: AtroposFacts) -> None:
        if facts.num_recorded == facts.wait.num_recorded:
            await self._knocks.open()

    async def _ask_for_environments(self) -> None:
        found: list[Mapping[str, Any]] = []
        while (status := await self._api.status_env(len(found))) is not None:
            found.append(status)
        self._num_registered = len(found)
        self._without_groups = [number for number, one in enumerate(found) if not one.get("self_queue_size")]
        self._allocated = 1 - float(found[0].get("unallocated_fraction", 1)) if found else 0.0
        self._sizes |= {int(one["max_group_size"]) for one in found if one.get("max_group_size", 1) > 1}

    async def _ask_for_sizes(self, facts: AtroposFacts) -> None:
        """Where the queue has grown, without a batch, the group that came last is in it."""
        num_queued = facts.api.status.num_queued if facts.api.status else 0
        if num_queued > self._num_queued and (size := await self._api.latest_size()):
            self._sizes.add(size)
        self._num_queued = num_queued

    def _observed(self, facts: AtroposFacts, environments: Sequence[EnvironmentFacts]) -> Observed:
        refused = {name: count - facts.wait.refused.get(name, 0) for name, count in facts.refused.items()}
        return Observed(
            num_completions=facts.num_recorded - facts.wait.num_recorded,
            refused={name: count for name, count in refused.items() if count},
            sizes=frozenset(self._sizes),
            num_registered=self._num_registered,
            allocated=self._allocated,
            without_groups=tuple(self._without_groups),
            knocks=tuple(sorted(self._knocks.heard)),
            taken_ports=self._knocks.taken,
            environments=tuple(environments),
        )


def seconds_waited(facts: AtroposFacts, now: float) -> float:
    return 0.0 if facts.wait.since is None else now - facts.wait.since
