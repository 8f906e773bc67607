"""The table of several models: short titles, two lines where one is too wide."""

import io
from collections.abc import Callable
from typing import Any

from parallm.metrics.comparison import Compared, comparison_report, print_comparison, short_titles
from parallm.reports import Estimate, EvaluationReport


def test_titles_are_short_and_distinct() -> None:
    run = "/home/someone/checkpoints/gsm8k_grpo/2026-11-22_12-00-00-000000"
    models = [("base", 0), (f"{run}/step_000012", 12), (f"{run}/step_000022", 22), ("my_adapters/poet/adapter", 0)]
    assert short_titles(models) == ["base", "gsm8k_grpo@12", "gsm8k_grpo@22", "poet"]


def test_equal_titles_are_numbered_and_long_ones_cut() -> None:
    assert short_titles([("one/run/step_000001", 1), ("two/run/step_000001", 1)]) == ["run@1 #1", "run@1 #2"]
    assert short_titles([("a" * 40, 123)]) == ["a" * 17 + "...@123"]
    assert short_titles([("2026-11-22_12-00-00", 0), ("3", 0)]) == ["2026-11-22_12-00-00", "3"]


def table_of(*reports: EvaluationReport) -> list[str]:
    models = [
        Compared(
            name="base" if place == 0 else f"runs/poet/step_{place}",
            is_base=place == 0,
            report=report,
            difference=None if place == 0 else Estimate(0.125, -0.025, 0.275),
            seconds=61.0,
        )
        for place, report in enumerate(reports)
    ]
    stream = io.StringIO()
    print_comparison(models, stream)
    return stream.getvalue().splitlines()


def test_two_models_have_their_intervals_beside_the_values(evaluation: Callable[..., EvaluationReport]) -> None:
    lines = table_of(evaluation(0), evaluation(3, version=3))
    assert any("31.0% (27.0% to 35.0%)" in line for line in lines)
    assert any("+12.5 (-2.5 to +27.5)" in line for line in lines)
    assert max(map(len, lines)) <= 80


def test_many_models_have_them_below_and_fit_80_columns(evaluation: Callable[..., EvaluationReport]) -> None:
    lines = table_of(*(evaluation(step, version=step) for step in range(3)))
    assert lines[0] == "poet@1: runs/poet/step_1"
    assert any("27.0% to 35.0%" in line and "(" not in line for line in lines)
    assert max(map(len, lines)) <= 80


def test_the_report_for_programs_has_whole_names(evaluation: Callable[..., EvaluationReport]) -> None:
    model = Compared(name="runs/poet", is_base=False, report=evaluation(1), difference=None, seconds=1.0)
    report: dict[str, Any] = comparison_report([model], {"seed": 7})
    assert (report["seed"], report["models"][0]["name"], report["models"][0]["accuracy"]) == (7, "runs/poet", 0.31)
