"""Errors where the package, or an environment of it, is not there."""

import importlib.metadata
from pathlib import Path

import pytest

from parallm.environment.settings import VerifiersSettings
from parallm.errors import ConfigError
from parallm.integrations.verifiers.environment import environment_module
from parallm.run.training_data import build_environment


def installed(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)


def test_without_the_package_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(ConfigError, match=r"pip install 'parallm\[verifiers\]'"):
        build_environment(VerifiersSettings(id="reverse-text"))


def test_an_environment_that_is_not_installed_is_named_with_ways_to_get_it() -> None:
    with pytest.raises(ConfigError, match="no module no_such_thing is installed; install the environment's package"):
        environment_module("somebody/no-such-thing@1.0")


def test_an_environment_that_cannot_be_imported_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needs_more.py").write_text("import no_such_package")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="'needs-more' cannot be imported: No module named 'no_such_package'"):
        environment_module("needs-more")


@pytest.mark.parametrize(
    ("version", "text", "way_out"),
    [
        ("0.4.0", "def load_environment(): ...", r"pip install 'verifiers>=0.3.1,<0.4'"),
        ("0.3.1", "", r"need verifiers 0.4, and 0.3.1 is installed"),
    ],
)
def test_an_environment_of_the_other_kind_says_which_version_it_needs(
    version: str, text: str, way_out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"kind_of_{version.replace('.', '_')}"
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    installed(monkeypatch, version)
    with pytest.raises(ConfigError, match=way_out):
        build_environment(VerifiersSettings(id=name))
