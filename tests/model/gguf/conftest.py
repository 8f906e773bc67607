"""GGUF files as gguf-py writes them, by a mapping of names that is not ours."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType

from parallm.model.load import NANO

KEYS = {"num_hidden_layers": "block_count", "max_position_embeddings": "context_length"} | {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "head_count",
    "num_key_value_heads": "head_count_kv",
    "rms_norm_eps": "layer_norm_rms_eps",
    "rope_theta": "rope_freq_base",
    "head_dim": "rope_dimension_count",
}
Write = Callable[..., Path]


def permuted(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows of queries or keys as llama.cpp's converter stores them."""
    rows = weight.shape[0]
    return weight.reshape(heads, 2, rows // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


@pytest.fixture
def write_llama(tmp_path: Path) -> Write:
    """Writes the folder of a llama, by default nano, as a GGUF file; `kind` is the type of its matrices, `change` gets
    the writer before anything is written. With `tensors_of_part` it is in several files, of which the first is
    returned."""

    def write(
        folder: Path = NANO,
        name: str = "model.gguf",
        kind: GGMLQuantizationType | None = None,
        change: Callable[[gguf.GGUFWriter], object] = lambda _: None,
        tensors_of_part: int = 0,
    ) -> Path:
        path = tmp_path / name
        config = json.loads((folder / "config.json").read_text())
        writer = gguf.GGUFWriter(path, "llama", split_max_tensors=tensors_of_part)
        for key, value in KEYS.items():
            getattr(writer, f"add_{value}")(config[key])
        add_tokenizer(writer, folder)
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
        for target, array in weights(folder).items():
            stored = names.get_name(target, (".weight",))
            assert stored is not None
            for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
                array = permuted(array, config[heads]) if part in target else array
            if kind is None or array.ndim < 2:
                writer.add_tensor(stored, array)
            else:
                writer.add_tensor(stored, gguf.quants.quantize(array, kind), raw_dtype=kind)
        change(writer)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path.with_name(f"{path.stem}-00001-of-{len(writer.tensors):05}.gguf") if tensors_of_part else path

    return write


def weights(folder: Path) -> Mapping[str, np.ndarray[Any, Any]]:
    loaded = mx.load(str(folder / "model.safetensors"))
    return {name: np.array(array) for name, array in loaded.items()}


def add_tokenizer(writer: gguf.GGUFWriter, folder: Path) -> None:
    """The tokenizer of nano, whole: its way to split texts has no name."""
    text = (folder / "tokenizer.json").read_text()
    tokenizer = json.loads(text)
    ids = tokenizer["model"]["vocab"] | {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    special = {token["content"] for token in tokenizer["added_tokens"]}
    tokens = sorted(ids, key=lambda token: ids[token])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("of-nano-alone")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(0)
    writer.add_string("tokenizer.huggingface.json", text)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    writer.add_chat_template(settings["chat_template"])
