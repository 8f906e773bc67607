from typing import Any

import pytest
from fastapi.testclient import TestClient

from parallm.errors import EngineFull
from parallm.reports import TrainingStatus
from parallm.server.app import create_app
from parallm.server.body_budget import BODIES, SMALL, BodyBudget
from parallm.server.settings import ServerSettings


def test_large_bodies_have_a_limit_together_and_small_ones_none() -> None:
    budget = BodyBudget(100_000)
    with budget.reading() as first, budget.reading() as second, budget.reading() as small:
        first(BODIES * 100_000 - 90_000)
        second(70_000)
        second(90_000)
        with pytest.raises(EngineFull, match=r"bodies of 6400000 bytes are being read, the limit is 6400000; send"):
            second(90_001)
        small(SMALL)
        assert budget.num_bytes == BODIES * 100_000
    assert budget.num_bytes == 0


@pytest.mark.parametrize(("length", "status"), [(SMALL // 2, 400), (SMALL + 1, 429)])
def test_a_body_counts_while_it_comes_in(
    engine: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, length: int, status: int
) -> None:
    monkeypatch.setattr("parallm.server.body_budget.BODIES", 0)
    app = create_app(
        engine=engine,
        tokenizer=tokenizer,
        catalog=tuple,
        status=lambda: TrainingStatus(state="serving"),
        settings=ServerSettings(),
        base_name="nano",
    )
    client = TestClient(app, base_url="http://localhost")
    answer = client.post("/v1/completions", json={"model": "base", "prompt": "a" * length})
    assert answer.status_code == status, answer.text
