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
    max_grammar_bytes: int = Field(default=64 * 1024, ge=1)
    """Of a schema, a regular expression, choices, or the schemas of all tools that a model is made to call."""
    max_grammar_seconds: float = Field(default=10.0, gt=0)
    """To prepare a grammar. It is done beside the event loop, so other requests go on."""
