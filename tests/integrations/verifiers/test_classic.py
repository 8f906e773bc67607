"""Environments with `load_environment`, where the package is installed: verifiers 0.3."""

import asyncio
import json
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest

from parallm.conversation import ToolCall
from parallm.environment.environment import EnvironmentSession, StatefulEnvironment, is_stateful
from parallm.environment.settings import VerifiersSettings
from parallm.errors import ConfigError
from parallm.run.training_data import build_environment
from parallm.types import Message

pytest.importorskip("verifiers.legacy", reason="needs verifiers 0.3", exc_type=ImportError)
pytestmark = pytest.mark.filterwarnings("default")

ENVIRONMENTS = Path(__file__).parents[2] / "interop" / "verifiers" / "packages"
SECOND = Message(role="user", content="Are you sure?")
OTHERS = """
import verifiers as vf
from datasets import Dataset

DATA = Dataset.from_list([{"question": f"{number} + 1", "answer": str(number + 1)} for number in range(4)])

def shortest(completions) -> list[float]:
    lengths = [len(one[-1]["content"]) for one in completions]
    return [float(length == min(lengths)) for length in lengths]

class Doubtful(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        state["doubts"] = state.get("doubts", 0) + 1
        return [vf.UserMessage(content="Are you sure?")]

def doubts(state) -> float:
    return float(state.get("doubts", 0))

def now() -> str:
    '''The time.'''
    return "12:00"

def load_environment(kind):
    if kind == "group":
        return vf.SingleTurnEnv(dataset=DATA, rubric=vf.Rubric(funcs=[shortest]))
    if kind == "tools":
        return vf.ToolEnv(dataset=DATA, tools=[now], rubric=vf.Rubric(funcs=[doubts]))
    return Doubtful(dataset=DATA, rubric=vf.Rubric(funcs=[doubts], weights=[0.5]), max_turns=2)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for split in ("train", "test"):
        rows = [{"question": f"{number} + 1", "answer": str(number + 1)} for number in range(3)]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "other_kinds.py").write_text(OTHERS)
    monkeypatch.syspath_prepend(ENVIRONMENTS)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def made(environment_id: str, **options: object) -> StatefulEnvironment:
    environment = build_environment(VerifiersSettings(id=environment_id, **options))  # type: ignore[arg-type]
    assert is_stateful(environment)
    return environment


def said(text: str) -> Message:
    return Message(role="assistant", content=text)


def score(session: EnvironmentSession, *turns: Message) -> "asyncio.Future[Mapping[str, float]]":
    return asyncio.ensure_future(session.score(turns, is_cut_off=False))  # type: ignore[arg-type]  # these are awaitable


def test_an_answer_gets_the_rewards_of_its_rubric(folder: Path) -> None:
    environment = made("classic-sums", options={"path": str(folder)}, num_test=2)
    assert [len(environment.problems(split)) for split in ("train", "test")] == [3, 2]
    right, wrong = environment.open(environment.problems("train")[0], 2)

    async def play() -> list[Mapping[str, float]]:
        return list(await asyncio.gather(score(right, said("#### 1")), score(wrong, said("#### 7"))))

    first, second = asyncio.run(play())
    assert (first["correct"], first["verifiers/reward"]) == (1, 1)
    assert (second["correct"], second["verifiers/reward"]) == (0, 0)


def test_the_environment_replies_and_keeps_its_state() -> None:
    environment = made("other-kinds", options={"kind": "turns"}, num_test=1, correct_at=0.5)
    assert len(environment.problems("train")) == 3
    (session,) = environment.open(environment.problems("train")[0], 1)

    async def play() -> Mapping[str, float]:
        assert await session.reply([said("1")]) == [SECOND]  # type: ignore[misc]
        assert await session.reply([said("1"), SECOND, said("yes")]) is None  # type: ignore[misc]
        return await score(session, said("1"), SECOND, said("yes"))

    parts = asyncio.run(play())
    assert (parts["doubts"], parts["num_turns"], parts["verifiers/reward"], parts["correct"]) == (1, 2, 0.5, 1)


def test_a_group_is_scored_together_even_where_one_of_it_has_left() -> None:
    environment = made("other-kinds", options={"kind": "group"}, num_test=0)
    short, long, closed = environment.open(environment.problems("train")[0], 3)

    async def play() -> list[Mapping[str, float]]:
        assert await closed.reply([said("?")]) is None  # type: ignore[misc]
        closed.close()
        return list(await asyncio.gather(score(short, said("1")), score(long, said("one"))))

    first, second = asyncio.run(play())
    assert (first["shortest"], second["shortest"]) == (1, 0)


def test_signal_handlers_stay_ours() -> None:
    before = signal.getsignal(signal.SIGTERM)
    made("other-kinds", options={"kind": "turns"})
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_function_that_the_model_calls_is_called_and_its_result_is_the_reply() -> None:
    environment = made("other-kinds", options={"kind": "tools"}, num_test=0)
    problem = environment.problems("train")[0]
    assert json.loads(problem.tools)[0]["function"]["name"] == "now"
    (session,) = environment.open(problem, 1)
    call = Message(role="assistant", content="", calls=(ToolCall(name="now", arguments="{}"),))
    time = Message(role="tool", content="12:00")

    async def play() -> Mapping[str, float]:
        assert await session.reply([call]) == [time]  # type: ignore[misc]
        assert await session.reply([call, time, said("noon")]) is None  # type: ignore[misc]
        return await score(session, call, time, said("noon"))

    parts = asyncio.run(play())
    assert (parts["now_calls"], parts["total_tool_calls"]) == (1, 1)


def test_options_that_the_environment_does_not_have_are_named() -> None:
    with pytest.raises(ConfigError, match="colour"):
        made("other-kinds", options={"kind": "turns", "colour": "red"})
