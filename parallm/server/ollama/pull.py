"""Models from the Hugging Face hub into its cache, with the progress that Ollama's clients show.

Requests for one model share its download, which ends when the last of them leaves.
"""

import asyncio
import hashlib
import threading
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.errors import HFValidationError, HTTPError  # type: ignore[attr-defined]  # of its HTTP client
from tqdm import tqdm

from parallm.errors import Unavailable
from parallm.server.schemas import Wire

PATTERNS = ("*.json", "model*.safetensors", "tokenizer.model", "*.tiktoken", "*.txt", "*.jinja")
"""Files of a model that are used here; code is not."""
SECONDS_BETWEEN_LINES = 0.1
LIBRARY = {
    "all-minilm": "sentence-transformers/all-MiniLM-L6-v2",
    "bge-m3": "BAAI/bge-m3",
    "llama3.2": "mlx-community/Llama-3.2-3B-Instruct-4bit",
    "llama3.2:1b": "mlx-community/Llama-3.2-1B-Instruct-4bit",
    "llama3.2:3b": "mlx-community/Llama-3.2-3B-Instruct-4bit",
    "qwen2.5": "Qwen/Qwen2.5-7B-Instruct",
    "qwen2.5:0.5b": "Qwen/Qwen2.5-0.5B-Instruct",
    "qwen2.5:1.5b": "Qwen/Qwen2.5-1.5B-Instruct",
    "qwen2.5:3b": "Qwen/Qwen2.5-3B-Instruct",
    "qwen3": "Qwen/Qwen3-8B",
    "qwen3:0.6b": "Qwen/Qwen3-0.6B",
    "qwen3:1.7b": "Qwen/Qwen3-1.7B",
    "qwen3:4b": "Qwen/Qwen3-4B",
    "qwen3:8b": "Qwen/Qwen3-8B",
}
"""Hub ids of a few names of Ollama's library."""


class Progress(Wire):
    """A line of a pull or of the creation of a model."""

    status: str
    digest: str | None = None
    total: int | None = None
    completed: int | None = None


@dataclass(slots=True)
class _File:
    name: str
    digest: str | None
    """SHA-256 of a large file; of others the hub knows none."""
    total: int
    completed: int = 0

    @property
    def progress(self) -> Progress:
        if self.digest is None:
            return Progress(status=f"pulling {self.name}", total=self.total, completed=self.completed)
        return Progress(
            status=f"pulling {self.digest[:12]}",
            digest=f"sha256:{self.digest}",
            total=self.total,
            completed=self.completed,
        )


@dataclass(slots=True)
class _Download:
    """What one thread does and several requests watch."""

    files: list[_File] = field(default_factory=list)
    is_verifying: bool = False
    is_given_up: threading.Event = field(default_factory=threading.Event)
    num_watchers: int = 0
    task: asyncio.Task[None] | None = None


class Pulls:
    """Downloads under way, by hub id. Used on the event loop."""

    def __init__(self, fetch: Callable[[str, _Download], None] | None = None) -> None:
        """`fetch` downloads a model on a thread."""
        self._fetch = fetch or fetch_model
        self._downloads: dict[str, _Download] = {}

    async def watch(self, hub_id: str) -> AsyncGenerator[Progress, None]:
        """Yield the progress of a download, which begins if there is none. Raises Unavailable."""
        download = self._downloads.get(hub_id)
        if download is None:
            download = self._downloads[hub_id] = _Download()
            download.task = asyncio.create_task(asyncio.to_thread(self._fetch, hub_id, download))
            download.task.add_done_callback(lambda task: task.cancelled() or task.exception())  # if nobody is left
        assert download.task is not None
        download.num_watchers += 1
        shown: dict[str, int] = {}
        tells_of_digests = False
        try:
            while True:
                await asyncio.wait((download.task,), timeout=SECONDS_BETWEEN_LINES)
                # before the counts are read, which are final then
                is_done, is_verifying = download.task.done(), download.is_verifying
                for file in list(download.files):
                    if shown.get(file.name) != file.completed:
                        shown[file.name] = file.completed
                        yield file.progress
                if is_verifying and not tells_of_digests:
                    tells_of_digests = True
                    yield Progress(status="verifying sha256 digest")
                if is_done:
                    download.task.result()
                    return
        finally:
            download.num_watchers -= 1
            if not download.num_watchers:
                download.is_given_up.set()
                self._downloads.pop(hub_id, None)


def hub_id_of(name: str) -> str | None:
    """Return the hub id that a name means: one with an owner, or one of Ollama's library."""
    name = name.removeprefix("hf.co/").removeprefix("huggingface.co/").removesuffix(":latest")
    return name if name.count("/") == 1 and ":" not in name else LIBRARY.get(name)


def fetch_model(hub_id: str, download: _Download) -> None:
    """Download a model's files into the cache of the hub. Raises Unavailable with the way out."""
    try:
        paths = []
        for sibling in HfApi().model_info(hub_id, files_metadata=True).siblings or ():
            if any(fnmatch(sibling.rfilename, pattern) for pattern in PATTERNS):
                digest = None if sibling.lfs is None else sibling.lfs.sha256
                file = _File(sibling.rfilename, digest, int(sibling.size or 0))
                download.files.append(file)
                paths.append((file, Path(hf_hub_download(hub_id, file.name, tqdm_class=_bar_of(file, download)))))
                file.completed = file.total
        download.is_verifying = True
        for file, path in paths:
            _verify(hub_id, file, path)
    except _GivenUp:
        return
    except (HFValidationError, HTTPError, OSError) as error:  # the hub's errors are some of these
        raise _not_pulled(hub_id, error) from error


def _verify(hub_id: str, file: _File, path: Path) -> None:
    """Remove a file that has not the digest that the hub says. Raises Unavailable."""
    if file.digest is None:
        return
    with path.open("rb") as content:
        found = hashlib.file_digest(content, "sha256").hexdigest()
    if found != file.digest:
        path.resolve().unlink()
        path.unlink(missing_ok=True)
        raise Unavailable(
            f"digest mismatch: {file.name} of {hub_id} came as sha256:{found} instead of sha256:{file.digest}; it is "
            "removed, so pull again"
        )


class _GivenUp(Exception):
    """Nobody watches the download."""


def _bar_of(file: _File, download: _Download) -> type[tqdm]:
    class Bar(tqdm):
        """Counts for a file instead of drawing."""

        def __init__(self, *words: Any, **options: Any) -> None:
            file.completed = int(options.get("initial") or 0)
            super().__init__(*words, **options | {"disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            if download.is_given_up.is_set():
                raise _GivenUp
            file.completed = min(file.total, file.completed + int(n or 0))
            return super().update(n)

    return Bar


def _not_pulled(hub_id: str, error: Exception) -> Unavailable:
    reason = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
    return Unavailable(
        f"pull model manifest: {hub_id}: {reason}; without network put the model's folder below one of "
        "registry.folders, or set HF_HOME to a cache that has it"
    )
