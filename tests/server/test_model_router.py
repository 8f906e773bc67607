"""The router of models: which paths lease a model, and what overlays make of bodies."""

from collections.abc import Mapping
from typing import Any

import pytest

from parallm.registry.records import Overlay
from parallm.server.model_overlays import overlaid
from parallm.server.model_router import LEASING
from parallm.server.operation.auth import ROLES

OF_THIS_PROCESS = frozenset(
    (
        *("/embed", "/predict", "/similarity", "/generate", "/generate/", "//generate"),  # they name no model
        *("/v1/requests/{request_id}/cancel", "/v1/rewards", "/v1/rewards/score"),
        *("/v1/trajectories/{trajectory_id}/reward", "/v1/rl/act", "/v1/rl/rollout", "/v1/predict"),
        *("/v2/models/{name}/infer", "/v2/models/{name}/versions/{version}/infer"),
        *("/v1/files", "/v1/batches", "/v1/batches/{batch_id}/cancel"),
        *("/v1/fine_tuning/jobs", "/v1/fine_tuning/jobs/{job_id}/cancel"),
        *("/v1/fine_tuning/jobs/{job_id}/pause", "/v1/fine_tuning/jobs/{job_id}/resume"),
        "/api/show",
    )
)
SYSTEM, QUESTION = {"role": "system", "content": "Rhyme."}, {"role": "user", "content": "2 + 3?"}
PLAIN = {"role": "developer", "content": "Be plain."}
POET = Overlay(
    system="Rhyme.",
    parameters={"temperature": 0, "num_predict": 5, "num_ctx": 64},
    messages=({"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}),
)


def test_every_route_that_asks_a_model_to_work_leases_it_or_is_known_not_to() -> None:
    posts = {row.removeprefix("POST ") for row, role in ROLES.items() if role == "inference" and row.startswith("POST")}
    assert posts - LEASING - OF_THIS_PROCESS == set()
    assert posts >= LEASING


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        (
            "/v1/chat/completions",
            {"messages": [QUESTION]},
            {"messages": [SYSTEM, *POET.messages, QUESTION], "temperature": 0, "max_tokens": 5},
        ),
        (
            "/v1/chat/completions",
            {
                "messages": [{"role": "developer", "content": "x"}, QUESTION],
                "temperature": 1,
                "max_completion_tokens": 9,
            },
            {
                "messages": [{"role": "developer", "content": "x"}, *POET.messages, QUESTION],
                "temperature": 1,
                "max_completion_tokens": 9,
            },
        ),
        ("/v1/completions", {"prompt": "a"}, {"prompt": "a", "temperature": 0, "max_tokens": 5}),
        (
            "/v1/responses",
            {"input": "2 + 3?"},
            {
                "input": [*POET.messages, QUESTION],
                "instructions": "Rhyme.",
                "temperature": 0,
                "max_output_tokens": 5,
            },
        ),
        (
            "/api/chat",
            {"messages": [QUESTION], "options": {"temperature": 1}},
            {
                "messages": [SYSTEM, *POET.messages, QUESTION],
                "options": {"temperature": 1, "num_predict": 5, "num_ctx": 64},
            },
        ),
        ("/api/chat", {"messages": []}, {"messages": [], "options": dict(POET.parameters)}),
        ("/api/generate", {"prompt": "a"}, {"prompt": "a", "system": "Rhyme.", "options": dict(POET.parameters)}),
        ("/api/generate", {"prompt": "a", "raw": True}, {"prompt": "a", "raw": True, "options": dict(POET.parameters)}),
        ("/tokenize", {"prompt": "a"}, {"prompt": "a"}),
    ],
)
def test_an_overlay_adds_what_a_body_does_not_say(
    path: str, body: Mapping[str, Any], expected: Mapping[str, Any]
) -> None:
    assert overlaid(path, body, POET) == expected
