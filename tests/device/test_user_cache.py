"""Folders that processes share: private to the user, or not used."""

import logging
import stat
from pathlib import Path

import pytest

from parallm.device.user_cache import user_cache


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_a_folder_is_made_for_the_user_alone(home: Path) -> None:
    folder = user_cache("kernels")
    assert folder == home / "parallm" / "kernels"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert user_cache("kernels") == folder


def test_without_the_variable_it_lies_in_the_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_cache("kernels") == tmp_path / ".cache" / "parallm" / "kernels"


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_that_others_may_write_into_is_not_used(
    mode: int, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = home / "parallm" / "kernels"
    folder.mkdir(parents=True)
    folder.chmod(mode)
    with caplog.at_level(logging.WARNING):
        assert user_cache("kernels") is None
        assert user_cache("kernels") is None
    assert len(caplog.records) == 1
    assert "others may write" in caplog.text


def test_where_no_folder_can_be_made_there_is_none(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    (home / "parallm").write_text("a file")
    with caplog.at_level(logging.WARNING):
        assert user_cache("kernels") is None
    assert str(home) in caplog.text
