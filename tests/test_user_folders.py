"""Where a user's socket, log, catalogue and configuration lie, on Linux and on a Mac."""

from pathlib import Path

import pytest

from parallm import user_folders
from parallm.user_folders import config_file, data_folder, default_socket, state_folder

HOME = {"HOME": "/home/ann"}


def test_linux_has_the_folders_of_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_folders, "IS_MAC", False)
    assert default_socket(HOME) == Path("/home/ann/.local/state/parallm/run/parallm.sock")
    assert default_socket(HOME | {"XDG_RUNTIME_DIR": "/run/user/5"}) == Path("/run/user/5/parallm/parallm.sock")
    assert data_folder(HOME) == Path("/home/ann/.local/share/parallm")
    assert data_folder(HOME | {"XDG_DATA_HOME": "/data"}) == Path("/data/parallm")
    assert state_folder(HOME | {"XDG_STATE_HOME": "/state"}) == Path("/state/parallm")
    assert config_file(HOME) == Path("/home/ann/.config/parallm/config.yaml")


def test_a_mac_has_those_of_its_library_whatever_xdg_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_folders, "IS_MAC", True)
    home = HOME | {f"XDG_{kind}_HOME": "/x" for kind in ("DATA", "STATE", "CONFIG")} | {"XDG_RUNTIME_DIR": "/x"}
    support = Path("/home/ann/Library/Application Support/ParaLLM")
    assert (default_socket(home), data_folder(home)) == (support / "run/parallm.sock", support)
    assert (config_file(home), state_folder(home)) == (support / "config.yaml", Path("/home/ann/Library/Logs/ParaLLM"))
    assert len(str(default_socket({"HOME": "/Users/somebody-with-a-long-name"}))) < 104  # the most that macOS takes
