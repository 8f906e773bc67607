"""Settings of the HTTP server."""

from pydantic import Field

from parallm.settings import settings


@settings
class ServerSettings:
    enabled: bool = True
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    """0 picks a free port and prints it."""
    max_n: int = Field(default=64, ge=1)
    max_completions: int = Field(default=256, ge=1)
    """Prompts times `n` of one HTTP request."""
    max_top_logprobs: int = Field(default=20, ge=0)
    max_stop: int = Field(default=16, ge=1)
    default_max_tokens: int = Field(default=512, ge=1)
    """For requests that name no `max_tokens`; less where the context ends before."""
    max_body_bytes: int = Field(default=4 * 1024 * 1024, ge=1024)
    """Larger request bodies are refused before they are read as JSON."""
    adapters_root: str | None = None
    """The only folder that clients may load adapters from by path; null: none."""
    max_adapter_bytes: int = Field(default=512 * 1024 * 1024, ge=1024)
    """Weights of an adapter that is loaded or uploaded; larger uploads are cut off."""
    max_adapters: int = Field(default=64, ge=1)
    """Names of adapters in memory that clients may fill."""
