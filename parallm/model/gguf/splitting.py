"""Ways in which byte-level BPE splits a text before it merges, by their names in GGUF files. Imports no MLX.

llama.cpp (`src/llama-vocab.cpp`) and transformers write the patterns alike, but for their engines' dialects; whether
characters are composed first only a tokenizer.json says.
"""

from collections.abc import Mapping
from dataclasses import dataclass

_CASED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_CAPITALS = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
_LINES = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True, kw_only=True)
class Splitting:
    """How byte-level BPE splits a text before it merges."""

    pattern: str
    """What stays together."""
    digits: bool = False
    """Whether every digit is cut off first."""
    nfc: bool = False
    """Whether characters are composed first."""
    ignores_merges: bool = False
    """Whether a part that is a token stays whole, however it would be merged."""
    adds_bos: bool = False
    """Whether a text begins with a token of its own, if no key says so."""


LLAMA3 = Splitting(pattern=_CASED + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST, ignores_merges=True, adds_bos=True)
DBRX = Splitting(pattern=LLAMA3.pattern)
QWEN2 = Splitting(pattern=_CASED + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST, nfc=True)
GPT_4O = Splitting(pattern=rf"{_WORD}{_CASED}?|{_CAPITALS}{_CASED}?|\p{{N}}{{1,3}}{_LINES}")
TEKKEN = Splitting(pattern=rf"{_WORD}|{_CAPITALS}|\p{{N}}{_LINES}", ignores_merges=True, adds_bos=True)
PLAIN = Splitting(pattern=GPT2)
SMOLLM = Splitting(pattern=GPT2, digits=True)
SPLITTINGS: Mapping[str, Splitting] = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3"), LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), DBRX),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), QWEN2),
    "gpt-4o": GPT_4O,
    "tekken": TEKKEN,
    "gpt-2": PLAIN,
    "smollm": SMOLLM,
}
"""The ways by `tokenizer.ggml.pre`; of several names for one way, the first is written."""
