"""What clients get by a policy's bare name while its trainer, evaluations and operators each have a say."""

import mlx.core as mx
import pytest

from parallm.model.adapters.adapter import Adapter, make_adapter
from parallm.model.adapters.table import AdapterTable
from parallm.reports import Estimate, EvaluationReport
from parallm.trainer.publication import Publication
from parallm.trainer.settings import TrainerSettings


def adapter(version: int, parent: int | None = None) -> Adapter:
    arrays = {"q.lora_a": mx.full((2, 1), float(version)), "q.lora_b": mx.ones((1, 2))}
    return make_adapter(arrays, version=version, parent=parent, rank=1, alpha=1.0)


def evaluation(version: int, accuracy: float) -> EvaluationReport:
    nothing = Estimate(0.0, 0.0, 0.0)
    return EvaluationReport(
        step=version, version=version, num_problems=4, accuracy=accuracy, low=0, high=1, reward=nothing, reward_parts={}
    )


def served(table: AdapterTable) -> int:
    found = table.resolve("policy")
    return 0 if found is None else found.version


@pytest.fixture
def table() -> AdapterTable:
    return AdapterTable()


def test_a_version_that_an_operator_promotes_stays_until_the_newest_is_promoted(
    table: AdapterTable, caplog: pytest.LogCaptureFixture
) -> None:
    publication = Publication(table, "policy", TrainerSettings())
    for version in (1, 2, 3):
        publication.publish(adapter(version))
    table.promote(2)
    for version in (4, 5):
        publication.publish(adapter(version))
        assert served(table) == 2
    publication.roll_back(adapter(6, parent=4))
    assert (served(table), publication.counters()["served"]) == (2, 3)
    assert caplog.messages == [
        "clients get version 2 of policy, as was asked for; newer ones wait until the newest is promoted"
    ]
    table.promote(6)
    publication.publish(adapter(7))
    assert (served(table), publication.counters()["served"]) == (7, 7)


def test_an_operator_may_go_back_to_the_base(table: AdapterTable) -> None:
    publication = Publication(table, "policy", TrainerSettings())
    publication.publish(adapter(1))
    assert table.roll_back() == 0
    publication.publish(adapter(2))
    assert served(table) == 0


def test_an_evaluation_does_not_replace_what_an_operator_has_promoted(table: AdapterTable) -> None:
    publication = Publication(table, "policy", TrainerSettings(publish_if="evaluation"))
    for version in (1, 2):
        publication.publish(adapter(version))
        publication.evaluated(evaluation(version, 0.5))
    assert served(table) == 2
    publication.publish(adapter(3))
    table.promote(1)
    publication.evaluated(evaluation(3, 0.9))
    assert served(table) == 1
    table.promote(3)
    publication.publish(adapter(4))
    publication.evaluated(evaluation(4, 0.9))
    assert served(table) == 4


def test_without_an_operator_each_version_is_served_at_once(
    table: AdapterTable, caplog: pytest.LogCaptureFixture
) -> None:
    publication = Publication(table, "policy", TrainerSettings())
    for version in (1, 2, 3):
        publication.publish(adapter(version))
        assert served(table) == version
    publication.roll_back(adapter(4, parent=2))
    assert served(table) == 4
    assert caplog.messages == []
