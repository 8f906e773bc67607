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


def main(*, folder: str, config: dict[str, Any]) -> dict[str, Any]:
    place, vocabulary = Path(folder), config["vocab_size"]
    on_gpu = torch.cuda.is_available()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16 if on_gpu else torch.float32)
    with torch.device("cuda" if on_gpu else "cpu"):
        model = LlamaForCausalLM(LlamaConfig(**{key: value for key, value in config.items() if key != "model_type"}))
    model.save_pretrained(place)
    # transformers writes newer names than other readers know
    ends = {"eos_token_id": vocabulary, "pad_token_id": vocabulary - 1}
    (place / "config.json").write_text(json.dumps(config | ends | {"architectures": ["LlamaForCausalLM"]}))
    (place / "generation_config.json").write_text(json.dumps(ends))
    write_tokenizer(place, vocabulary)
    return {}


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
