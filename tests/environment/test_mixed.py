from collections.abc import Mapping, Sequence

from parallm.environment.arithmetic import Calculator
from parallm.environment.environment import Ask, Mixed, connect, environment_of
from parallm.environment.settings import ArithmeticSettings, CalculatorSettings, MixedPart, MixedSettings
from parallm.rollout.episode import Episode
from parallm.rollout.scoring import score_call
from parallm.run.training_data import build_environment
from parallm.types import GenerationRequest, Message, Problem, SamplingParams, Split

EASY = ArithmeticSettings(levels=(1,), num_train=30, num_test=10)
HARD = ArithmeticSettings(levels=(3,), num_train=30, num_test=10)


def mixed() -> Mixed:
    parts = {
        "easy": MixedPart(weight=3, environment=EASY),
        "tool": MixedPart(weight=1, environment=CalculatorSettings(problems=HARD)),
    }
    made = build_environment(MixedSettings(parts=parts))
    assert isinstance(made, Mixed)
    return made


def test_each_problem_remembers_its_environment() -> None:
    environment = mixed()
    problems = environment.problems("train")
    assert {(problem.environment, problem.level) for problem in problems} == {("easy", 1), ("tool", 3)}
    assert len({problem.problem_id for problem in problems}) == 60
    tool = next(problem for problem in problems if problem.environment == "tool")
    assert isinstance(environment_of(environment, tool), Calculator)


def test_the_first_held_out_problems_are_mixed_by_the_weights() -> None:
    names = [problem.environment for problem in mixed().problems("test")]
    assert names[:8].count("easy") == 6
    assert (names.count("easy"), names.count("tool")) == (10, 10)


def test_a_problem_is_scored_by_its_own_environment() -> None:
    environment = mixed()
    for name, parts in (("easy", {"correct", "format"}), ("tool", {"correct", "format", "calls"})):
        problem = next(problem for problem in environment.problems("test") if problem.environment == name)
        request = GenerationRequest(request_id="r", prompt_tokens=(1,), sampling=SamplingParams(max_tokens=8))
        episode = Episode(problem=problem, request=request, index=0)
        episode.text = f"#### {problem.answer}"
        episode.turns = [Message(role="assistant", content=episode.text)]
        found = score_call(environment, episode)()
        assert isinstance(found, Mapping)
        assert set(found) == parts
        assert found["correct"] == 1


class Asking:
    weights: Mapping[str, float] = {}
    ask: Ask

    def problems(self, split: Split) -> Sequence[Problem]:
        return []

    def score(self, problem: Problem, text: str) -> Mapping[str, float]:
        return {}

    def connect(self, ask: Ask) -> None:
        self.ask = ask


def test_environments_that_ask_are_connected_alone_and_in_a_mixture() -> None:
    async def ask(messages: object, *, model: str = "base", max_tokens: int = 64) -> str:
        return "yes"

    alone, within = Asking(), Asking()
    connect(alone, ask)
    connect(Mixed(environments={"a": within, "b": build_environment(EASY)}, shares={"a": 1, "b": 1}), ask)
    assert alone.ask is within.ask is ask
