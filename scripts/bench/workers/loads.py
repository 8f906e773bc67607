"""Shapes of models with random weights, and the loads of both sides of a comparison of engines. Imports no MLX."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

Tokens = tuple[int, ...]
Shape = dict[str, Any]
"""The config.json of a Llama. Speed and memory depend on its sizes alone."""
Layout = Sequence[tuple[int, Sequence[int]]]
"""Of groups: the tokens of the prompt, and those of each completion."""


def shape_of(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, head: int, words: int) -> Shape:
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers, "head_dim": head}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": words}
    rest = {"rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 8192, "tie_word_embeddings": False}
    return {"model_type": "llama"} | sizes | rest


def mixture_of(
    hidden: int,
    expert: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head: int,
    vocabulary: int,
    *,
    experts: int,
    chosen: int,
) -> Shape:
    """A Qwen3-MoE of these sizes."""
    own = {"model_type": "qwen3_moe", "num_experts": experts, "num_experts_per_tok": chosen}
    own |= {"moe_intermediate_size": expert, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    return shape_of(hidden, 3 * hidden, layers, heads, kv_heads, head, vocabulary) | own


def hybrid_of(hidden: int, intermediate: int, layers: int, heads: tuple[int, int], key_heads: int, head: int) -> Shape:
    """Qwen3.5: three layers of the gated delta rule for each of attention, whose heads have 256 channels in the large
    ones. `heads` are those of attention, and of values in the recurrent layers."""
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": heads[0], "num_key_value_heads": max(1, heads[0] // 4), "head_dim": 2 * head}
    sizes |= {"linear_num_key_heads": key_heads, "linear_num_value_heads": heads[1], "linear_conv_kernel_dim": 4}
    sizes |= {"linear_key_head_dim": head, "linear_value_head_dim": head, "full_attention_interval": 4}
    rest = {"rms_norm_eps": 1e-6, "max_position_embeddings": 8192, "tie_word_embeddings": True, "vocab_size": 248320}
    return {"model_type": "qwen3_5"} | sizes | rest


SHAPES = {
    "qwen3.5-4b": hybrid_of(2560, 9216, 32, (16, 32), 16, 128),
    "qwen3.5-0.8b": hybrid_of(1024, 3584, 24, (8, 16), 16, 128),
    "hybrid-25m": hybrid_of(512, 1408, 8, (8, 8), 4, 64) | {"vocab_size": 4096, "head_dim": 64},
    "hybrid-tiny": hybrid_of(64, 128, 4, (4, 4), 2, 16) | {"vocab_size": 384},
    "70b": shape_of(8192, 28672, 80, 64, 8, 128, 128256),
    "8b": shape_of(4096, 14336, 32, 32, 8, 128, 128256),
    "0.5b": shape_of(896, 4864, 24, 14, 2, 64, 151936),
    "25m": shape_of(512, 1408, 8, 8, 4, 64, 4096),
    "tiny": shape_of(64, 128, 2, 4, 2, 16, 384),
}
SHAPES |= {
    "30b-a3b": mixture_of(2048, 768, 48, 32, 4, 128, 151936, experts=128, chosen=8),
    "tiny-moe": mixture_of(64, 32, 2, 4, 2, 16, 384, experts=8, chosen=2),
}
SHAPES |= {
    f"{name}-{bits}bit": SHAPES[name] | {"quantization": {"group_size": 64, "bits": bits}}
    for name in ("70b", "8b", "tiny")
    for bits in (4, 8)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Sizes of the parts of `engine_parts.py` and `batch_generator_parts.py`."""

    prompt: int = 128
    new: int = 128
    repeats: int = 3
    """Turns that count, after one that warms up."""
    cached: int = 2048
    """Positions of each row where rows join and leave."""
    churn: int = 24
    """Rows that leave there, one after the other, each for one that joins."""
    group_prompt: int = 1024
    requests: int = 128
    """Of the mixed load."""
    per_second: float = 32.0
    """Mean rate of their arrivals."""
    prompts: tuple[int, int] = (32, 4096)
    """Shortest and longest of them; lengths between are as likely on a logarithmic scale."""
    outputs: tuple[int, int] = (16, 1024)
    mixed_rows: int = 64
    """Rows that decode together there."""
    peer_rows: tuple[int, ...] = (64, 128)
    """The same, to try with BatchGenerator."""
    peer_settings: dict[str, Any] | None = None
    """Settings of BatchGenerator; None: it looks for those with which it is fastest."""
    storm_prompts: tuple[int, int] = (8, 32)
    storm_outputs: tuple[int, int] = (1, 8)
    """Lengths of a storm: so short that rows join and leave in nearly every step."""
    memory_rows: int = 128
    memory_lengths: tuple[int, int] = (32, 4096)
    """Rows whose memory is measured, and their lengths, which are as likely on a logarithmic scale."""
    speculation: str = "none"
    """engine.speculation.method of ours."""


def read_load(values: dict[str, Any]) -> Load:
    """From JSON, which has no tuples."""
    return Load(**{name: tuple(one) if isinstance(one, list) else one for name, one in values.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningLoad:
    """Sizes of the parts of `learning_parts.py`."""

    groups: int = 8
    group_size: int = 8
    prompt: int = 128
    lengths: tuple[int, int] = (16, 1024)
    """Shortest and longest completion; lengths between are as likely on a logarithmic scale."""
    repeats: int = 2
    """Updates that count, after one that warms up."""
    streams: int = 64
    outputs: tuple[int, int] = (64, 256)
    """Shortest and longest answer of a stream."""
    served_groups: int = 4
    """Groups of an update beside streams: 32 completions."""
    seconds: float = 12.0
    """Of each mode; the streams alone are measured before and after all modes for a third of it."""
    publishes: int = 60
    kv_cache_bytes: int = 4 << 30
    """Of the engine beside updates, whose peaks of memory are compared: enough for the streams."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningMode:
    """How the process learns while it serves."""

    updates_per_minute: float | None
    """None: one update follows the other."""
    engine_share: float = 0.5
    latency_target: float | None = None
    share: float = 1.0
    """Of `LearningLoad.seconds`."""


LEARNING_MODES = {
    "10_updates": LearningMode(updates_per_minute=10),
    "30_updates_first": LearningMode(updates_per_minute=30, engine_share=0.3),
    "latency_target": LearningMode(updates_per_minute=None, latency_target=1.2),
    "control": LearningMode(updates_per_minute=None, engine_share=0.0, share=0.25),
}
"""control: streams get nothing while an update is under way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request of the mixed load."""

    seconds: float
    """Since the first one."""
    prompt: Tokens
    num_new: int


def random_prompts(vocabulary: int, rows: int, length: int, seed: int) -> list[Tokens]:
    tokens_BT = np.random.default_rng(seed).integers(0, vocabulary, (rows, length))
    return [tuple(tokens) for tokens in tokens_BT.tolist()]


def random_arrivals(load: Load, vocabulary: int, seed: int) -> list[Arrival]:
    """A Poisson process with `load.per_second`."""
    random = np.random.default_rng(seed)
    seconds = np.cumsum(random.exponential(1 / load.per_second, load.requests))
    prompts, outputs = (lengths(random, bounds, load.requests) for bounds in (load.prompts, load.outputs))
    return [
        Arrival(
            seconds=float(second - seconds[0]),
            prompt=tuple(random.integers(0, vocabulary, length).tolist()),
            num_new=num_new,
        )
        for second, length, num_new in zip(seconds, prompts, outputs, strict=True)
    ]


def random_storm(load: Load, vocabulary: int, seed: int) -> list[Arrival]:
    """Short requests that come at the same time."""
    return random_burst(replace(load, prompts=load.storm_prompts, outputs=load.storm_outputs), vocabulary, seed)


def random_burst(load: Load, vocabulary: int, seed: int) -> list[Arrival]:
    """Requests of all lengths that come at the same time."""
    return [replace(one, seconds=0.0) for one in random_arrivals(load, vocabulary, seed)]


def limits_of_step(step: int, rows: int, bounds: tuple[int, int]) -> list[int]:
    """Lengths of a step's completions in the order of its prompts: with random weights they stand for the end token."""
    return lengths(np.random.default_rng([step, rows]), bounds, rows)


def ragged_layout(groups: int, group_size: int, prompt: int, bounds: tuple[int, int]) -> Layout:
    random = np.random.default_rng(0)
    return [(prompt, lengths(random, bounds, group_size)) for _ in range(groups)]


def equal_layout(layout: Layout) -> Layout:
    """As many tokens, to a few, in completions of one length."""
    sizes = [length for _, completions in layout for length in completions]
    return [(prompt, [round(sum(sizes) / len(sizes))] * len(completions)) for prompt, completions in layout]


def check_tokens(sampled: int, expected: int) -> None:
    if sampled != expected:
        raise ValueError(f"{sampled} tokens, expected {expected}")


def lengths(random: np.random.Generator, bounds: tuple[int, int], count: int) -> list[int]:
    low, high = np.log(bounds)
    drawn: list[int] = np.exp(random.uniform(low, high, count)).round().astype(int).tolist()
    return drawn
