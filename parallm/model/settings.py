"""Settings of the model: what to load and how its adapters look."""

from typing import Annotated, Literal

from pydantic import Field

from parallm.settings import settings

Rank = Annotated[int, Field(ge=1, le=512)]
LayerRange = Annotated[str, Field(pattern=r"^(all|\d+-\d+)$")]


@settings
class LoraSettings:
    """A key that is null is as `model.adapter` has it, and in a new adapter as its docstring says."""

    rank: Rank | None = None
    """Rank of the adapter's product; more can learn more and costs more memory; null: 16."""
    ranks: dict[str, Rank] = Field(default_factory=dict)
    """Another rank for the layers whose path ends with a name, e.g. {q_proj: 8}; the longest name that fits counts."""
    alpha: float | None = Field(default=None, gt=0)
    """The adapter's product is scaled by alpha / rank; null: 32."""
    rslora: bool | None = None
    """Scale by alpha / sqrt(rank) instead, so that a higher rank does not learn more slowly; null: false."""
    dora: bool | None = None
    """Train the length of each output's weights apart from their direction; null: false."""
    dropout: float | None = Field(default=None, ge=0, lt=1)
    """Share of the inputs of an adapter that each update drops, also of a given adapter; null: as it has it, else 0."""
    targets: str | tuple[str, ...] | None = None
    """`all-linear` (all but embedding, head, routers and experts), `experts` (those of a mixture), both, or names of
    layers, e.g. [q_proj, v_proj]; null: all-linear."""
    layers: int | tuple[int, ...] | LayerRange | None = None
    """Layers that have targets: `all`, a number of last ones, a list, or a range such as 8-15; null: all."""


@settings
class BaseSettings:
    """A base, and an adapter of it."""

    path: str = "nano"
    """`nano` (the model inside the package), a local Hugging Face folder, a GGUF file, or a hub id."""
    trust_remote_code: bool = False
    """Run code that the model's folder brings along: its class (`model_file` in config.json), its tokenizer's."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the weights and of what is computed with them. `auto`: float32 on a CPU; elsewhere as stored, but
    on CUDA float16 in place of bfloat16 if its range is enough, because engine and learner then agree better."""
    adapter: str | None = None
    """LoRA adapter: a run (its best version by evaluation, else the newest), RUN@VERSION, RUN@newest, a checkpoint, or
    the folder of an adapter in mlx-lm's or PEFT's format."""


@settings
class ComputedBaseSettings(BaseSettings):
    """A base that computes here."""

    quantized: Literal["auto", "packed", "unpacked"] = "auto"
    """How the weights of a quantized base are kept: as they are stored, or written out in `dtype`. `auto`: packed on a
    GPU; on a CPU, whose products need them so, unpacked where that takes at most half of the free memory."""


@settings
class ModelSettings(ComputedBaseSettings):
    """A base and the form of its adapters."""

    lora: LoraSettings = LoraSettings()
    """Form of a new adapter."""
