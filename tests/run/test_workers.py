"""What workers must have in common."""

from dataclasses import replace
from typing import Any

import pytest

from parallm.config.schema import RunConfig
from parallm.run.workers import shared_facts


@pytest.mark.parametrize(
    ("change", "differs"),
    [({"rollouts": "some"}, True), ({"rollout_bytes": 1 << 21}, False), ({"curves": False}, False)],
)
def test_workers_may_write_other_files_but_encode_the_same_completions(change: dict[str, Any], differs: bool) -> None:
    config = RunConfig()
    other = replace(config, metrics=replace(config.metrics, **change))
    assert (shared_facts(config) != shared_facts(other)) is differs
