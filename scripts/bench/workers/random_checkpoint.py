"""Writes a model folder with random weights and a tokenizer of one word per token, for both sides to load.

The end token lies outside of the model's vocabulary: no side can sample it, so every completion has the full
length and neither has to forbid the token.
"""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

END, PAD = "<end>", "<pad>"


def main(*, folder: str, config: dict[str, Any], has_weights: bool = True) -> dict[str, Any]:
    place = Path(folder)
    on_gpu = torch.cuda.is_available()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16 if on_gpu else torch.float32)
    if has_weights:
        with torch.device("cuda" if on_gpu else "cpu"):
            sizes = {key: value for key, value in config.items() if key != "model_type"}
            LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(place)
    write_config(place, config)
    write_tokenizer(place, config["vocab_size"])
    return {}


def write_config(folder: Path, config: dict[str, Any]) -> None:
    """In the names that all readers know; transformers writes newer ones. The weights' type is torch's default."""
    ends = {"eos_token_id": config["vocab_size"], "pad_token_id": config["vocab_size"] - 1}
    kind = {"architectures": ["LlamaForCausalLM"], "dtype": str(torch.get_default_dtype()).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(config | ends | kind))
    (folder / "generation_config.json").write_text(json.dumps(ends))


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    words = {str(token): token for token in range(vocabulary - 1)} | {PAD: vocabulary - 1, END: vocabulary}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([PAD, END])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": PAD}
    (folder / "tokenizer_config.json").write_text(
        json.dumps(settings | {"clean_up_tokenization_spaces": False, "model_max_length": 8192})
    )
