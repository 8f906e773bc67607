"""config.json and the tokenizer of a model folder -> metadata of a GGUF file. Imports no MLX."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from parallm.errors import ModelError
from parallm.model.gguf.config import (
    DEFAULT_ROPE,
    GEMMA3_PATTERN,
    LARGEST,
    LLAMA3_CONTEXT,
    LLAMA3_HIGH,
    LLAMA3_LOW,
    MODEL_TYPES,
    llama3_factors,
    query_scale,
)
from parallm.model.gguf.file import Value
from parallm.model.gguf.splitting import GPT2, SPLITTINGS, Splitting
from parallm.model.gguf.tokenizer import BYTE, CONTROL, NORMAL, SPECIALS, UNKNOWN, UNUSED, USER_DEFINED, WHOLE

YARN_KEYS = {"rope_type", "type", "factor", "original_max_position_embeddings", "rope_theta"}
UNNAMED = "unnamed"
"""Written for a way to split that has no name: llama.cpp refuses it, where it would guess if there was nothing."""


def write_config(config: Mapping[str, Any], num_tokens: int) -> dict[str, Value]:
    """The metadata of a model with this config.json, in which every key that the model reads has a value.

    `num_tokens` is the number of rows of its embeddings. Raises ModelError for what a GGUF file cannot say.
    """
    model_type = str(config.get("model_type"))
    if model_type not in MODEL_TYPES:
        raise ModelError(f"a {model_type[:100]} is not written as GGUF; known are {', '.join(MODEL_TYPES)}")
    name = MODEL_TYPES[model_type]
    hidden, heads, layers = config["hidden_size"], config["num_attention_heads"], config["num_hidden_layers"]
    head = config.get("head_dim") or hidden // heads
    rotated = int(head * config.get("partial_rotary_factor", 1.0))
    own: dict[str, Value] = {
        "block_count": layers,
        "context_length": config["max_position_embeddings"],
        "embedding_length": hidden,
        "feed_forward_length": config["intermediate_size"],
        "vocab_size": num_tokens,
        "attention.head_count": heads,
        "attention.head_count_kv": config.get("num_key_value_heads") or heads,
        "attention.key_length": head,
        "attention.value_length": head,
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.dimension_count": rotated,
        "rope.freq_base": float(config["rope_theta"]),
    }
    if name in LARGEST:
        own |= _of_gemma(config, name, head)
    if name == "phi3":
        own["attention.sliding_window"] = config.get("sliding_window") or 0
        own["rope.scaling.original_context_length"] = config.get(
            "original_max_position_embeddings", config["max_position_embeddings"]
        )
    own |= _of_scaling(config, name)
    return {"general.architecture": name} | {f"{name}.{key}": value for key, value in own.items()}


def _of_gemma(config: Mapping[str, Any], name: str, head: int) -> dict[str, Value]:
    layers, hidden, heads = config["num_hidden_layers"], config["hidden_size"], config["num_attention_heads"]
    usual = query_scale(name, layers, hidden, heads, head)
    if (scale := config.get("query_pre_attn_scalar", usual)) != usual:
        raise ModelError(f"query_pre_attn_scalar={scale} of config.json cannot be said in GGUF, which takes {usual}")
    if name == "gemma2":
        return {
            "attn_logit_softcapping": float(config.get("attn_logit_softcapping", 50.0)),
            "final_logit_softcapping": float(config.get("final_logit_softcapping", 30.0)),
            "attention.sliding_window": config.get("sliding_window", 4096),
        }
    pattern = config.get("sliding_window_pattern", GEMMA3_PATTERN)
    if pattern == 1:
        return {}
    return {
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": pattern,
        "rope.freq_base_swa": float(config.get("rope_local_base_freq", DEFAULT_ROPE)),
    }


def _of_scaling(config: Mapping[str, Any], name: str) -> dict[str, Value]:
    scaling = config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "linear":
        return {"rope.scaling.type": "linear", "rope.scaling.factor": float(scaling["factor"])}
    if kind == "yarn" and scaling.keys() <= YARN_KEYS:
        return {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": float(scaling["factor"]),
            "rope.scaling.original_context_length": scaling["original_max_position_embeddings"],
        }
    if kind == "llama3" and name == "llama":
        expected = {"low_freq_factor": LLAMA3_LOW, "high_freq_factor": LLAMA3_HIGH}
        expected["original_max_position_embeddings"] = LLAMA3_CONTEXT
        if all(scaling.get(key, value) == value for key, value in expected.items()):
            return {}  # said by the tensor rope_freqs
    if kind in ("longrope", "su") and name == "phi3":
        positions = config["max_position_embeddings"]
        trained = config.get("original_max_position_embeddings", positions)
        factor = math.sqrt(1 + math.log(positions / trained) / math.log(trained)) if positions > trained else 1.0
        return {"rope.scaling.type": "longrope", "rope.scaling.attn_factor": factor}
    if kind == "default":
        return {}
    raise ModelError(f"rope_scaling={scaling} of config.json is not written as GGUF")


def rotary_factors(config: Mapping[str, Any]) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """Tensors that say how rotary positions are scaled, by their names."""
    scaling = config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind == "llama3":
        head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        return {"rope_freqs.weight": llama3_factors(head, config["rope_theta"], scaling["factor"])}
    if kind in ("longrope", "su"):
        return {
            f"rope_factors_{length}.weight": np.array(scaling[f"{length}_factor"], np.float32)
            for length in ("long", "short")
        }
    return {}


def write_tokenizer(folder: Path, config: Mapping[str, Any], rows: int) -> dict[str, Value]:
    """The metadata of the tokenizer in a model folder, for `rows` rows of embeddings. Raises ModelError for a tokenizer
    that is neither byte-level nor SentencePiece's BPE."""
    content = (folder / "tokenizer.json").read_text(encoding="utf-8")
    whole, settings = json.loads(content), _read_settings(folder)
    tokens = _TokenList(folder, whole, rows)
    named = {key: _token_id(tokens, settings.get(name)) for name, key in SPECIALS.items()}
    ends = config.get("eos_token_id")
    ends = [ends] if isinstance(ends, int) else list(ends or ())
    if named["eos"] is None or (ends and named["eos"] not in ends):
        named["eos"] = ends[0] if ends else None
    named["eot"] = next((end for end in ends if end != named["eos"]), None)
    probe = Tokenizer.from_str(content).encode("a").ids
    return {
        **tokens.metadata(whole),
        **{f"tokenizer.ggml.{key}_token_id": token for key, token in named.items() if token is not None},
        "tokenizer.ggml.add_bos_token": probe[0] == named["bos"],
        "tokenizer.ggml.add_eos_token": probe[-1] == named["eos"],
        WHOLE: content,
        **_write_templates(folder, settings),
    }


class _TokenList:
    """Tokens of a tokenizer.json by their ids."""

    def __init__(self, folder: Path, whole: Mapping[str, Any], rows: int) -> None:
        self._folder = folder
        self.ids: dict[str, int] = dict(whole["model"]["vocab"]) if whole["model"]["type"] == "BPE" else {}
        added = {token["content"]: token for token in whole["added_tokens"]}
        self.ids |= {text: token["id"] for text, token in added.items()}
        count = max(rows, *(token + 1 for token in self.ids.values())) if self.ids else 0
        self.tokens = [f"[PAD{token}]" for token in range(count)]
        self.kinds = [UNUSED] * count
        for text, token in self.ids.items():
            self.tokens[token] = text
            self.kinds[token] = NORMAL if text not in added else CONTROL if added[text]["special"] else USER_DEFINED

    def metadata(self, whole: Mapping[str, Any]) -> dict[str, Value]:
        model, text = whole["model"], json.dumps(whole.get("pre_tokenizer"))
        merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model.get("merges", ())]
        if model["type"] != "BPE" or not ("ByteLevel" in text or model.get("byte_fallback")):
            raise ModelError(
                f"{self._folder}: a tokenizer of the kind {model['type']} is not written as GGUF; known are byte-level "
                "and SentencePiece's BPE"
            )
        if "ByteLevel" in text:
            found: dict[str, Value] = {
                "model": "gpt2",
                "pre": _named_splitting(whole),
                "merges": [" ".join(pair) for pair in merges],
            }
        else:
            found = self._of_sentencepiece(model, merges, whole)
        found |= {"tokens": self.tokens, "token_type": np.array(self.kinds, np.int32)}
        return {f"tokenizer.ggml.{key}": value for key, value in found.items()}

    def _of_sentencepiece(
        self, model: Mapping[str, Any], merges: Sequence[Sequence[str]], whole: Mapping[str, Any]
    ) -> dict[str, Value]:
        """Scores fall from the first merge on; tokens that no merge makes come last."""
        scores = np.full(len(self.tokens), -float(len(merges)), np.float32)
        for rank, pair in reversed(list(enumerate(merges))):
            scores[self.ids["".join(pair)]] = -float(rank)
        for text, token in self.ids.items():
            if text == model.get("unk_token"):
                self.kinds[token] = UNKNOWN
            elif len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
                self.kinds[token] = BYTE
        has_prefix = "Prepend" in json.dumps(whole.get("normalizer")) or "Metaspace" in json.dumps(
            whole.get("pre_tokenizer")
        )
        return {"model": "llama", "pre": "default", "scores": scores, "add_space_prefix": has_prefix}


def _named_splitting(whole: Mapping[str, Any]) -> str:
    """The name of the way in which a tokenizer.json splits texts."""
    parts = whole["pre_tokenizer"].get("pretokenizers", [whole["pre_tokenizer"]])
    patterns = [part["pattern"].get("Regex") for part in parts if part["type"] == "Split"]
    patterns += [GPT2 for part in parts if part["type"] == "ByteLevel" and part["use_regex"]]
    found = Splitting(
        pattern="".join(map(str, patterns)),
        digits=any(part["type"] == "Digits" and part["individual_digits"] for part in parts),
        nfc=(whole.get("normalizer") or {}).get("type") == "NFC",
        ignores_merges=bool(whole["model"].get("ignore_merges")),
    )
    form = (found.pattern, found.digits, found.nfc, found.ignores_merges)
    named = {
        (one.pattern, one.digits, one.nfc, one.ignores_merges): name for name, one in reversed(list(SPLITTINGS.items()))
    }
    return named.get(form, UNNAMED)


def _read_settings(folder: Path) -> Mapping[str, Any]:
    path = folder / "tokenizer_config.json"
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def _token_id(tokens: _TokenList, named: Any) -> int | None:
    """The id of a token that tokenizer_config.json names."""
    return tokens.ids.get(named["content"] if isinstance(named, dict) else named)


def _write_templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, Value]:
    """The chat templates of a model folder, the default one by itself."""
    path = folder / "chat_template.jinja"
    found = path.read_text(encoding="utf-8") if path.is_file() else settings.get("chat_template")
    if not isinstance(found, list):
        return {} if found is None else {"tokenizer.chat_template": found}
    texts: dict[str, str] = {one["name"]: one["template"] for one in found}
    others = [name for name in texts if name != "default"]
    own = {f"tokenizer.chat_template.{name}": texts[name] for name in others}
    default = {"tokenizer.chat_template": texts["default"]} if "default" in texts else {}
    return {**default, "tokenizer.chat_templates": others, **own}
