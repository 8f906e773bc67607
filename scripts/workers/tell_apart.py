"""Copies a model's folder and gives the tokens of a text embeddings of their own, where the model has none.

    python tell_apart.py SOURCE TARGET TEXT

Tokens that a small model's training has never met end up with one and the same embedding. It can then neither read nor
write one of them rather than another, and LoRA, which leaves embeddings alone, cannot teach it to.
"""

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
from tokenizers import Tokenizer

TABLES = ("embed_tokens.weight", "lm_head.weight")
TWINS = 0.98
"""Cosine from which two tokens' embeddings count as the same one."""

# V vocabulary, H hidden size, T tokens of the text


def main(source: Path, target: Path, text: str) -> None:
    shutil.copytree(source, target)
    tokens = sorted(set(Tokenizer.from_file(str(target / "tokenizer.json")).encode(text, add_special_tokens=False).ids))
    mx.random.seed(0)
    for file in sorted(target.glob("*.safetensors")):
        arrays = mx.load(str(file))
        tables = {name: told_apart(table, tokens) for name, table in arrays.items() if name.endswith(TABLES)}
        if tables:
            written = file.with_suffix(".new.safetensors")
            mx.save_safetensors(str(written), arrays | tables, metadata={"format": "pt"})
            written.replace(file)


def told_apart(table_VH: mx.array, tokens: Sequence[int]) -> mx.array:
    """The table with random directions of the old lengths for those of `tokens` that have a twin."""
    rows_VH = table_VH.astype(mx.float32)
    lengths_V = mx.linalg.norm(rows_VH, axis=1)
    directions_VH = rows_VH / lengths_V[:, None]
    is_twin_TV = directions_VH[mx.array(tokens)] @ directions_VH.T > TWINS
    for token, num_alike in zip(tokens, is_twin_TV.sum(axis=1).tolist(), strict=True):
        if num_alike > 1:  # it is like itself
            direction_H = mx.random.normal((rows_VH.shape[1],))
            rows_VH[token] = direction_H * (lengths_V[token] / mx.linalg.norm(direction_H))
    return rows_VH.astype(table_VH.dtype)


main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
