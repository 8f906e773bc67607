"""BERT, RoBERTa and XLM-R: encoders whose tokens see all others (https://arxiv.org/abs/1810.04805, 1907.11692).

Modules have the names of transformers' classes, so that tensors and adapters of files fit without a table. The pooler
is part of a head (`model/task_head.py`).
Axes: B rows, T tokens, N heads, D head size, H hidden.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from parallm.model.attention import attention

ACTIVATIONS: Mapping[str, Callable[[mx.array], mx.array]] = {
    "gelu": nn.gelu,  # by the error function: the approximation by tanh differs by 1e-4
    "gelu_new": nn.gelu_approx,
    "relu": nn.relu,
}


class Bert(nn.Module):
    """Token ids -> hidden states. `config` is transformers' config.json; raises ValueError, KeyError for others."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        if config.get("position_embedding_type", "absolute") != "absolute" or config.get("is_decoder"):
            raise ValueError("only BERT with absolute positions, and no decoder, is known here")
        self.embeddings = BertEmbeddings(config)
        self.encoder = BertEncoder(config)

    @property
    def layers(self) -> list[nn.Module]:
        layers: list[nn.Module] = self.encoder.layer
        return layers

    def make_cache(self) -> list[Any]:
        """No layer keeps keys and values: every token sees those after it."""
        return []

    def __call__(
        self,
        tokens_BT: mx.array,
        cache: Sequence[Any] = (),
        *,
        lengths_B: mx.array | None = None,
        first_lengths_B: mx.array | None = None,
    ) -> mx.array:
        """Hidden states (B, T, H) of rows with `lengths_B` tokens (all: T); what pads them changes nothing else.

        Tokens from `first_lengths_B` on have the type of a second text.
        """
        hidden_BTH = self.embeddings(tokens_BT, first_lengths_B)
        mask = None if lengths_B is None else (mx.arange(tokens_BT.shape[1]) < lengths_B[:, None])[:, None, None]
        for layer in self.encoder.layer:
            hidden_BTH = layer(hidden_BTH, mask)
        return hidden_BTH


class BertEmbeddings(nn.Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        self.word_embeddings = nn.Embedding(config["vocab_size"], hidden)
        self.position_embeddings = nn.Embedding(config["max_position_embeddings"], hidden)
        self.token_type_embeddings = nn.Embedding(config["type_vocab_size"], hidden)
        self.LayerNorm = nn.LayerNorm(hidden, eps=config.get("layer_norm_eps", 1e-12))
        self._first_position = first_position(config)
        self._last_position = config["max_position_embeddings"] - 1
        self._num_types = config["type_vocab_size"]

    def __call__(self, tokens_BT: mx.array, first_lengths_B: mx.array | None) -> mx.array:
        positions_T = mx.arange(tokens_BT.shape[1])
        # rows are padded at their ends, so positions of tokens do not depend on the padding, which may outrun the table
        indices_T = mx.minimum(positions_T + self._first_position, self._last_position)
        embedded_BTH = self.word_embeddings(tokens_BT) + self.position_embeddings(indices_T)
        types_BT = mx.zeros_like(tokens_BT)
        if first_lengths_B is not None and self._num_types > 1:
            types_BT = (positions_T >= first_lengths_B[:, None]).astype(mx.int32)
        normed: mx.array = self.LayerNorm(embedded_BTH + self.token_type_embeddings(types_BT))
        return normed


class BertEncoder(nn.Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.layer = [BertLayer(config) for _ in range(config["num_hidden_layers"])]


class BertLayer(nn.Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        self.attention = BertAttention(config)
        self.intermediate = BertDense(hidden, inner)
        self.output = BertOutput(inner, hidden, config)
        self._activation = ACTIVATIONS[config.get("hidden_act", "gelu")]

    def __call__(self, hidden_BTH: mx.array, mask: mx.array | None) -> mx.array:
        attended_BTH = self.attention(hidden_BTH, mask)
        inner = self._activation(self.intermediate.dense(attended_BTH))
        output: mx.array = self.output(inner, attended_BTH)
        return output


class BertAttention(nn.Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        self.self = BertSelfAttention(config)
        self.output = BertOutput(hidden, hidden, config)

    def __call__(self, hidden_BTH: mx.array, mask: mx.array | None) -> mx.array:
        output: mx.array = self.output(self.self(hidden_BTH, mask), hidden_BTH)
        return output


class BertSelfAttention(nn.Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        self.query, self.key, self.value = (nn.Linear(hidden, hidden) for _ in range(3))
        self._num_heads = config["num_attention_heads"]

    def __call__(self, hidden_BTH: mx.array, mask: mx.array | None) -> mx.array:
        rows, length, hidden = hidden_BTH.shape
        size = hidden // self._num_heads
        queries, keys, values = (
            part(hidden_BTH).reshape(rows, length, self._num_heads, size).swapaxes(1, 2)
            for part in (self.query, self.key, self.value)
        )
        attended_BNTD = attention(queries, keys, values, scale=size**-0.5, mask=mask)
        return attended_BNTD.swapaxes(1, 2).reshape(rows, length, hidden)


class BertDense(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.dense = nn.Linear(inputs, outputs)


class BertOutput(BertDense):
    """A product, added to what came before, and normed."""

    def __init__(self, inputs: int, outputs: int, config: Mapping[str, Any]) -> None:
        super().__init__(inputs, outputs)
        self.LayerNorm = nn.LayerNorm(outputs, eps=config.get("layer_norm_eps", 1e-12))

    def __call__(self, inner: mx.array, before_BTH: mx.array) -> mx.array:
        normed: mx.array = self.LayerNorm(self.dense(inner) + before_BTH)
        return normed


def first_position(config: Mapping[str, Any]) -> int:
    """The position of a text's first token: RoBERTa's come after that of its padding token."""
    return int(config["pad_token_id"]) + 1 if "roberta" in config["model_type"] else 0
