"""An engine stands thousands of ragged requests: none is lost, memory and traces do not grow, faults end little.

The embedded model, in memory that makes rows give up theirs all the time; see `soak.py`. Memory is that of
live arrays after the caches were emptied, from when as many versions are kept as are ever kept. A shorter soak with
compiled steps counts how often one is traced; the bound is the number of buckets of rows, positions and kinds of
adapters that the longest context allows. On a CPU that needs g++.
"""

import shutil
from collections.abc import Callable, Sequence
from statistics import mean
from typing import Any

import pytest
from bench.measurement import request_of_tests
from bench.processes import work

JOB: dict[str, Any] = {"rows": 64, "kv_cache_bytes": 6_000_000}
WARM_UP = 2
"""Readings of memory, of five versions each: the table of versions keeps eight."""


@pytest.mark.robustness
def test_ten_thousand_ragged_requests_leave_nothing_behind(record_property: Callable[[str, object], None]) -> None:
    request = request_of_tests()
    found = work("tests.robustness.soak", requests=request.size(10_000, 500), rounds=request.size(50, 10), **JOB)
    sizes, ends, slowest = found["active"][WARM_UP:] or found["active"], found["ends"], max(found["next_seconds"])
    record_property("engine.soak.requests", sum(ends.values()))
    record_property("engine.soak.lost", ends.get("lost", 0))
    record_property("engine.soak.memory_drift", drift(sizes))
    record_property("engine.soak.leaked_kv_bytes", found["held"])
    record_property("engine.soak.next_request_seconds", slowest)
    for name in ("preemptions", "prefix_hits", "failed_in_step", "failed_besides"):
        record_property(f"engine.soak.{name}", found[name])
    assert (ends.get("lost", 0), found["held"], found["failed_besides"]) == (0, 0, 0)
    assert found["failed_in_step"] > 0


@pytest.mark.robustness
@pytest.mark.skipif(shutil.which("g++") is None, reason="compiled steps on a CPU need g++")
def test_compiled_steps_are_traced_once_a_shape(record_property: Callable[[str, object], None]) -> None:
    found = work("tests.robustness.soak", requests=request_of_tests().size(1000, 50), rounds=10, compiles=True, **JOB)
    record_property("engine.soak.traces_over_buckets", found["traces"] / found["buckets"])
    assert found["traces"] <= found["buckets"]


def drift(sizes: Sequence[int]) -> float:
    """The difference of the last third of the readings from the first, on average."""
    count = max(1, len(sizes) // 3)
    return abs(mean(sizes[-count:]) / mean(sizes[:count]) - 1)
