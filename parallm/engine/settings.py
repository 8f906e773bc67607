"""Settings of the engine."""

from typing import Literal

from pydantic import Field, model_validator

from parallm.settings import settings


@settings
class SpeculationSettings:
    method: Literal["auto", "none", "ngram", "draft"] = "auto"
    """Source of the proposed tokens. `ngram`: what followed the last tokens before, in prompt and completion; `draft`:
    a second model; `auto`: ngram where it has been measured to pay and the model allows it."""
    draft_model: str | None = None
    """Local folder or hub id of a small model with the same tokenizer, for `method=draft`."""
    num_tokens: int = Field(default=5, ge=1, le=16)
    """Most tokens proposed at a time; how many are checked follows from how often they are right."""

    @model_validator(mode="after")
    def _check_draft_model(self) -> "SpeculationSettings":
        if (self.method == "draft") != (self.draft_model is not None):
            raise ValueError(
                f"speculation.method={self.method} and speculation.draft_model={self.draft_model} do not go together; "
                "name a model with method=draft, and only then"
            )
        return self


@settings
class EngineSettings:
    max_rows: int | None = Field(default=None, ge=1, le=1024)
    """Completions that decode at the same time; null: 128, on a CPU 256."""
    max_context: int | None = Field(default=None, ge=8)
    """Tokens of prompt and completion together; null: what the model allows, at most 8192."""
    max_waiting: int = Field(default=4096, ge=1)
    """Requests of clients that may wait; one more is refused. Those of training and evaluations always wait."""
    kv_cache_bytes: int | None = Field(default=None, ge=1)
    """Bytes of keys and values, of running rows, of prompts, and kept for later ones; null: 40% of what an accelerator
    has left beside the base, on a CPU a quarter of the free RAM."""
    kv_bits: Literal[8] | None = None
    """Bits of a number in keys and values of running rows; null: as the model computes them. With 8, rows take about a
    quarter of float32's memory, decode slower on a CPU, and sample from a policy that is not quite the learner's. Not
    with MLX's CUDA build."""
    prefix_cache: bool = True
    """Keep keys and values, of at most half of these bytes, for prompts that begin with the same tokens."""
    prefill_chunk: int | None = Field(default=None, ge=16)
    """Prompt tokens computed in one unit of device work, for which running answers wait; null: 512, with MLX's CUDA
    build 2048."""
    warmup: bool = False
    """Before anything is asked: generate for 1, 2, 4 and more rows up to `max_rows`, so that what is compiled or
    planned for each number of rows costs no client. With MLX's CUDA build the first steps take seconds;
    `POST /v1/warmup` does the same later."""
    speculation: SpeculationSettings = SpeculationSettings()
    """Tokens that are proposed cheaply and checked several at a time."""
