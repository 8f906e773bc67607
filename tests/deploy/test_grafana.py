"""The dashboard of conf/deploy/grafana.json asks for what `/metrics` has, and for nothing else."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from parallm.config.schema import shipped
from parallm.metrics.step import StepMetrics
from parallm.reports import OffPolicyReport, TrainingStatus, UpdateReport
from tests.server.conftest import CharacterTokenizer, EchoEngine, card, make_app, send_to
from tests.server.test_shares import FakeDevice

NAME = re.compile(r"\b(?:vllm|parallm|http|process|checkpoint)[a-z_]*(?::[a-z_0-9]+)?_?[a-z_]*(?=[{),\[ ])")
HISTOGRAM = re.compile(r"_(bucket|sum|count)$")
UPDATE = UpdateReport(
    step=1,
    version=1,
    loss=0.0,
    gradient_norm=1.0,
    learning_rate=1.0,
    kl_to_behaviour=0.0,
    entropy=1.0,
    num_tokens=1,
    seconds=1.0,
)
STEP = StepMetrics(
    step=1,
    reward_mean=0.5,
    reward_std=0.5,
    groups_sampled=1,
    groups_with_signal=1,
    completion_length_mean=1.0,
    truncated_fraction=0.0,
    rollout_tokens=1,
    rollout_seconds=1.0,
    update_seconds=1.0,
    total_seconds=1.0,
    rollout_tokens_per_second=1.0,
    serving_tokens_per_second=1.0,
    off_policy=OffPolicyReport(lag_mean=0.0, lag_max=0, dropped=0),
    guard={"guard/rollbacks": 0, "guard/skipped": 0},
    update=UPDATE,
)


@pytest.fixture(scope="module")
def board() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((shipped("conf") / "deploy" / "grafana.json").read_text())
    return found


@pytest.fixture(scope="module")
def exposed() -> str:
    """`/metrics` of a server that trains."""
    status = TrainingStatus(state="updating", step=1, total_steps=9, metrics=STEP.to_flat())
    app = make_app(
        EchoEngine(), CharacterTokenizer(), device=FakeDevice(), status=lambda: status, catalog=lambda: (card(3),)
    )
    assert send_to(app, "POST", "/v1/completions", json={"model": "policy", "prompt": "hello"}).status_code == 200
    return send_to(app, "GET", "/metrics").text


def expressions(board: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]


def names_in(exposed: str) -> set[str]:
    return {line.split()[2] for line in exposed.splitlines() if line.startswith("# TYPE")}


def missing(expression: str, exposed: str) -> list[str]:
    """Return the series of an expression that `/metrics` does not have."""
    names = {HISTOGRAM.sub("", name) for name in NAME.findall(expression)}
    assert names, expression
    metrics = {name for group in re.findall(r'metric=~?"([^"]+)"', expression) for name in group.split("|")}
    return sorted(names - names_in(exposed)) + [name for name in sorted(metrics) if f'metric="{name}"' not in exposed]


def test_each_panel_asks_for_series_that_exist(board: dict[str, Any], exposed: str) -> None:
    found = list(expressions(board))
    assert len(found) > 20
    assert [(title, missing(text, exposed)) for title, text in found if missing(text, exposed)] == []


@pytest.mark.parametrize(
    "text",
    ['rate(vllm:no_such_total{job="a"}[1m])', 'parallm:training_metric{metric="reward/median"}', "process_nothing{}"],
)
def test_a_series_that_does_not_exist_is_found(exposed: str, text: str) -> None:
    assert missing(text, exposed)


def test_panels_have_ids_of_their_own_and_do_not_overlap(board: dict[str, Any]) -> None:
    places = [panel["gridPos"] for panel in board["panels"]]
    assert len({panel["id"] for panel in board["panels"]}) == len(places)
    cells = [
        (x, y)
        for one in places
        for x in range(one["x"], one["x"] + one["w"])
        for y in range(one["y"], one["y"] + one["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
