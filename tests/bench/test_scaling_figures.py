"""Figures of several workers: each is measured by its own name."""

import pytest
from bench.measure import workers
from bench.measurement import Figures, Request

WEAK = ["weak_2", "straggler_estimate_2", "weak_predicted_2", "exchange_fraction"]
NAMES = [*WEAK, "ahead_2", "strong_2", "8b.weak_2", "8b.exchange_fraction"]


def rows_of(job: workers.Job) -> list[dict[str, float]]:
    """Steps of a second."""
    row = {"seconds/rollout": 0.5, "seconds/update": 0.4, "update/device_seconds": 0.4, "rollout/tokens": 100.0}
    row |= {workers.WHOLE: 1.0, "exchange/sum_seconds": 0.01}
    return [row | {"time": float(place)} for place in range(job.steps)]


def measured(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Figures, list[workers.Job]]:
    """The figures that come when this one is asked for, and the jobs that ran."""
    jobs: list[workers.Job] = []

    def run(job: workers.Job, **_: object) -> list[dict[str, float]]:
        jobs.append(job)
        return rows_of(job)

    monkeypatch.setattr(workers, "run", run)
    monkeypatch.setattr(workers, "num_gpus", lambda: 2)
    monkeypatch.setattr(workers, "devices", lambda: ["0", "1"])
    found: Figures = {}
    for figures in workers.scaling(Request(wanted=(name,))):
        found |= figures
    return found, jobs


@pytest.mark.parametrize("name", NAMES)
def test_a_figure_that_is_asked_for_alone_comes_from_its_job_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, jobs = measured(f"workers.{name}", monkeypatch)
    assert found[f"workers.{name}"] is not None
    assert len({(job.shape, job.rows, job.ahead) for job in jobs}) == 1


def test_what_nobody_asks_for_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured("workers.weak_4", monkeypatch) == ({}, [])
