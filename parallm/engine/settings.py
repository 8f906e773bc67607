"""Settings of the engine."""

from typing import Literal

from pydantic import Field

from parallm.settings import settings


@settings
class SpeculationSettings:
    method: Literal["auto", "none", "ngram"] = "auto"
    """Source of draft tokens. `ngram`: what followed the last tokens before, in prompt and completion; `auto`: ngram
    where it has been measured to pay and the model allows it."""
    num_tokens: int = Field(default=5, ge=1, le=16)
    """Most draft tokens at a time; their acceptance rate says how many are verified."""


@settings
class EngineSettings:
    max_rows: int | None = Field(default=None, ge=1, le=1024)
    """Completions that decode at the same time; null: 128, on a CPU 256, and with MLX's CUDA build the
    power of two up to 1024 whose rows of 1024 tokens fit into `kv_cache_bytes`, at least 128."""
    max_context: int | None = Field(default=None, ge=8)
    """Tokens of prompt and completion together; null: what the model allows, at most 8192."""
    max_waiting: int = Field(default=4096, ge=1)
    """Requests of clients that may wait; one more is refused. Those of training and evaluations always wait."""
    kv_cache_bytes: int | None = Field(default=None, ge=1)
    """Bytes of keys and values, of running requests, of prompts, and kept for later ones; null: 40% of what an
    accelerator has left beside the base, on a CPU a quarter of the free RAM."""
    prefix_cache: bool = True
    """Keep keys and values for prompts that begin with the same tokens: of at most half of these bytes, in pages (with
    MLX's CUDA build) as long as others leave them free."""
    prefill_chunk: int | None = Field(default=None, ge=16)
    """Prompt tokens computed in one unit of device work, for which running answers wait; null: 512, with MLX's CUDA
    build 2048, on devices of 70 GB and more 8192."""
    warmup: bool = False
    """Before anything is asked: generate for 1, 2, 4 and more rows up to `max_rows`, so that what is compiled or
    planned for each number of rows costs no client. With MLX's CUDA build the first steps take seconds;
    `POST /v1/warmup` does the same later."""
    speculation: SpeculationSettings = SpeculationSettings()
    """Draft tokens that are cheap to propose and verified several at a time."""
