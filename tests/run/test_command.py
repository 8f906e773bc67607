"""What a command does before it runs."""

import gc

import pytest

from parallm.run.command import collections_paused


@pytest.mark.parametrize("was_enabled", [True, False])
def test_collections_go_on_after_imports_as_before(was_enabled: bool) -> None:
    frozen = gc.get_freeze_count()
    if not was_enabled:
        gc.disable()
    try:
        with collections_paused():
            assert not gc.isenabled()
            made: list[list[int]] = [[] for _ in range(1000)]
        assert gc.isenabled() == was_enabled
        assert gc.get_freeze_count() >= frozen + len(made)
    finally:
        gc.enable()
