"""The files of the page: read and compressed once, then answered from memory, so that no request reaches the disk.

Scripts and styles travel without their comments and indentation (rjsmin, rcssmin). `index.html` names the other files
below a digest of all of them; their answers never change and browsers keep them.
plotly's script comes from the installed package `plotly`, which is not imported.
"""

import gzip
import hashlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path, PurePosixPath

from rcssmin import cssmin
from rjsmin import jsmin

PREFIX = "/dashboard"
INDEX = "index.html"
PLOTLY = "plotly.min.js"
DIGEST = b"{digest}"
"""Text in `index.html` that stands for the digest."""
MEDIA_TYPES: Mapping[str, str] = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".json": "application/json",
}
"""Media types of the files that the page may have; other files of its folder are not served."""
LEVEL = 9
PLOTLY_LEVEL = 6  # a third of the time of level 9 for 1% more bytes

HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": "; ".join(
        (
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "img-src 'self' data:",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
}
"""Headers of every answer below `PREFIX`, errors included."""


@dataclass(frozen=True, slots=True)
class Asset:
    content: bytes
    compressed: bytes
    """`content` by gzip."""
    media_type: str


class Assets:
    """The page below `folder`. `content_of` may be called from any thread."""

    def __init__(self, folder: Path) -> None:
        files = {name: path.read_bytes() for name, path in _files(folder)}
        self._plotly = plotly_script()
        self.digest = _digest({**files, PLOTLY: _plotly_version().encode()})
        self._assets = {
            name: _asset(name, content.replace(DIGEST, self.digest.encode()) if name == INDEX else lean(name, content))
            for name, content in files.items()
        }

    @property
    def names(self) -> list[str]:
        """Names of the page's own files, as they stand below the digest."""
        return sorted(self._assets)

    @property
    def num_bytes(self) -> int:
        """Size of the page's own files as they travel, before compression."""
        return sum(len(asset.content) for asset in self._assets.values())

    def is_large(self, name: str) -> bool:
        """Whether the first call of `find` takes long."""
        return name == PLOTLY and self._plotly is not None

    def find(self, name: str) -> Asset | None:
        """Return the file, or None if the page has none of this name."""
        if name == PLOTLY and self._plotly is not None:
            return _plotly_asset(self._plotly)
        return self._assets.get(name)


def lean(name: str, content: bytes) -> bytes:
    """Return a script or a style without comments and spaces that mean nothing."""
    if name.endswith(".js"):
        return str(jsmin(content.decode())).encode()
    if name.endswith(".css"):
        return str(cssmin(content.decode())).encode()
    return content


def plotly_script() -> Path | None:
    """Return the script of the installed plotly; None without it."""
    found = importlib.util.find_spec("plotly")
    if found is None or not found.submodule_search_locations:
        return None
    path = Path(found.submodule_search_locations[0]) / "package_data" / PLOTLY
    return path if path.is_file() else None


@cache
def _plotly_asset(path: Path) -> Asset:
    return _asset(PLOTLY, path.read_bytes(), PLOTLY_LEVEL)


def _plotly_version() -> str:
    try:
        return metadata.version("plotly")
    except metadata.PackageNotFoundError:
        return ""


def _files(folder: Path) -> list[tuple[str, Path]]:
    paths = [path for path in folder.rglob("*") if path.suffix in MEDIA_TYPES and path.is_file()]
    return sorted((path.relative_to(folder).as_posix(), path) for path in paths)


def _digest(contents: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name, content in sorted(contents.items()):
        digest.update(f"{name}:{len(content)}:".encode() + content)
    return digest.hexdigest()[:16]


def _asset(name: str, content: bytes, level: int = LEVEL) -> Asset:
    compressed = gzip.compress(content, level, mtime=0)
    return Asset(content, compressed, MEDIA_TYPES[PurePosixPath(name).suffix])
