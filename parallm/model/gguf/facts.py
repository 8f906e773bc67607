"""What a catalogue says of a GGUF file, from its header alone. Imports no MLX."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from parallm.model.gguf.config import POOLING, find_architecture
from parallm.model.gguf.file import GgufFile
from parallm.model.gguf.names import find_sources
from parallm.model.gguf.parts import read_parts

MIXTURES: Mapping[int, str] = {14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M"}
"""Names of mixed types of tensors by `general.file_type`; of others the type of most weights is the name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFacts:
    """A model that can be loaded here, as far as its header tells."""

    architecture: str
    """The model type of mlx-lm."""
    parameters: int
    quantization: str
    """Such as Q4_K_M, Q8_0 or F16."""
    context: int
    hidden: int
    vocabulary: int
    chat_template: str | None
    pooling: str | None
    """How vectors of texts are pooled, if the model was made for them."""
    license: str | None


def read_facts(path: Path) -> GgufFacts:
    """Read them. Raises ModelError for a file that cannot be loaded, but for its weights and its tokenizer."""
    file = read_parts(path)
    kind, own = find_architecture(file), f"{file.architecture}."
    find_sources(file)
    sizes: Counter[str] = Counter()
    for tensor in file.tensors.values():
        sizes[tensor.kind.name] += math.prod(tensor.shape)
    usual = sizes.most_common(1)[0][0]
    return GgufFacts(
        architecture=kind.model_type,
        parameters=sizes.total(),
        quantization=MIXTURES.get(file.integer("general.file_type", 0, least=0), usual),
        context=file.integer(f"{own}context_length"),
        hidden=file.integer(f"{own}embedding_length"),
        vocabulary=file.tensors["token_embd.weight"].shape[0],
        chat_template=_text(file, "tokenizer.chat_template"),
        pooling=POOLING.get(file.integer(f"{own}pooling_type", 0, least=0)),
        license=_text(file, "general.license"),
    )


def _text(file: GgufFile, key: str) -> str | None:
    return file.text(key) if key in file.metadata else None
