"""Rewards by functions that clients name."""

import asyncio
import sys
import threading
import types
from collections.abc import Callable, Sequence

import pytest

from parallm.errors import ConfigError, InvalidRequest
from parallm.rollout.live.scoring_dispatcher import MAX_PENDING
from parallm.rollout.live.scoring_functions import ScoringInput
from parallm.rollout.live.source import LiveSource
from parallm.types import GenerationRequest, SamplingParams
from tests.rollout.live.conftest import until

Record = Callable[..., None]
Make = Callable[..., LiveSource]
SECRET = "sk-123"


def length(answered: ScoringInput) -> float:
    return float(len(answered.text))


async def parts(answered: ScoringInput) -> dict[str, float]:
    await asyncio.sleep(0)
    return {"prompt": float(len(answered.prompt)), "bonus": answered.metadata["bonus"]}


def crash(answered: ScoringInput) -> float:
    raise ValueError(f"what is {answered.metadata}?")


def words(_: ScoringInput) -> str:
    return "good"


free = threading.Event()


def block(_: ScoringInput) -> float:
    free.wait(10)
    return 1.0


@pytest.fixture
def functions(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    module = types.ModuleType("own_scores")
    free.clear()
    for function in (length, parts, crash, words, block):
        setattr(module, function.__name__, function)
    monkeypatch.setitem(sys.modules, "own_scores", module)
    return {name: f"own_scores:{name}" for name in ("length", "parts", "crash", "words", "block")}


def decode(tokens: Sequence[int]) -> str:
    return "p" * len(tokens)


def run(source: LiveSource, act: Callable[[], None]) -> list[tuple[float, ...]]:
    """`act` on a loop, and all that it sets off; the rewards of the groups that it makes."""

    async def main() -> list[tuple[float, ...]]:
        source.connect(decode)
        act()
        await until(lambda: not source._dispatcher._tasks)
        groups = source.take(1).groups
        await source.close()
        return [group.rewards for group in groups]

    return asyncio.run(main())


def test_a_function_rewards_by_prompt_text_and_metadata(make: Make, record: Record, functions: dict[str, str]) -> None:
    source = make(scoring_functions=functions)

    def act() -> None:
        record(source, "a", scoring_function="length", text="four")
        record(source, "b", scoring_function="parts", metadata={"bonus": 0.5})

    assert run(source, act) == [(4.0, 2.5)]
    assert source.report().dropped == {}


@pytest.mark.parametrize(("name", "reason"), [("crash", "score_raised"), ("words", "score_malformed")])
def test_a_function_that_fails_drops_the_trajectory_and_logs_no_metadata(
    make: Make, record: Record, functions: dict[str, str], caplog: pytest.LogCaptureFixture, name: str, reason: str
) -> None:
    source = make(scoring_functions=functions)
    run(source, lambda: record(source, "a", scoring_function=name, metadata={"key": SECRET}))
    assert source.report().dropped == {reason: 1}
    assert name in caplog.text
    assert SECRET not in caplog.text


def test_a_reward_that_a_client_sends_counts_before_a_function(
    make: Make, record: Record, functions: dict[str, str]
) -> None:
    source = make(scoring_functions=functions, group_by="request")

    def act() -> None:
        record(source, "a", scoring_function="length", n=2)
        record(source, "b", scoring_function="length", n=2)
        source.reward("a", -1.0)

    assert run(source, act) == [(-1.0, 2.0)]


def test_what_was_not_scored_before_a_restart_is_scored_after_it(
    make: Make, record: Record, functions: dict[str, str]
) -> None:
    before = make(scoring_functions=functions)
    record(before, "a", scoring_function="length")  # it is not connected yet
    asyncio.run(before.close())
    after = make(scoring_functions=functions)
    run(after, lambda: None)
    assert after.report().num_rewarded == 1


def test_an_unknown_name_is_refused_with_the_known_ones(make: Make, functions: dict[str, str]) -> None:
    request = GenerationRequest(request_id="r", prompt_tokens=(1,), sampling=SamplingParams(max_tokens=1))
    with pytest.raises(InvalidRequest, match=r"no scoring_function 'thumb'; there are arithmetic, .*, gsm8k, length, "):
        make(scoring_functions=functions).check(request, "thumb", {})


@pytest.mark.parametrize("target", ["own_scores", "own_scores:nothing", "nowhere_at_all:length"])
def test_a_function_that_is_not_there_is_named_before_the_model_loads(
    make: Make, functions: dict[str, str], target: str
) -> None:
    with pytest.raises(ConfigError, match=f"^rollout.live.scoring_functions.mine='{target}'"):
        make(scoring_functions={"mine": target})


def test_a_function_that_fails_costs_no_reward_that_a_client_has_sent(
    make: Make, record: Record, functions: dict[str, str]
) -> None:
    source = make(scoring_functions=functions, group_by="request")

    def act() -> None:
        for name, reward in (("a", 1.0), ("b", -1.0)):
            record(source, name, scoring_function="crash", n=2)
            source.reward(name, reward)

    assert run(source, act) == [(1.0, -1.0)]


@pytest.mark.parametrize("bonus", [1e39, -1e308, 1.1e9])
def test_a_function_whose_reward_no_step_could_compute_with_costs_its_trajectory(
    make: Make, record: Record, functions: dict[str, str], bonus: float
) -> None:
    source = make(scoring_functions=functions)
    run(source, lambda: record(source, "a", scoring_function="parts", metadata={"bonus": bonus}))
    assert source.report().dropped == {"score_too_large": 1}


def test_a_function_that_blocks_holds_up_no_other(make: Make, record: Record, functions: dict[str, str]) -> None:
    source = make(scoring_functions=functions)

    async def main() -> None:
        source.connect(decode)
        for place in range(MAX_PENDING + 3):
            record(source, f"slow{place}", scoring_function="block")
        record(source, "good", scoring_function="length")
        await until(lambda: source.report().num_rewarded == 1)
        assert source.report().dropped == {"score_behind": 3}
        assert source.report().num_waiting == MAX_PENDING
        free.set()
        await until(lambda: source.report().num_rewarded == MAX_PENDING + 1)
        await source.close()

    asyncio.run(main())


def test_all_that_waited_for_a_score_before_a_restart_get_it_however_many(
    make: Make, record: Record, functions: dict[str, str]
) -> None:
    before = make(scoring_functions=functions)
    for place in range(MAX_PENDING + 3):
        record(before, str(place), scoring_function="length", prompt=place)
    asyncio.run(before.close())
    after = make(scoring_functions=functions)
    run(after, lambda: None)
    assert (after.report().num_rewarded, after.report().dropped) == (MAX_PENDING + 3, {})


def test_rewards_are_told_to_who_listens(make: Make, record: Record, functions: dict[str, str]) -> None:
    source, rewards = make(scoring_functions=functions), []
    source.listen(lambda name, reward: rewards.append((name, reward)))

    def act() -> None:
        record(source, "a", scoring_function="length", text="four")
        record(source, "b")
        source.reward("b", 0.5)

    run(source, act)
    assert sorted(rewards) == [("a", 4.0), ("b", 0.5)]
