"""The user's configuration file: its order, its mistakes, and the way off."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from parallm.cli.program import run
from parallm.config.compose import compose
from parallm.config.schema import ServeConfig
from parallm.config.user_file import overrides_of, with_user_file
from parallm.errors import ConfigError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Write the user's file."""

    def put(text: str) -> Path:
        path = tmp_path / "parallm" / "config.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        monkeypatch.setattr("parallm.user_folders.IS_MAC", False)
        monkeypatch.delenv("PARALLM_CONFIG")
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
        return path

    return put


@pytest.mark.parametrize(
    "value", ["it's", "a\\", "a\\'b", "1", "null", "a, b: [c]", "", "~/x", " spaced ", "ünï", None]
)
def test_a_value_reaches_the_configuration_as_it_stands(write: Callable[[str], Path], value: Any) -> None:
    write(yaml.safe_dump({"server": {"adapters": {"poet": str(value)}}, "model": {"adapter": value}}))
    composed = compose("serve", ServeConfig, overrides_of("serve")).values
    assert composed.model.adapter == value
    assert composed.server.adapters.poet == str(value)


def test_numbers_and_truths_keep_their_types(write: Callable[[str], Path]) -> None:
    write("device: {serving_share: 0.5}\nengine: {warmup: false}\nserver: {port: 7, uds: null, api_keys: []}\n")
    config = compose("serve", ServeConfig, overrides_of("serve")).config
    assert (config.device.serving_share, config.engine.warmup, config.server.port) == (0.5, False, 7)
    assert config.server.api_keys == ()


def test_the_command_line_and_a_recipe_come_before_the_file(write: Callable[[str], Path]) -> None:
    write("server: {port: 9000, host: 127.0.0.2}\nmodel: {path: mine}\ntrainer: {steps: 7}\nworkers: [http://a]\n")
    assert overrides_of("serve") == ["server.port=9000", "server.host='127.0.0.2'", "model.path='mine'"]
    assert overrides_of("serve", ["server.port=1", "-m"])[0] == "server.host='127.0.0.2'"
    assert overrides_of("serve", ["server=network"]) == ["model.path='mine'"]
    assert overrides_of("front") == ["server.port=9000", "server.host='127.0.0.2'", "workers=['http://a']"]
    assert "trainer.steps=7" in overrides_of("train")
    assert "trainer.steps=7" not in overrides_of("train", ["+recipe=arithmetic_grpo"])  # the recipe has its own
    assert compose("serve", ServeConfig, overrides_of("serve")).config.server.port == 9000


def test_a_key_that_no_command_has_is_refused_with_the_nearest_one(write: Callable[[str], Path]) -> None:
    path = write("server: {prot: 9000}\nmodle: {path: x}\nenvironment: {name: gsm8k}\nmetrics: wandb\n")
    with pytest.raises(ConfigError) as error:
        overrides_of("serve")
    lines = str(error.value).splitlines()
    assert lines[0].startswith(f"{path}: server.prot: unknown key, did you mean port?")
    assert lines[1].startswith(f"{path}: modle: unknown key, did you mean model?")
    assert lines[2] == f"{path}: environment: an environment is chosen by a recipe or on the command line"
    assert lines[3].startswith(f"{path}: metrics: 'wandb' should be keys with values")
    for text, message in (
        ("- a\n", "should hold keys with values"),
        ("server: [\n", "cannot be read"),
        ("seed: 1\nseed: 2\n", "cannot be read: .*duplicate key"),
        ("server: {adapters: {'a:b': x}}\n", "the name 'a:b' cannot stand here"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            overrides_of("serve")


def test_it_is_named_on_the_screen_and_read_once(
    write: Callable[[str], Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write("server: {port: 9000}\n")
    assert with_user_file("serve", ["name=x"]) == ["server.port=9000", "name=x"]
    assert capsys.readouterr().err == f"parallm: {path} sets server.port=9000\n"
    assert with_user_file("serve", ["server.port=9000", "name=x"]) == ["server.port=9000", "name=x"]  # a child process
    assert with_user_file("evaluate", []) == []
    monkeypatch.delenv("PARALLM_CONFIG")
    assert with_user_file("evaluate", []) == []  # it sets nothing there
    monkeypatch.delenv("PARALLM_CONFIG")
    monkeypatch.setenv("MLX_RANK", "1")
    assert with_user_file("serve", []) == []
    assert capsys.readouterr().err == ""


def test_a_named_file_that_is_missing_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert os.environ["PARALLM_CONFIG"] == "off"
    assert overrides_of("serve") == []
    monkeypatch.setenv("PARALLM_CONFIG", str(tmp_path / "none.yaml"))
    with pytest.raises(ConfigError, match="does not exist; name a file, or PARALLM_CONFIG=off"):
        overrides_of("serve")


def test_a_wrong_file_ends_a_command_with_the_code_of_a_configuration_error(write: Callable[[str], Path]) -> None:
    write("server: {port: 99999}\n")
    command = [sys.executable, "-m", "parallm.serve"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 78
    assert done.stderr.splitlines()[-1].startswith("parallm: server.port: 99999 must be less than or equal to 65535")


def test_the_program_shows_and_checks_it(write: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config"]) == 1
    assert "PARALLM_CONFIG=off" in capsys.readouterr().err
    path = write("trainer: {steps: 3}\n")
    assert (run(["config", "path"]), run(["config", "show"]), run(["config", "check"])) == (0, 0, 0)
    assert capsys.readouterr().out == f"{path}\ntrain  trainer.steps=3\n{path}: every command can use it\n"
    path.write_text("trainer: {steps: none}\n")
    assert run(["config", "check"]) == 1
    assert "trainer.steps: 'none' must be a valid integer" in capsys.readouterr().err
