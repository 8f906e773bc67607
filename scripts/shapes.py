"""Llama-like shapes with random weights: speed and memory depend on nothing else. Imports neither MLX nor torch."""

import json
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a model."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_value_heads: int
    head_size: int
    vocabulary: int

    def config(self) -> dict[str, Any]:
        """Hugging Face's config.json of a Llama of this shape."""
        return {
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_value_heads,
            "head_dim": self.head_size,
            "vocab_size": self.vocabulary,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": False,
        }


SHAPES = {
    "8b": Shape(
        hidden=4096, intermediate=14336, layers=32, heads=32, key_value_heads=8, head_size=128, vocabulary=128256
    ),
    "1b": Shape(
        hidden=2048, intermediate=8192, layers=16, heads=32, key_value_heads=8, head_size=64, vocabulary=128256
    ),
    "0.5b": Shape(
        hidden=896, intermediate=4864, layers=24, heads=14, key_value_heads=2, head_size=64, vocabulary=151936
    ),
    "25m": Shape(hidden=512, intermediate=1408, layers=8, heads=8, key_value_heads=4, head_size=64, vocabulary=4096),
    "tiny": Shape(hidden=64, intermediate=96, layers=2, heads=4, key_value_heads=2, head_size=16, vocabulary=384),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateJob:
    """One update: `groups` prompts, `group_size` completions each."""

    shape: str
    groups: int
    group_size: int
    prompt: int
    completion: int
    passes: tuple[int, ...] = (4,)
    """Rows of a peer's pass, to try."""
    settings: dict[str, Any] | None = None
    """Of a peer; None: it looks for those with which it is fastest."""
    repeats: int = 3

    @property
    def tokens(self) -> int:
        """Of all rows, prompts counted once per row: what a trainer without sharing computes."""
        return self.groups * self.group_size * (self.prompt + self.completion)

    def dump(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpoJob:
    """GRPO steps from problem to published adapter, every completion of the same length."""

    shape: str
    model: str
    """Folder of its weights and tokenizer, which `workers/random_checkpoint.py` writes."""
    prompts: int
    group_size: int
    prompt: int
    completion: int
    rows: int = 0
    """Of a training pass."""
    generation: str = "plain"
    """How transformers samples for TRL: plain, static (a static cache) or continuous (continuous batching)."""
    warm_up: int = 2
    """First steps that do not count."""
    steps: int = 3
    """That count."""

    @property
    def completions(self) -> int:
        return self.prompts * self.group_size

    @property
    def sampled_tokens(self) -> int:
        return self.completions * self.completion

    @property
    def trained_tokens(self) -> int:
        """Of all rows, prompts counted once per row."""
        return self.completions * (self.prompt + self.completion)

    def dump(self) -> str:
        return json.dumps(asdict(self))


def read_grpo_job(text: str) -> GrpoJob:
    return GrpoJob(**json.loads(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineJob:
    """Parts of `workers/engine_shape.py` or `workers/batch_generator_shape.py` to time on one shape."""

    shape: str
    parts: tuple[str, ...]
    layers: int = 0
    """Of the shape; 0: all."""
    prompt: int = 128
    new: int = 128
    repeats: int = 3
    """That count, after one that warms up."""
    cached: int = 2048
    """Positions of each row where rows join and leave."""
    churn: int = 24
    """Rows that leave then, one after the other, each for one that joins."""
    group_prompt: int = 1024
    requests: int = 128
    """Of the mixed load."""
    per_second: float = 32.0
    """Of them, on average."""
    prompts: tuple[int, int] = (32, 4096)
    """Shortest and longest of them; every length between is as likely on a logarithmic scale."""
    outputs: tuple[int, int] = (16, 1024)
    mixed_rows: int = 64
    """That decode together."""
    peer_rows: tuple[int, ...] = (64, 128)
    """The same, to try with BatchGenerator."""
    peer_settings: dict[str, Any] | None = None
    """Of BatchGenerator; None: it looks for those with which it is fastest."""
    storm_prompts: tuple[int, int] = (8, 32)
    storm_outputs: tuple[int, int] = (1, 8)
    """Of a storm: `requests` that come at once, so short that rows join and leave in nearly every step."""
    speculation: str = "none"
    """engine.speculation.method of ours. BatchGenerator computes each token by itself, and greedy text of random
    weights repeats itself, so that a third to a half of it would be guessed."""

    def dump(self) -> str:
        return json.dumps(asdict(self))


def read_engine_job(text: str) -> EngineJob:
    values: dict[str, Any] = json.loads(text)
    values |= {name: tuple(one) for name, one in values.items() if isinstance(one, list)}
    return EngineJob(**values)
