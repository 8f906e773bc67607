"""The configuration of an environment, and the port of a run-api that a run starts."""

import json
import socket
from pathlib import Path

import pytest

from parallm.errors import ConfigError
from parallm.integrations.atropos.launcher import (
    ENVIRONMENT_HOST,
    LaunchContext,
    check_interpreter,
    command_of,
    with_free_port,
)
from parallm.rollout.settings import AtroposSettings, EnvironmentProcess, RolloutSettings, StartSettings

CONTEXT = LaunchContext(
    rollout=RolloutSettings(problems_per_step=4, group_size=4, max_tokens=64),
    server="http://127.0.0.1:8000",
    recipes="/recipes",
    tokenizer="/model",
    model="policy",
)


def process(tmp_path: Path, **fields: object) -> EnvironmentProcess:
    (tmp_path / "words.py").write_text("")
    return EnvironmentProcess(**({"script": "words.py", "folder": str(tmp_path)} | fields))  # type: ignore[arg-type]


def test_a_file_describes_this_run_to_an_environment(tmp_path: Path) -> None:
    script = process(tmp_path, env={"group_size": 2, "min_batch_allocation": 0.5}, openai={"api_key": "secret"})
    command = command_of("words", script, CONTEXT, python="python", folder=tmp_path)
    assert command == [
        "python",
        str(ENVIRONMENT_HOST),
        str(tmp_path / "words.py"),
        "serve",
        "--config",
        str(tmp_path / "words.json"),
    ]
    config = json.loads((tmp_path / "words.json").read_text())
    assert (config["env"]["group_size"], config["env"]["batch_size"], config["env"]["max_token_length"]) == (2, 16, 64)
    assert (config["env"]["min_batch_allocation"], config["env"]["rollout_server_url"]) == (
        0.5,
        "http://127.0.0.1:8001",
    )
    # two, since atroposlib drops the URL of one
    assert [server["base_url"] for server in config["openai"]] == ["http://127.0.0.1:8000/v1"] * 2
    assert config["openai"][0]["api_key"] == "secret"


def test_arguments_of_ones_own_are_filled_in(tmp_path: Path) -> None:
    script = process(
        tmp_path, arguments=("serve", "--openai.base_url", "{server}/v1", "--env.tokenizer_name={tokenizer}")
    )
    command = command_of("words", script, CONTEXT, python="python", folder=tmp_path)
    assert command[3:] == ["serve", "--openai.base_url", "http://127.0.0.1:8000/v1", "--env.tokenizer_name=/model"]


def test_a_script_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"environments.words: .*gone.py is no file"):
        command_of("words", process(tmp_path, script="gone.py"), CONTEXT, python="python", folder=tmp_path)


def test_an_interpreter_without_atroposlib_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"start.python=/no/python has no atroposlib"):
        check_interpreter("/no/python")


def test_port_0_is_a_free_port_of_this_machine() -> None:
    settings = with_free_port(AtroposSettings(url="http://127.0.0.1:0", start=StartSettings(api=True)))
    port = int(settings.url.rpartition(":")[2])
    assert settings.url.startswith("http://127.0.0.1:")
    assert port > 0


def test_an_api_that_is_joined_keeps_its_url() -> None:
    assert with_free_port(AtroposSettings(url="http://far:80/x")).url == "http://far:80/x"


@pytest.mark.parametrize("url", ["http://0.0.0.0:8001", "https://127.0.0.1:8001", "http://127.0.0.1", "http://far:1"])
def test_an_api_is_started_on_this_machine_only(url: str) -> None:
    with pytest.raises(ConfigError, match="which no other machine may reach"):
        with_free_port(AtroposSettings(url=url, start=StartSettings(api=True)))


def test_a_taken_port_is_named_before_anything_is_started() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        url = f"http://127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(ConfigError, match="the port is taken"):
            with_free_port(AtroposSettings(url=url, start=StartSettings(api=True)))
