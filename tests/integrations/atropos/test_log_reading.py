"""What an environment's log tells, and who asks at the ports where atroposlib looks for servers."""

import asyncio
import socket
from pathlib import Path

from parallm.integrations.atropos.knocks import Knocks
from parallm.integrations.atropos.log_reading import EnvironmentLog

REGISTERED = "2026-01-01 INFO atroposlib.envs.base: Initialized env with id 3: curr_step: 0, checkpoint_dir: x\n"


def test_the_id_of_an_environment_stands_in_its_log(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = EnvironmentLog(path)
    log.read()
    assert log.env_id is None
    path.write_text(REGISTERED)
    log.read()
    assert log.env_id == 3


def test_lines_are_counted_once_and_only_when_they_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = EnvironmentLog(path)
    path.write_text("WARNING Scores are the same in a group, skipping...\nWARNING Scores are the sa")
    log.read()
    log.read()
    assert log.counts == {"equal_scores": 1}
    with path.open("a") as file:
        file.write("me in a group, skipping...\n")
    log.read()
    assert log.counts == {"equal_scores": 2}


def test_what_an_earlier_run_has_written_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(REGISTERED)
    log = EnvironmentLog(path)
    log.read()
    assert log.env_id is None


def test_who_asks_for_completions_at_a_default_port_is_heard() -> None:
    assert asyncio.run(knock(b"POST /v1/chat/completions HTTP/1.1\r\n")) == 1


def test_who_asks_for_something_else_is_not() -> None:
    assert asyncio.run(knock(b"GET /favicon.ico HTTP/1.1\r\n")) == 0


async def knock(line: bytes) -> int:
    """How many ports have heard something."""
    port = free_port()
    knocks = Knocks((port,))
    await knocks.open()
    assert knocks.taken == ()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(line)
    await reader.read()
    writer.close()
    heard = len(knocks.heard)
    await knocks.close()
    return heard


def test_a_port_of_another_program_is_told() -> None:
    async def taken(port: int) -> tuple[int, ...]:
        knocks = Knocks((port,))
        await knocks.open()
        found = knocks.taken
        await knocks.close()
        return found

    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert asyncio.run(taken(port)) == (port,)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
