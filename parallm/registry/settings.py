"""Settings of several models in one process."""

from pydantic import Field

from parallm.settings import settings


@settings
class RegistrySettings:
    enabled: bool = False
    """Serve the models of a catalogue beside `model`; requests load them by name, and they leave memory again."""
    folder: str | None = None
    """Folder of the catalogue, of blobs and of created models; null: `parallm/registry` below XDG_DATA_HOME or
    ~/.local/share, on a Mac
    ~/Library/Application Support/ParaLLM/registry."""
    folders: tuple[str, ...] = ()
    """Folders whose models are registered, those in the Hugging Face cache beside them. They are only read."""
    memory_bytes: int | None = Field(default=None, gt=0)
    """Bytes that models beside `model` may take, their keys and values included; null: half of what is free when the
    process has loaded `model`."""
    keep_alive: float = 300.0
    """Seconds that a model stays in memory after its last request, where neither the request nor an operator says
    otherwise; negative: until its memory is needed."""
    allowed: tuple[str, ...] = ()
    """Names that requests may load, such as `qwen/*`; empty: all that are registered. Operators load any."""
    wait_seconds: float = Field(default=60.0, ge=0)
    """Seconds that a request waits for memory while other models answer; then it gets 503."""
