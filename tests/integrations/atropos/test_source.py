"""From batches to steps: what is asked for when, how old it may be, and what becomes of what is refused."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import TypeAdapter

from parallm.integrations.atropos.intake import Rescorer
from parallm.integrations.atropos.scored_group import Limits
from parallm.integrations.atropos.source import AtroposSource
from parallm.rollout.settings import RolloutSettings
from parallm.types import Completion, GenerationRequest, PromptLogprob, TrajectoryGroup
from tests.integrations.atropos.conftest import REGISTRATION, completion_of, group_of, request_of
from tests.run_api import RunApi

asked: list[GenerationRequest] = []


async def score(requests: Any) -> list[list[Completion]]:
    """Log-prob -0.25 for every token of a prompt."""
    asked.extend(requests)
    logprob = PromptLogprob(token=0, logprob=-0.25, rank=1, top=())
    answers = []
    for request in requests:
        made = completion_of(())
        object.__setattr__(made, "prompt_logprobs", (None, *[logprob] * (len(request.prompt_tokens) - 1)))
        answers.append([made])
    return answers


Use = Callable[[AtroposSource], Awaitable[None]]


@pytest.fixture
def play(run_api: RunApi, tmp_path: Path) -> Callable[..., None]:
    """A source of version 5 that `use` takes steps of."""

    def run(use: Use, **atropos: Any) -> None:
        values = {"source": "atropos", "atropos": {"poll_seconds": 0.01, **atropos}}
        settings = TypeAdapter(RolloutSettings).validate_python(values)
        asked.clear()

        async def whole() -> None:
            transport = httpx.ASGITransport(run_api.app)
            source = AtroposSource(settings, tmp_path, lambda: REGISTRATION, transport)
            source.connect(Limits(max_tokens=64, num_token_ids=100), Rescorer(score, "latest"), str, version=5)
            try:
                await use(source)
            finally:
                await source.close()

        asyncio.run(whole())

    return run


async def registered(source: AtroposSource) -> None:
    async with asyncio.timeout(10):
        while source.client.facts.state != "waiting":
            await asyncio.sleep(0.01)


async def ready(source: AtroposSource, version: int = 5, limit: int = 4) -> None:
    async with asyncio.timeout(10):
        while not source.is_ready(version, limit):
            await asyncio.sleep(0.01)


def give(source: AtroposSource, number: int, version: int = 5) -> dict[str, Any]:
    """A pair of completions of a prompt of its own, as a client gets it."""
    prompt, completions = (number, 1), ((2, 3), (4, 5, 6))
    source.sample_store.record(request_of(prompt), [completion_of(one, version) for one in completions])
    return group_of(*((prompt, one) for one in completions), env_id=7)


def test_a_step_gets_the_groups_of_one_batch_and_no_more_are_fetched_meanwhile(
    play: Callable[..., None], run_api: RunApi
) -> None:
    async def use(source: AtroposSource) -> None:
        await registered(source)
        for number in range(2):
            run_api.post(give(source, number))
        await ready(source)
        for number in range(2, 4):
            run_api.post(give(source, number))
        await asyncio.sleep(0.1)
        assert len(run_api.state["queue"]) == 2
        batch = source.take(1)
        await asyncio.sleep(0.1)
        assert len(run_api.state["queue"]) == 2  # the step trains; the next one is not asked for yet
        assert [group.problem.environment for group in batch.groups] == ["env_7", "env_7"]
        first: TrajectoryGroup = batch.with_signal[0]
        assert [one.prompt_tokens for one in first.trajectories] == [(0, 1), (0, 1)]
        assert [one.tokens for one in first.trajectories] == [(2, 3), (4, 5, 6)]
        assert first.rewards == (0.0, 1.0)
        assert batch.figures["atropos/joined_fraction"] == 1.0

    play(use)


@pytest.mark.parametrize("needs_all_groups", [False, True])
def test_equal_rewards_are_trained_on_where_the_learner_needs_all_groups(
    needs_all_groups: bool, play: Callable[..., None], run_api: RunApi
) -> None:
    async def use(source: AtroposSource) -> None:
        await registered(source)
        run_api.post(give(source, 0) | {"scores": [0.5, 0.5]})
        run_api.post(give(source, 1))
        await ready(source)
        batch = source.take(1, needs_all_groups=needs_all_groups)
        assert (len(batch.groups), len(batch.with_signal)) == (2, 1)
        assert batch.trained == (batch.groups if needs_all_groups else batch.with_signal)

    play(use)


def test_what_becomes_too_old_while_it_waits_is_dropped_by_groups(play: Callable[..., None], run_api: RunApi) -> None:
    async def use(source: AtroposSource) -> None:
        await registered(source)
        for number, version in enumerate((3, 5)):
            run_api.post(give(source, number, version))
        await ready(source, version=5, limit=2)
        assert source.is_ready(6, 2)
        batch = source.take(1)
        assert (len(batch.groups), batch.num_stale) == (1, 1)
        assert batch.groups[0].trajectories[0].weight_versions[0].version == 5
        assert batch.figures["atropos/refused/stale"] == 1

    play(use)


def test_versions_that_the_learner_has_left_are_dropped(play: Callable[..., None], run_api: RunApi) -> None:
    async def use(source: AtroposSource) -> None:
        await registered(source)
        for number in range(2):
            run_api.post(give(source, number, version=6))
        for _ in range(20):
            assert not source.is_ready(5, 4)
            await asyncio.sleep(0.01)
        assert source.facts().refused == {"stale": 2}

    play(use)


def test_a_wait_begins_when_a_step_takes_its_groups_and_counts_from_there(
    play: Callable[..., None], run_api: RunApi
) -> None:
    async def use(source: AtroposSource) -> None:
        await registered(source)
        run_api.post(give(source, 0) | {"masks": [[1], [1]]})
        run_api.post(give(source, 1))
        await ready(source)
        assert source.facts().waiting_since is not None
        assert source.take(1).figures["atropos/refused"] == 1
        facts = source.facts()
        assert (facts.waiting_since, facts.num_completions, facts.refused) == (None, 0, {})
        for number in range(2, 4):
            run_api.post(give(source, number, version=3))
        while source.facts().refused.get("stale") != 2:
            assert not source.is_ready(5, 1)
            await asyncio.sleep(0.01)
        assert source.facts().waiting_since is not None
        assert (source.facts().num_completions, source.facts().refused) == (4, {"stale": 2})

    play(use)


def test_a_batch_without_any_signal_is_no_step(play: Callable[..., None], run_api: RunApi, tmp_path: Path) -> None:
    async def use(source: AtroposSource) -> None:
        await registered(source)
        for number in range(4):
            run_api.post({**give(source, number), "scores": [1.0, 1.0] if number < 2 else [0.0, 1.0]})
        await ready(source)
        batch = source.take(1)
        assert batch.groups[0].rewards == (0.0, 1.0)
        assert batch.figures["atropos/refused/no_signal"] == 2

    play(use)
    assert not (tmp_path / "quarantine.jsonl").exists()


def test_advantages_of_tokens_are_a_signal_where_scores_are_equal(play: Callable[..., None], run_api: RunApi) -> None:
    async def use(source: AtroposSource) -> None:
        await registered(source)
        own = [[0, 0, 1.0, -1.0], [0, 0, 0.5, 0, 0]]
        for number in range(2):
            run_api.post({**give(source, number), "scores": [1.0, 1.0], "advantages": own})
        await ready(source)
        (first, second) = source.take(1).with_signal[0].trajectories
        assert (first.token_advantages, second.token_advantages) == ((1.0, -1.0), (0.5, 0.0, 0.0))

    play(use)


def test_tokens_that_nobody_has_sampled_are_scored_at_the_temperature_that_the_environment_says(
    play: Callable[..., None], run_api: RunApi
) -> None:
    async def use(source: AtroposSource) -> None:
        await registered(source)
        run_api.post({**give(source, 1), "overrides": [{"temperature": 0.5}, None]})
        strange = group_of(((9, 1), (2, 3)), ((9, 1), (4,)), generation_params={"temperature": 0.5})
        run_api.post({**strange, "overrides": [{"sft": True}, None]})
        await ready(source)
        known, scored = source.take(1).groups
        assert [one.temperature for one in known.trajectories] == [1.0, 1.0]  # as it was sampled here
        assert [one.temperature for one in scored.trajectories] == [0.5, 0.5]
        assert scored.trajectories[0].logprobs == (-0.25, -0.25)
        assert scored.trajectories[0].weight_versions[0].version == 5
        assert [one.token_advantages for one in scored.trajectories] == [(1.0, 1.0), None]
        assert [request.prompt_tokens for request in asked] == [(9, 1, 2, 3), (9, 1, 4)]

    play(use, unmatched="recompute")


def test_the_first_of_each_kind_of_refused_groups_are_kept(
    play: Callable[..., None], run_api: RunApi, tmp_path: Path
) -> None:
    async def use(source: AtroposSource) -> None:
        await registered(source)
        for _ in range(20):
            run_api.post(group_of(((9, 1), (2, 3)), ((9, 1), (4,))))
        while sum(source.facts().refused.values()) < 20:  # which is counted after a group has arrived
            assert not source.is_ready(5, 4)
            await asyncio.sleep(0.01)
        assert source.facts().refused == {"unmatched": 20}
        figures = source.take(1).figures
        assert (figures["atropos/groups"], figures["atropos/sequences"]) == (20, 40)

    play(use)
    kept = [json.loads(line) for line in (tmp_path / "quarantine.jsonl").read_text().splitlines()]
    assert [one["reason"] for one in kept] == ["unmatched"] * 16
    assert "2 of 2 sequences" in kept[0]["detail"]


def test_what_asking_raises_ends_the_wait(play: Callable[..., None], run_api: RunApi) -> None:
    run_api.state = {"queue": [], "batch_size": 12, "max_token_len": 64}

    async def use(source: AtroposSource) -> None:
        with pytest.raises(ValueError, match="batch_size=12"):
            await ready(source)

    play(use)


def test_a_step_that_waits_says_why(play: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parallm.integrations.atropos.source.SECONDS_BETWEEN_MESSAGES", 0.05)

    async def use(source: AtroposSource) -> None:
        source.explain = lambda facts: f"no batch, {facts.sizes.batch_size} wanted"
        while not source.message:
            assert not source.is_ready(5, 4)
            await asyncio.sleep(0.01)
        assert source.message == "no batch, 4 wanted"

    play(use)
