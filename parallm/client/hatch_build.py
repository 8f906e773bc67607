"""Builds the wheel parallm-client: the client and the types that it shares with the server, as one package."""

import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = "parallm_client"
SHARED = ("conversation", "reports", "types")
"""Modules of `parallm` that the client imports."""


class ClientBuild(BuildHookInterface):  # type: ignore[type-arg]  # its parameter is private to hatchling
    """Gathers the modules under the name parallm_client, so that the wheel can be installed beside parallm."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        self._gathered = TemporaryDirectory(prefix="parallm-client-")
        client, gathered = Path(self.root), Path(self._gathered.name)
        sources = [path for path in client.glob("*.py") if path.name != Path(__file__).name]
        for source in (*sources, *(client.parent / f"{name}.py" for name in SHARED)):
            (gathered / source.name).write_text(renamed(source.read_text()))
        (gathered / "py.typed").touch()
        build_data["force_include"][str(gathered)] = PACKAGE
        build_data["force_include"][str(client.parent.parent / "LICENSE")] = f"{PACKAGE}/LICENSE"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        self._gathered.cleanup()


def renamed(text: str) -> str:
    """Return the text of a module with its imports from the new package."""
    text = re.sub(r"\bparallm\.client\b", PACKAGE, text)
    return re.sub(rf"\bparallm\.({'|'.join(SHARED)})\b", rf"{PACKAGE}.\1", text)
