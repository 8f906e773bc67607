"""The tokenizer of a GGUF file -> tokenizer.json and tokenizer_config.json of Hugging Face. Imports no MLX.

Byte-level BPE names the way in which it splits text first (`tokenizer.ggml.pre`); a name that is not known here is
refused, because any other way gives other token ids. SentencePiece's BPE (model `llama`) has scores in place of merges.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from parallm.model.gguf.file import GgufFile
from parallm.model.gguf.splitting import SPLITTINGS, Splitting

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Types of tokens in `tokenizer.ggml.token_type`."""
WHOLE = "tokenizer.huggingface.json"
"""A whole tokenizer.json."""
SPACE = "▁"
ENDS = frozenset(
    {
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>"),
        *("<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>"),
    }
)
"""Control tokens that end an answer in llama.cpp whether or not a key names them."""
SPECIALS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
"""Names in tokenizer_config.json, and what `tokenizer.ggml.*_token_id` calls them."""


def read_tokenizer(file: GgufFile, beside: Path) -> dict[str, str]:
    """Contents of tokenizer.json and tokenizer_config.json, by these names.

    `beside` is a tokenizer.json next to the file, which is taken where the file's way to split texts is not known.
    Raises ModelError for what is not known, and for what is no tokenizer.
    """
    vocabulary = _Vocabulary(file)
    if WHOLE in file.metadata:
        content = file.text(WHOLE)
    else:
        kind = file.text("tokenizer.ggml.model")
        if kind == "gpt2" and file.text("tokenizer.ggml.pre", "") not in SPLITTINGS and beside.is_file():
            content = beside.read_text()
        elif kind == "gpt2":
            content = json.dumps(_byte_level(vocabulary), ensure_ascii=False)
        elif kind == "llama":
            content = json.dumps(_sentencepiece(vocabulary), ensure_ascii=False)
        else:
            raise file.error(f"its tokenizer is of the kind {kind[:100]!r}, and only gpt2 and llama are known here")
    try:
        tokenizer = Tokenizer.from_str(content)
    except Exception as error:  # what Rust raises has no other class
        raise file.error(f"its tokenizer is none: {str(error)[:200]}") from error
    vocabulary.check(tokenizer)
    settings = json.dumps(_settings(vocabulary), ensure_ascii=False, indent=2)
    return {"tokenizer.json": content, "tokenizer_config.json": settings}


def end_tokens(file: GgufFile) -> list[int]:
    """Ids of the tokens that end an answer, that of a text first. Raises ModelError for a file without any."""
    vocabulary = _Vocabulary(file)
    named = [vocabulary.special(name) for name in ("eos", "eot", "eom")]
    marked = [
        token
        for token, kind in enumerate(vocabulary.kinds)
        if kind in (CONTROL, USER_DEFINED) and vocabulary.tokens[token] in ENDS
    ]
    ends = list(dict.fromkeys(token for token in (*named, *marked) if token is not None))
    if not ends:
        raise file.error("its tokenizer names no token that ends a text (tokenizer.ggml.eos_token_id)")
    return ends


class _Vocabulary:
    """Tokens of a file with their types."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        tokens = file.metadata.get("tokenizer.ggml.tokens")
        if not isinstance(tokens, list) or not tokens:
            raise file.error("it has no list of tokens (tokenizer.ggml.tokens)")
        self.tokens = list(tokens)
        self.kinds: list[int] = self._numbers("tokenizer.ggml.token_type", NORMAL)

    def scores(self) -> Sequence[float]:
        return self._numbers("tokenizer.ggml.scores", None)

    def merges(self) -> list[tuple[str, str]]:
        """Pairs of tokens, the first to be merged first."""
        found = self.file.metadata.get("tokenizer.ggml.merges")
        if not isinstance(found, list):
            raise self.file.error("it has no list of merges (tokenizer.ggml.merges)")
        pairs = [tuple(merge.split(" ")) for merge in found]
        if broken := [merge for merge, pair in zip(found, pairs, strict=True) if len(pair) != 2]:
            raise self.file.error(f"the merge {broken[0][:100]!r} is not of two tokens; the file is damaged")
        return pairs  # type: ignore[return-value]  # all are pairs

    def special(self, name: str) -> int | None:
        """The id of a special token. Raises ModelError if there is no such token."""
        key = f"tokenizer.ggml.{name}_token_id"
        if key not in self.file.metadata:
            return None
        if (token := self.file.integer(key, least=0)) >= len(self.tokens):
            raise self.file.error(f"{key} is {token}, and there are {len(self.tokens)} tokens")
        return token

    def spell_spaces(self) -> None:
        """Spell tokens of spaces alone as all others are spelled, so that they are merged as well."""
        for token, text in enumerate(self.tokens):
            if text and not text.strip(" "):
                self.tokens[token], self.kinds[token] = SPACE * len(text), NORMAL

    def flag(self, name: str, default: bool) -> bool:
        value = self.file.metadata.get(f"tokenizer.ggml.{name}", default)
        if not isinstance(value, bool):
            raise self.file.error(f"tokenizer.ggml.{name} is {str(value)[:100]!r}, and should be true or false")
        return value

    def adds_bos(self) -> bool:
        if self.file.text("tokenizer.ggml.model") == "llama":
            return self.flag("add_bos_token", True)
        splitting = SPLITTINGS.get(self.file.text("tokenizer.ggml.pre", ""))
        return self.flag("add_bos_token", splitting is not None and splitting.adds_bos)

    def adds_eos(self) -> bool:
        return self.flag("add_eos_token", False)

    def check(self, tokenizer: Any) -> None:
        """Raise ModelError for a tokenizer.json whose special tokens are not those of the file."""
        for name in SPECIALS.values():
            token = self.special(name)
            if token is not None and tokenizer.id_to_token(token) != self.tokens[token]:
                raise self.file.error(
                    f"the {name} token is {self.tokens[token][:100]!r}, and not so in its tokenizer.json"
                )

    def _numbers(self, key: str, default: int | None) -> Any:
        found = self.file.metadata.get(key)
        if found is None and default is not None:
            return [default] * len(self.tokens)
        if not isinstance(found, np.ndarray) or len(found) != len(self.tokens):
            raise self.file.error(f"it has no {key} for each of its {len(self.tokens)} tokens")
        return found.tolist()


def _byte_level(vocabulary: _Vocabulary) -> dict[str, Any]:
    name = vocabulary.file.text("tokenizer.ggml.pre", "")
    if (splitting := SPLITTINGS.get(name)) is None:
        raise vocabulary.file.error(
            f"its tokenizer splits texts in the way {name[:100]!r} (tokenizer.ggml.pre), which is not known here, so "
            "that token ids would be wrong; put the tokenizer.json of the model beside the file"
        )
    model = {
        "type": "BPE",
        "vocab": _ids(vocabulary),
        "merges": vocabulary.merges(),
        "ignore_merges": splitting.ignores_merges,
    }
    return _whole(
        vocabulary,
        model=model,
        normalizer={"type": "NFC"} if splitting.nfc else None,
        pre_tokenizer={"type": "Sequence", "pretokenizers": _pre_tokenizers(splitting)},
        decoder=_BYTE_LEVEL,
    )


_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}


def _pre_tokenizers(splitting: Splitting) -> list[dict[str, Any]]:
    pattern = {"type": "Split", "pattern": {"Regex": splitting.pattern}, "behavior": "Isolated", "invert": False}
    digits = [{"type": "Digits", "individual_digits": True}] if splitting.digits else []
    return [*digits, pattern, _BYTE_LEVEL]


def _sentencepiece(vocabulary: _Vocabulary) -> dict[str, Any]:
    is_gemma = vocabulary.file.architecture.startswith("gemma")
    if vocabulary.flag("remove_extra_whitespaces", False):
        raise vocabulary.file.error("its tokenizer removes spaces (remove_extra_whitespaces), which is not known here")
    order: Sequence[float] = vocabulary.scores()
    if is_gemma:
        vocabulary.spell_spaces()
        order = range(0, -len(vocabulary.tokens), -1)  # its scores do not tell in which order it merges
    adds_space = vocabulary.flag("add_space_prefix", True)
    unknown = vocabulary.special("unknown")
    if unknown is None:
        unknown = next((token for token, kind in enumerate(vocabulary.kinds) if kind == UNKNOWN), None)
    model = {
        "type": "BPE",
        "vocab": _ids(vocabulary),
        "merges": _merges(vocabulary, order),
        "unk_token": None if unknown is None else vocabulary.tokens[unknown],
        "fuse_unk": True,
        "byte_fallback": BYTE in vocabulary.kinds,
    }
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    prefix = [{"type": "Prepend", "prepend": SPACE}] if adds_space else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if adds_space else []
    back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    return _whole(
        vocabulary,
        model=model,
        normalizer={"type": "Sequence", "normalizers": [*prefix, spaces]},
        pre_tokenizer=None,
        decoder={"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
    )


def _ids(vocabulary: _Vocabulary) -> dict[str, int]:
    """Ids by tokens; rows of the embeddings that stand for no text have none. Raises ModelError for a token that is
    there twice."""
    pairs = zip(vocabulary.tokens, vocabulary.kinds, strict=True)
    ids = {token: index for index, (token, kind) in enumerate(pairs) if kind != UNUSED}
    if len(ids) < len(vocabulary.tokens) - list(vocabulary.kinds).count(UNUSED):
        raise vocabulary.file.error("a token of its list is there twice; the file is damaged")
    return ids


def _merges(vocabulary: _Vocabulary, order: Sequence[float]) -> list[tuple[str, str]]:
    """Pairs of tokens that make a third one, that with the highest number in `order` first, of several with the longest
    first part, as transformers converts SentencePiece's models."""
    pieces = list(zip(vocabulary.tokens, vocabulary.kinds, order, strict=True))
    parts = {token for token, kind, _ in pieces if kind in (NORMAL, USER_DEFINED)}
    pairs = [
        (-number, -cut, token[:cut], token[cut:])
        for token, kind, number in pieces
        if kind == NORMAL
        for cut in range(1, len(token))
        if token[:cut] in parts and token[cut:] in parts
    ]
    return [(left, right) for *_, left, right in sorted(pairs, key=lambda pair: pair[:2])]


def _whole(vocabulary: _Vocabulary, **parts: Any) -> dict[str, Any]:
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(_added(vocabulary)),
        "post_processor": _post_processor(vocabulary),
        **parts,
    }


def _added(vocabulary: _Vocabulary) -> Iterator[dict[str, Any]]:
    """Tokens that are found in texts before anything else."""
    # of Phi-3 the keys do not say that its control tokens take the spaces after them
    takes_spaces = vocabulary.file.architecture == "phi3" and vocabulary.file.text("tokenizer.ggml.model") == "llama"
    for index, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True)):
        if kind not in (CONTROL, USER_DEFINED) and not (kind == UNKNOWN and vocabulary.special("unknown") == index):
            continue
        yield {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": takes_spaces and kind != UNKNOWN and token not in ("<s>", "<unk>", "<|endoftext|>"),
            "normalized": False,
            "special": kind != USER_DEFINED,
        }


def _post_processor(vocabulary: _Vocabulary) -> dict[str, Any] | None:
    """What puts tokens at the beginning and the end of a text."""
    bos, eos = vocabulary.special("bos"), vocabulary.special("eos")
    before = [] if bos is None or not vocabulary.adds_bos() else [bos]
    after = [] if eos is None or not vocabulary.adds_eos() else [eos]
    if not before and not after:
        return None

    def around(text: str, kind: int) -> list[dict[str, Any]]:
        def marks(tokens: Iterable[int]) -> list[dict[str, Any]]:
            return [{"SpecialToken": {"id": vocabulary.tokens[token], "type_id": kind}} for token in tokens]

        return [*marks(before), {"Sequence": {"id": text, "type_id": kind}}, *marks(after)]

    names = {vocabulary.tokens[token]: token for token in (*before, *after)}
    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": [*around("A", 0), *around("B", 1)],
        "special_tokens": {name: {"id": name, "ids": [token], "tokens": [name]} for name, token in names.items()},
    }


def _settings(vocabulary: _Vocabulary) -> dict[str, Any]:
    """The content of tokenizer_config.json."""
    file = vocabulary.file
    ids = {name: vocabulary.special(key) for name, key in SPECIALS.items()}
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": vocabulary.adds_bos(),
        "add_eos_token": vocabulary.adds_eos(),
        **{name: vocabulary.tokens[token] for name, token in ids.items() if token is not None},
    }
    if templates := dict(_templates(file)):
        only = templates.get("default") if len(templates) == 1 else None
        settings["chat_template"] = only or [{"name": name, "template": text} for name, text in templates.items()]
    return settings


def _templates(file: GgufFile) -> Iterator[tuple[str, str]]:
    """Chat templates by their names."""
    if "tokenizer.chat_template" in file.metadata:
        yield "default", file.text("tokenizer.chat_template")
    names = file.metadata.get("tokenizer.chat_templates", [])
    if not isinstance(names, list):
        raise file.error("tokenizer.chat_templates should be a list of names")
    yield from ((name, file.text(f"tokenizer.chat_template.{name}")) for name in names)
