"""Settings become environments, and the example of the README works."""

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from parallm.environment.arithmetic import Arithmetic
from parallm.environment.environment import build_environment
from parallm.environment.gsm8k import Gsm8k
from parallm.environment.settings import ArithmeticSettings, CustomSettings, Gsm8kSettings
from parallm.errors import ConfigError

README = Path(__file__).parents[2] / "parallm" / "environment" / "README.md"


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


def test_the_example_of_the_readme_is_short_and_works(folder: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert code.count("\n") < 40
    (folder / "own_reverse.py").write_text(code, encoding="utf-8")
    environment = build_environment(CustomSettings(target="own_reverse:Reverse", options={"num_test": 3}))
    test, train = environment.problems("test"), environment.problems("train")
    assert (len(test), len(train)) == (3, 7)
    assert not {problem.problem_id for problem in test} & {problem.problem_id for problem in train}
    assert environment.score(test[0], " elppa\n") == {"correct": 1.0, "length": 1.0}
    assert environment.score(test[0], "apple") == {"correct": 0.0, "length": 1.0}
    assert set(environment.weights) == {"correct", "length"}


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
