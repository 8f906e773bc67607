"""Tasksets of the package itself, where it is installed: python -m pytest in an environment that has verifiers 0.4."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from parallm.environment.environment import EnvironmentSession, StatefulEnvironment, is_stateful
from parallm.environment.settings import VerifiersSettings
from parallm.errors import ConfigError, ProblemError
from parallm.run.training_data import build_environment
from parallm.types import Message

pytest.importorskip("verifiers", minversion="0.4")
pytestmark = pytest.mark.filterwarnings("default")

ENVIRONMENTS = Path(__file__).parents[2] / "interop" / "verifiers" / "packages"
ROWS = [
    {"question": "1 + 1", "answer": "2"},
    {"question": "2 + 2", "answer": "4"},
    {"question": "3 + 3", "answer": "6"},
    {"question": "4 + 4", "answer": "8"},
]
TOOLS = """
import verifiers.v1 as vf

__all__ = ["WithTools"]

class Clock(vf.Toolset):
    @vf.tool
    async def now(self) -> str:
        '''The time.'''
        return "12:00"

class TimeTask(vf.Task[vf.TaskData]):
    @classmethod
    def toolsets(cls, config):
        return [Clock(vf.ToolsetConfig())]

class WithTools(vf.Taskset[TimeTask, vf.TasksetConfig]):
    def load(self):
        return [TimeTask(vf.TaskData(prompt="what time is it?"))]
"""
ENDLESS = """
from itertools import count
import verifiers.v1 as vf

__all__ = ["Endless"]

class CountTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def broken(self, trace: vf.Trace) -> float:
        raise RuntimeError("the judge is asleep")

class Endless(vf.Taskset[CountTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        return (CountTask(vf.TaskData(prompt=f"after {number}?", system_prompt="Count.")) for number in count())
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for split, rows in (("train", ROWS), ("test", ROWS[:2])):
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "with_tools.py").write_text(TOOLS)
    (tmp_path / "endless.py").write_text(ENDLESS)
    monkeypatch.syspath_prepend(ENVIRONMENTS)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def made(environment_id: str, **options: object) -> StatefulEnvironment:
    environment = build_environment(VerifiersSettings(id=environment_id, **options))  # type: ignore[arg-type]
    assert is_stateful(environment)
    return environment


def said(text: str) -> Message:
    return Message(role="assistant", content=text)


def score(session: EnvironmentSession, *turns: Message, is_cut_off: bool = False) -> Mapping[str, float]:
    async def play() -> Mapping[str, float]:
        return await session.score(turns, is_cut_off=is_cut_off)  # type: ignore[misc]  # these are awaitable

    return asyncio.run(play())


def test_the_first_problems_are_held_out(folder: Path) -> None:
    environment = made("word-sums", options={"path": str(folder)}, num_test=1)
    assert [one.messages[0].content for one in environment.problems("train")] == ["2 + 2", "3 + 3", "4 + 4"]
    assert [one.messages[0].content for one in environment.problems("test")] == ["1 + 1"]
    assert environment.problems("train")[0].problem_id == "word-sums/train/1"


def test_held_out_problems_may_come_from_other_options(folder: Path) -> None:
    environment = made("word-sums", options={"path": str(folder)}, test_options={"split": "test"}, num_train=3)
    assert [len(environment.problems(split)) for split in ("train", "test")] == [3, 2]


def test_an_answer_gets_the_rewards_of_its_task(folder: Path) -> None:
    environment = made("word-sums", options={"path": str(folder)}, num_test=0)
    right, wrong = environment.open(environment.problems("train")[0], 2)
    assert score(right, said("1 + 1 = 2\n#### 2")) == {"correct": 1, "verifiers/reward": 1}
    assert score(wrong, said("#### 3")) == {"correct": 0, "verifiers/reward": 0}
    assert environment.weights == {"verifiers/reward": 1}


def test_a_user_of_the_environment_speaks_between_turns(folder: Path) -> None:
    environment = made("sums-in-turn", options={"path": str(folder)}, num_test=0)
    problem = environment.problems("train")[0]
    assert problem.messages == (Message(role="user", content="1 + 1"),)
    (session,) = environment.open(problem, 1)
    second = Message(role="user", content="2 + 2")

    async def play() -> Mapping[str, float]:
        assert await session.reply([said("#### 2")]) == [second]  # type: ignore[misc]
        assert await session.reply([said("#### 2"), second, said("#### 5")]) is None  # type: ignore[misc]
        return await session.score([said("#### 2"), second, said("#### 5")], is_cut_off=False)  # type: ignore[misc]

    assert asyncio.run(play()) == {"correct": 0, "right_turns": 0.5, "verifiers/reward": 0.5}


def test_an_episode_that_ends_at_our_limits_is_scored_for_what_there_is(folder: Path) -> None:
    environment = made("sums-in-turn", options={"path": str(folder)}, num_test=0)
    (session,) = environment.open(environment.problems("train")[0], 1)
    assert score(session, said("#### 2"), is_cut_off=True)["verifiers/reward"] == 0.5


def test_a_reward_that_fails_is_raised_with_its_words() -> None:
    environment = made("endless", num_train=2, num_test=0)
    (problem, _) = environment.problems("train")
    assert [message.role for message in problem.messages] == ["system", "user"]
    with pytest.raises(Exception, match="the judge is asleep"):
        score(environment.open(problem, 1)[0], said("1"))


def test_problems_without_end_need_a_number() -> None:
    with pytest.raises(ConfigError, match=r"set environment\.num_train"):
        made("endless").problems("train")


def test_tools_are_refused() -> None:
    with pytest.raises(ConfigError, match="has tools; environments that are plain chats can be played"):
        made("with-tools")


def test_options_that_the_taskset_does_not_have_are_named(folder: Path) -> None:
    with pytest.raises(ConfigError, match="colour"):
        made("word-sums", options={"path": str(folder), "colour": "red"})


def test_data_that_is_not_there_is_said_to_be_missing() -> None:
    with pytest.raises(ProblemError, match="FileNotFoundError"):
        made("word-sums", options={"path": "/no/such/folder"}).problems("train")
