"""Seconds in which sentence-transformers makes vectors of texts: mean of the last hidden states, of length 1."""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

from bench.compare import Settings, tune

SHOWN = 4
AS_TEXT = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}


def main(
    *,
    model: str,
    file: str,
    first: int,
    count: int,
    dtype: str,
    threads: int,
    rows: Sequence[int],
    tried: int,
    settings: Settings | None = None,
) -> dict[str, Any]:
    """Without settings it looks for the number of `rows` in a batch with which `tried` texts take least."""
    texts = json.loads(Path(file).read_text())
    torch.set_num_threads(threads)
    trunk = Transformer(
        model,
        model_kwargs={"dtype": getattr(torch, dtype)},
        modality_config=AS_TEXT,  # else each text would become a message of the chat template
        module_output_name="token_embeddings",
    )
    pooling = Pooling(trunk.get_embedding_dimension(), pooling_mode="mean")
    sentences = SentenceTransformer(modules=[trunk, pooling, Normalize()], device="cpu")

    def seconds_of(settings: Settings, chosen: Sequence[str]) -> float:
        began = time.perf_counter()
        sentences.encode(list(chosen), batch_size=settings["rows"], show_progress_bar=False)  # it sorts by length
        return time.perf_counter() - began

    seconds_of({"rows": 16}, texts[:16])
    if settings is None:
        trials = tune({"rows": rows[0]}, {"rows": rows}, lambda settings: seconds_of(settings, texts[:tried]))
        return {"settings": trials[0].settings}
    seconds = seconds_of(settings, texts[first : first + count])
    tokens = sum(map(len, sentences.tokenizer(texts[first : first + count])["input_ids"]))
    vectors = sentences.encode(texts[first : first + SHOWN], batch_size=1, convert_to_tensor=True).float()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads", file=sys.stderr)
    return {"seconds": seconds, "tokens": tokens, "vectors": vectors.tolist()}
