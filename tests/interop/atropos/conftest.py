"""The stage of a test with Atropos."""

from pathlib import Path

import pytest

from tests.interop.atropos.stage import Stage, make_stage


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return make_stage(tmp_path)
