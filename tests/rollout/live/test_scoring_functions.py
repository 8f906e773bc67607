"""Rewards by functions that clients name."""

import asyncio
import sys
import types
from collections.abc import Callable, Sequence

import pytest

from parallm.errors import ConfigError, InvalidRequest
from parallm.rollout.live.scoring_functions import Answered
from parallm.rollout.live.traffic import LiveTraffic
from parallm.types import GenerationRequest, SamplingParams

Record = Callable[..., None]
Make = Callable[..., LiveTraffic]
SECRET = "sk-123"


def length(answered: Answered) -> float:
    return float(len(answered.text))


async def parts(answered: Answered) -> dict[str, float]:
    await asyncio.sleep(0)
    return {"prompt": float(len(answered.prompt)), "bonus": answered.metadata["bonus"]}


def crash(answered: Answered) -> float:
    raise ValueError(f"what is {answered.metadata}?")


def words(_: Answered) -> str:
    return "good"


@pytest.fixture
def functions(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    module = types.ModuleType("own_scores")
    for function in (length, parts, crash, words):
        setattr(module, function.__name__, function)
    monkeypatch.setitem(sys.modules, "own_scores", module)
    return {name: f"own_scores:{name}" for name in ("length", "parts", "crash", "words")}


def decode(tokens: Sequence[int]) -> str:
    return "p" * len(tokens)


def run(traffic: LiveTraffic, act: Callable[[], None]) -> list[tuple[float, ...]]:
    """`act` on a loop, and what it sets off; the rewards of the groups that it makes."""

    async def main() -> list[tuple[float, ...]]:
        traffic.connect(decode)
        act()
        await asyncio.sleep(0.05)
        groups = traffic.take().groups
        await traffic.close()
        return [group.rewards for group in groups]

    return asyncio.run(main())


def test_a_function_rewards_by_prompt_text_and_metadata(make: Make, record: Record, functions: dict[str, str]) -> None:
    traffic = make(scoring_functions=functions)

    def act() -> None:
        record(traffic, "a", scoring_function="length", text="four")
        record(traffic, "b", scoring_function="parts", metadata={"bonus": 0.5})

    assert run(traffic, act) == [(4.0, 2.5)]
    assert traffic.report().dropped == {}


@pytest.mark.parametrize(("name", "reason"), [("crash", "score_raised"), ("words", "score_malformed")])
def test_a_function_that_fails_drops_the_trajectory_and_logs_no_metadata(
    make: Make, record: Record, functions: dict[str, str], caplog: pytest.LogCaptureFixture, name: str, reason: str
) -> None:
    traffic = make(scoring_functions=functions)
    run(traffic, lambda: record(traffic, "a", scoring_function=name, metadata={"key": SECRET}))
    assert traffic.report().dropped == {reason: 1}
    assert name in caplog.text
    assert SECRET not in caplog.text


def test_a_reward_that_a_client_sends_counts_before_a_function(
    make: Make, record: Record, functions: dict[str, str]
) -> None:
    traffic = make(scoring_functions=functions, group_by="request")

    def act() -> None:
        record(traffic, "a", scoring_function="length", n=2)
        record(traffic, "b", scoring_function="length", n=2)
        traffic.reward("a", -1.0)

    assert run(traffic, act) == [(-1.0, 2.0)]


def test_what_was_not_scored_before_a_restart_is_scored_after_it(
    make: Make, record: Record, functions: dict[str, str]
) -> None:
    before = make(scoring_functions=functions)
    record(before, "a", scoring_function="length")  # nobody has connected it yet
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


def test_rewards_are_told_to_who_listens(make: Make, record: Record, functions: dict[str, str]) -> None:
    traffic, heard = make(scoring_functions=functions), []
    traffic.listen(lambda name, reward: heard.append((name, reward)))

    def act() -> None:
        record(traffic, "a", scoring_function="length", text="four")
        record(traffic, "b")
        traffic.reward("b", 0.5)

    run(traffic, act)
    assert sorted(heard) == [("a", 4.0), ("b", 0.5)]
