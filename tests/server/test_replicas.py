"""The routes of rollout engines: who may call them, and the stream of completions."""

import json
from collections.abc import Mapping
from typing import Any

import httpx
import pytest

from parallm.errors import Unavailable
from parallm.server.control import routes_replicas
from parallm.server.control.replica_schemas import JoinAnswer, JoinBody, ReceivedVersion
from tests.server.conftest import CharacterTokenizer, EchoEngine, make_app, send_to

BODY: dict[str, Any] = {
    "session": "s",
    "request_id": "step-1-0",
    "prompt": [104, 105],
    "n": 2,
    "model": "policy@3",
    "max_tokens": 8,
    "temperature": 1.0,
    "seed": 2**64 - 1,
    "stop": [],
    "is_continued": False,
    "switches_in_flight": False,
}


class Host:
    """Knows the session `s`."""

    def __init__(self) -> None:
        self.received: list[tuple[int, bytes]] = []

    async def join(self, trainer: JoinBody, *, is_paused: bool) -> JoinAnswer:
        return JoinAnswer(api=1, process="p", dtype="float32", max_rows=0 if is_paused else 8, versions={})

    async def receive(self, session: str, version: int, content: bytes) -> ReceivedVersion:
        self.received.append((version, content))
        return ReceivedVersion(name="policy", version=version, digest="d")

    def digests(self, session: str) -> Mapping[int, str]:
        if session != "s":
            raise Unavailable("join again")
        return {3: "d3"}

    def leave(self, session: str) -> None: ...


def call(engine: EchoEngine, method: str, path: str, host: Host | None = None, **options: Any) -> httpx.Response:
    app = make_app(engine, CharacterTokenizer(), replica=host or Host())
    return send_to(app, method, path, **options)


def events(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line for line in response.text.split("\n\n") if line.startswith("data: ")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_completions_come_with_the_digest_of_their_version(engine: EchoEngine) -> None:
    response = call(engine, "POST", "/v1/replica/generate", json=BODY)
    first, second = events(response)
    assert [first["index"], second["index"]] == [0, 1]
    assert first["weight_versions"] == [{"version": 3, "digest": "d3", "start": 0, "end": len(first["tokens"])}]
    (request,) = engine.requests
    assert (request.traffic, request.sampling.seed, request.prompt_tokens) == ("rollout", 2**64 - 1, (104, 105))
    assert request.request_id == "s-step-1-0"


def test_a_silent_stream_shows_that_the_server_lives(engine: EchoEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes_replicas, "ALIVE_SECONDS", 0.0)
    response = call(engine, "POST", "/v1/replica/generate", json=BODY)
    assert ": alive" in response.text
    assert len(events(response)) == 2


def test_what_the_engine_refuses_is_the_last_event(engine: EchoEngine) -> None:
    response = call(engine, "POST", "/v1/replica/generate", json=BODY | {"max_tokens": 500})
    (event,) = events(response)
    assert event["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("body", "status"), [(BODY | {"session": "other"}, 409), (BODY | {"top_p": 0.5}, 400), (BODY | {"prompt": []}, 400)]
)
def test_other_sessions_and_other_sampling_are_refused(engine: EchoEngine, body: dict[str, Any], status: int) -> None:
    assert call(engine, "POST", "/v1/replica/generate", json=body).status_code == status


def test_a_version_comes_under_its_number(engine: EchoEngine) -> None:
    host = Host()
    response = call(engine, "PUT", "/v1/replica/versions/7?session=s", host, content=b"weights")
    assert (response.json(), host.received) == ({"name": "policy", "version": 7, "digest": "d"}, [(7, b"weights")])


def test_a_process_that_trains_samples_for_no_other(engine: EchoEngine) -> None:
    response = send_to(make_app(engine, CharacterTokenizer()), "POST", "/v1/replica/leave", json={"session": "s"})
    assert response.status_code == 409
    assert "`python -m parallm.serve` samples for a trainer" in response.text
