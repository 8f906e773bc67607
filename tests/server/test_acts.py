"""What clients do to training and to what is served: noted with who and values, refused acts, too."""

import asyncio
import hashlib
import logging
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from parallm.server.operation.acts import ACTS, Act
from parallm.server.operation.auth import ROLES, read_keys
from parallm.server.settings import ApiKey, ServerSettings
from tests.server.conftest import make_app
from tests.server.test_adapters import FakeAdapters
from tests.server.test_training import FakeTraining

KEYS = {role: f"{role}-0123456789abcdef" for role in ("inference", "training", "admin")}
API_KEYS = tuple(
    ApiKey(name=role, role=role, sha256=hashlib.sha256(key.encode()).hexdigest())  # type: ignore[arg-type]
    for role, key in KEYS.items()
)
NO_ACTS = (
    *("/v1/replica/", "/v1/fine_tuning/", "/api/", "/v1/models/", "/v1/rl/policies/", "/v1/warmup"),
    *("/init_", "/start_weight_update", "/finish_weight_update", "/update_named_param/", "/update_weights"),
    "/load_lora_adapter_from_tensors",
)
"""Beginnings of paths that trainers elsewhere, jobs and the catalogue have, which keep records of their own, and of
what changes nothing."""


def act_on(app: FastAPI, *requests: tuple[str, str, Any], role: str | None = None) -> list[httpx.Response]:
    headers = {} if role is None else {"Authorization": f"Bearer {KEYS.get(role, role)}"}

    async def main() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as client:
            return [await client.request(method, path, json=body) for method, path, body in requests]

    return asyncio.run(main())


@pytest.fixture
def acts() -> list[Act]:
    return []


@pytest.fixture
def make(engine: Any, tokenizer: Any, acts: list[Act]) -> Callable[..., FastAPI]:
    def app(**settings: Any) -> FastAPI:
        chosen = ServerSettings(**settings)
        return make_app(
            engine,
            tokenizer,
            settings=chosen,
            keys=read_keys(chosen),
            training=FakeTraining(),
            adapters=FakeAdapters(),
            on_act=acts.append,
        )

    return app


def test_every_route_that_changes_something_for_others_is_an_act_or_has_a_reason() -> None:
    acting = {row for row, role in ROLES.items() if role in ("training", "admin") and not row.startswith("GET ")}
    missing = [row for row in sorted(acting - ACTS.keys()) if not row.partition(" ")[2].startswith(NO_ACTS)]
    assert missing == []
    assert ACTS.keys() <= ROLES.keys()


def test_an_act_has_its_kind_and_its_values(
    make: Callable[..., FastAPI], acts: list[Act], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "parallm.server.operation.acts")
    answers = act_on(
        make(),
        ("POST", "/v1/training/pause", {"policy": "policy"}),
        ("POST", "/v1/training/update", {"trajectories": [{"prompt": "a", "completion": "b", "reward": 1}]}),
        ("POST", "/v1/training/stop", None),
        ("POST", "/v1/adapters/promote", {"name": "poet", "version": 3}),
        ("POST", "/v1/adapters/rollback", {"name": "poet"}),
        ("DELETE", "/v1/adapters/poet@3", None),
        ("POST", "/v1/load_lora_adapter", {"lora_name": "poet", "lora_path": "p"}),
        ("GET", "/v1/adapters", None),
        ("POST", "/v1/completions", {"model": "policy", "prompt": "2"}),
    )
    assert [answer.status_code for answer in answers] == [200] * 9
    assert [(act.kind, act.what, dict(act.values)) for act in acts] == [
        ("paused", "policy", {"policy": "policy"}),
        ("stepped", "", {"trajectories": 1}),
        ("stopped", "", {}),
        ("promoted", "poet@3", {"name": "poet", "version": 3}),
        ("rolled_back", "poet@4", {"name": "poet", "version": 4}),
        ("unloaded", "poet@3", {"model": "poet@3"}),
        ("loaded", "poet", {"name": "poet", "path": "p"}),
    ]
    assert all((act.by, act.refused) == ("", None) for act in acts)
    assert "promoted poet@3" in caplog.messages
    assert "asked for a step (trajectories 1)" in caplog.messages


def test_refused_acts_are_noted_with_who_and_why(make: Callable[..., FastAPI], acts: list[Act]) -> None:
    app = make(api_keys=API_KEYS)
    act_on(app, ("POST", "/v1/adapters/rollback", {"name": "policy"}), role="admin")
    act_on(app, ("POST", "/v1/adapters/promote", {"name": "policy", "version": 3}), role="training")
    act_on(app, ("POST", "/v1/training/stop", {"now": True}), role="inference")
    assert [(act.kind, act.by) for act in acts] == [
        ("rolled_back", "admin"),
        ("promoted", "training"),
        ("stopped", "inference"),
    ]
    assert acts[0].refused == "no"
    assert acts[1].text == (
        "refused: promoted, by training: this route needs a key with the role admin; yours has the role training"
    )
    assert "role training" in (acts[2].refused or "")


def test_strangers_and_repeated_refusals_fill_no_file(make: Callable[..., FastAPI], acts: list[Act]) -> None:
    app = make(api_keys=API_KEYS)
    act_on(app, ("POST", "/v1/training/stop", None))
    act_on(app, ("POST", "/v1/training/stop", None), role="wrong-0123456789abcdef")
    assert acts == []
    act_on(app, *[("POST", "/v1/training/stop", None)] * 20, role="inference")
    assert len(acts) == 1
    act_on(app, ("POST", "/v1/training/stop", None), role="training")
    assert (len(acts), acts[-1].refused) == (2, None)


def test_long_values_are_cut(make: Callable[..., FastAPI], acts: list[Act]) -> None:
    act_on(make(), ("POST", "/v1/adapters/load", {"name": "poet", "path": "p" * 4000}))
    act_on(make(), ("PUT", "/v1/splits/ab", {"weights": {f"policy@{number}": 1 for number in range(500)}}))
    assert len(str(acts[0].values["path"])) == 200
    assert len(acts[1].values["weights"]) == 16
