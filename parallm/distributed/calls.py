"""Calls of an engine's methods as bytes, from rank 0 to the ranks that follow it.

Pickle moves them, with three exceptions: arrays go as numpy's, a grammar as the text that it was compiled from, and an
adapter version that went before as its key. What is read back may name the types of requests and adapters alone.
"""

import dataclasses
import io
import pickle
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import numpy as np

from parallm.errors import ExchangeFailed
from parallm.model.adapters.adapter import Adapter, Key
from parallm.model.chat.grammar import CompiledGrammar
from parallm.model.chat.tokenizer import ChatTokenizer

TYPES = {
    "parallm.types": {"GenerationRequest", "SamplingParams", "TaskSpec"},
    "parallm.conversation": {"GrammarSource"},
    "parallm.model.adapters.adapter": {"Adapter"},
    "numpy": {"ndarray", "dtype"},
    "numpy._core.multiarray": {"_reconstruct"},
    "numpy.core.multiarray": {"_reconstruct"},
    "numpy._core.numeric": {"_frombuffer"},
    "builtins": {"frozenset", "bytearray"},
}
"""Names that may be read back, by module."""
GRAMMAR, ARRAY, ADAPTER, MAPPING = "grammar", "array", "adapter", "mapping"


class CallWriter:
    """Turns calls into bytes. It knows which adapter versions went before."""

    def __init__(self) -> None:
        self._sent: set[Key] = set()

    def write(self, call: Any) -> bytes:
        buffer = io.BytesIO()
        _Pickler(buffer, self._sent).dump(call)
        return buffer.getvalue()

    def forget(self, held: Collection[Key]) -> None:
        """Send versions that are not `held` anew if they come again."""
        self._sent.intersection_update(held)


class CallReader:
    """Turns bytes into calls."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._adapters: dict[Key, Adapter] = {}

    def read(self, content: bytes) -> Any:
        """Raises ExchangeFailed for bytes that are no call."""
        try:
            return _Unpickler(io.BytesIO(content), self).load()
        except (pickle.UnpicklingError, EOFError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise ExchangeFailed(f"rank 0 has sent what is no call: {error}") from error

    def forget(self, held: Collection[Key]) -> None:
        """Drop versions that are not `held`."""
        self._adapters = {key: adapter for key, adapter in self._adapters.items() if key in held}

    def restore(self, kind: str, *values: Any) -> Any:
        """The object that `_Pickler.persistent_id` has named."""
        if kind == GRAMMAR:
            source, reasoning = values
            return self._tokenizer.compile_grammar(source, reasoning=reasoning)
        if kind == ARRAY:
            return mx.array(values[0])
        if kind == MAPPING:
            return MappingProxyType(values[0])
        key, fields = values
        if fields is not None:
            self._adapters[key] = Adapter(**fields)
        return self._adapters[key]


class _Pickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO, sent: set[Key]) -> None:
        super().__init__(buffer, protocol=5)
        self._sent = sent

    def persistent_id(self, value: Any) -> tuple[Any, ...] | None:
        if isinstance(value, CompiledGrammar):
            return GRAMMAR, value.source, value.reasoning
        if isinstance(value, mx.array):
            return ARRAY, np.array(value)
        if isinstance(value, MappingProxyType):
            return MAPPING, dict(value)
        if isinstance(value, Adapter):
            return ADAPTER, value.key, self._fields(value)
        return None

    def _fields(self, adapter: Adapter) -> Mapping[str, Any] | None:
        """All fields of a version that goes for the first time."""
        if adapter.key in self._sent:
            return None
        self._sent.add(adapter.key)
        return {field.name: getattr(adapter, field.name) for field in dataclasses.fields(adapter)}


class _Unpickler(pickle.Unpickler):
    def __init__(self, buffer: io.BytesIO, reader: CallReader) -> None:
        super().__init__(buffer)
        self._reader = reader

    def find_class(self, module: str, name: str) -> Any:
        if name not in TYPES.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} belongs to no call")
        return super().find_class(module, name)

    def persistent_load(self, identity: Any) -> Any:
        return self._reader.restore(*identity)
