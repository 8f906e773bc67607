"""Settings become environments, and the examples of the README work."""

import asyncio
import importlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from parallm.environment.arithmetic import Arithmetic
from parallm.environment.environment import connect, is_multi_turn
from parallm.environment.gsm8k import Gsm8k
from parallm.environment.settings import ArithmeticSettings, CustomSettings, Gsm8kSettings
from parallm.errors import ConfigError
from parallm.run.training_data import build_environment
from parallm.types import Message

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "recipes" / "environments"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the import path, for modules whose names begin with `own_`."""
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("own_")]:
        del sys.modules[name]


def test_settings_choose_the_environment(tmp_path: Path) -> None:
    assert isinstance(build_environment(ArithmeticSettings(num_train=4, num_test=4)), Arithmetic)
    assert isinstance(build_environment(Gsm8kSettings(path=str(tmp_path))), Gsm8k)


@pytest.fixture
def example(folder: Path) -> Callable[..., Any]:
    """The environment of an example of the README or of the recipes, by its class name: `example("Polite")`."""

    def make(name: str, **options: Any) -> Any:
        guide = (ROOT / "parallm" / "environment" / "README.md").read_text(encoding="utf-8")
        codes = re.findall(r"```python\n(.*?)```", guide, flags=re.DOTALL)
        codes += [file.read_text(encoding="utf-8") for file in EXAMPLES.glob("*.py")]
        (code,) = (code for code in codes if f"class {name}:" in code)
        assert code.count("\n") < 40
        module = f"own_{name.lower()}"
        (folder / f"{module}.py").write_text(code, encoding="utf-8")
        return build_environment(CustomSettings(target=f"{module}:{name}", options=options))

    return make


def test_the_example_of_one_turn_works(example: Callable[..., Any]) -> None:
    environment = example("Reverse", num_test=3)
    test, train = environment.problems("test"), environment.problems("train")
    assert (len(test), len(train)) == (3, 7)
    assert not {problem.problem_id for problem in test} & {problem.problem_id for problem in train}
    assert environment.score(test[0], " elppa\n") == {"correct": 1.0, "length": 1.0}
    assert environment.score(test[0], "apple") == {"correct": 0.0, "length": 1.0}
    assert set(environment.weights) == {"correct", "length"}


def test_the_example_with_a_judge_works(example: Callable[..., Any]) -> None:
    async def ask(messages: Sequence[Message], *, model: str = "base", max_tokens: int = 64) -> str:
        assert model == "base"
        return " Yes, it is." if "Good morning" in messages[-1].content else "No."

    environment = example("Polite")
    connect(environment, ask)
    (problem, *_) = environment.problems("train")
    assert asyncio.run(environment.score(problem, "Good morning!")) == {"polite": 1.0, "short": 1.0}
    assert asyncio.run(environment.score(problem, "x" * 300)) == {"polite": 0.0, "short": 0.0}


def test_the_example_of_several_turns_works(example: Callable[..., Any]) -> None:
    def said(*texts: str) -> list[Message]:
        return [Message(role="user" if place % 2 else "assistant", content=text) for place, text in enumerate(texts)]

    environment = example("Guess")
    assert is_multi_turn(environment)
    assert not is_multi_turn(type("Single", (type(environment),), {"reply": None})())
    problem = next(one for one in environment.problems("train") if one.answer == "37")
    assert environment.reply(problem, said("50")) == [Message(role="user", content="lower")]
    assert environment.reply(problem, said("50", "lower", "20")) == [Message(role="user", content="higher")]
    assert environment.reply(problem, said("no idea")) == [Message(role="user", content="a number, please")]
    assert environment.reply(problem, said("50", "lower", "37")) is None
    assert environment.score(problem, said("50", "lower", "37")) == {"correct": 1.0, "guesses": 2.0}
    assert environment.score(problem, said("")) == {"correct": 0.0, "guesses": 1.0}


@pytest.mark.parametrize("target", ["own_module", "own_module:", ":Own", ""])
def test_a_target_without_a_class_is_refused(target: str) -> None:
    with pytest.raises(ConfigError, match=r"form package\.module:Class"):
        build_environment(CustomSettings(target=target))


def test_a_module_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"there is no module own_nothing.*PYTHONPATH"):
        build_environment(CustomSettings(target="own_nothing.part:Own"))


def test_a_module_that_misses_another_one_is_told_apart(folder: Path) -> None:
    (folder / "own_needy.py").write_text("import own_missing_library\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"own_needy needs a missing module.*own_missing_library"):
        build_environment(CustomSettings(target="own_needy:Own"))


def test_a_class_that_is_not_there_is_named_with_those_that_are(folder: Path) -> None:
    (folder / "own_other.py").write_text("class Other: ...\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"has no class Own, it has \['Other'\]"):
        build_environment(CustomSettings(target="own_other:Own"))


def test_options_that_do_not_fit_are_named_with_the_signature(folder: Path) -> None:
    (folder / "own_strict.py").write_text(
        "class Own:\n    def __init__(self, size: int) -> None: ...\n", encoding="utf-8"
    )
    with pytest.raises(ConfigError, match=r"environment.options=\{'sise': 3\}.*size: int"):
        build_environment(CustomSettings(target="own_strict:Own", options={"sise": 3}))


def test_missing_members_are_named(folder: Path) -> None:
    (folder / "own_half.py").write_text("class Own:\n    def problems(self, split): ...\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="lacks score, weights"):
        build_environment(CustomSettings(target="own_half:Own"))


def test_an_error_of_the_environment_itself_is_not_hidden(folder: Path) -> None:
    (folder / "own_faulty.py").write_text(
        "class Own:\n    def __init__(self) -> None:\n        raise TypeError('its own fault')\n", encoding="utf-8"
    )
    with pytest.raises(TypeError, match="its own fault"):
        build_environment(CustomSettings(target="own_faulty:Own"))
