"""Tokenizers of GGUF files give the ids of those that they were made from, on texts made to find differences.

The oracles are built as the models' own tokenizer.json are, with their patterns, and SentencePiece itself.
"""

import io
import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from parallm.errors import ModelError
from parallm.model.gguf.file import read_gguf
from parallm.model.gguf.metadata import UNNAMED, write_tokenizer
from parallm.model.gguf.tokenizer import end_tokens, read_tokenizer
from parallm.model.load import NANO

NUM_TEXTS = 2000
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
GPT_4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIALS = ("<|begin|>", "<|end|>", "<|im_end|>", "<think>")
WORDS = (
    *("the", "The", "THE", "don't", "DON'T", "we'll", "it's", "straße", "naïve", "ﬁnancial", "ΑΒΓ", "привет", "мир"),
    *(
        "你好",
        "世界",
        "こんにちは",
        "カタカナ",
        "안녕하세요",
        "שלום",
        "مرحبا",
        "नमस्ते",
        "ไทย",
        "e\u0301",
        "\u00e9",
        "A\u030a",
        "ǅ",
    ),
    *("0", "12", "123", "1234", "12345678", "٣٤", "½", "Ⅷ", "3.14", "1,000", "def", "f(x)", "x_1", "a/b", "//", "\\n"),
    *(
        "!",
        "?!",
        "...",
        "--",
        "_",
        "#",
        "@user",
        "🙂",
        "👩‍👩‍👧",
        "🇩🇪",
        "\u200b",
        "\u200d",
        "\ufeff",
        "\u00a0",
        "\u3000",
    ),
    *(
        "\n",
        "\n\n",
        "\r\n",
        "\t",
        " ",
        "  ",
        "   ",
        "      ",
        "\x00",
        "\x7f",
        "\u0301",
        "\ud7ff",
        "\U0001f9ff",
        "▁",
        "▁a",
    ),
    *("<|end|>", "<|im_end|>", "<think>", "<|beg", "<", "|>", "<0x0A>", "Ġ", "Ċ", "'", "\u2019s", "''", "\u0660"),
)


def texts(count: int = NUM_TEXTS) -> Iterator[str]:
    """Words and signs side by side, with and without spaces between them."""
    random = np.random.default_rng(0)
    for _ in range(count - len(WORDS)):
        chosen = random.choice(len(WORDS), random.integers(1, 12))
        joints = random.choice(["", " ", " ", "  ", "\n"], len(chosen))
        yield "".join(WORDS[index] + str(joint) for index, joint in zip(chosen, joints, strict=True))
    yield from WORDS


def corpus() -> list[str]:
    return [text for text in texts() if not any(token in text for token in SPECIALS)]


@cache
def byte_level(pattern: str | None, *, digits: bool = False, nfc: bool = False, ignores_merges: bool = False) -> str:
    """The tokenizer.json of a small byte-level BPE, trained on texts like those of the test."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignores_merges))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    split = [] if pattern is None else [pre_tokenizers.Split(Regex(pattern), "isolated")]
    cut = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cut, *split, level])
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIALS[:3]])
    tokenizer.add_tokens([AddedToken(SPECIALS[3], normalized=False)])
    whole = json.loads(tokenizer.to_str())
    del whole["model"]["merges"][-50:]  # tokens that are found only where merges are ignored
    return json.dumps(whole)


Writing = Callable[[gguf.GGUFWriter], None]


def write(path: Path, add: Writing, architecture: str = "llama") -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    add(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def of_bytes(content: str, pre: str) -> Writing:
    """The keys of a byte-level tokenizer, as llama.cpp's converter writes them; two rows have no token."""
    whole = json.loads(content)
    tokens = {index: token for token, index in whole["model"]["vocab"].items()}
    added = {token["id"]: token for token in whole["added_tokens"]}

    def add(writer: gguf.GGUFWriter) -> None:
        count = max(*tokens, *added) + 1
        names = [added[index]["content"] if index in added else tokens[index] for index in range(count)]
        kinds = [(3 if added[index]["special"] else 4) if index in added else 1 for index in range(count)]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list([*names, "[PAD1]", "[PAD2]"])
        writer.add_token_types([*kinds, 5, 5])
        writer.add_token_merges([" ".join(pair) for pair in whole["model"]["merges"]])
        writer.add_bos_token_id(names.index("<|begin|>"))
        writer.add_eos_token_id(names.index("<|end|>"))
        writer.add_add_bos_token(False)

    return add


def tokenizer_of(path: Path) -> Any:
    contents = read_tokenizer(read_gguf(path), path.with_name("tokenizer.json"))
    return Tokenizer.from_str(contents["tokenizer.json"])


FAMILIES: list[tuple[str, str | None, dict[str, bool]]] = [
    ("llama-bpe", LLAMA3, {"ignores_merges": True}),
    ("dbrx", LLAMA3, {}),
    ("qwen2", QWEN2, {"nfc": True}),
    ("gpt-4o", GPT_4O, {}),
    ("tekken", TEKKEN, {"ignores_merges": True}),
    ("gpt-2", None, {}),
    ("smollm", None, {"digits": True}),
]


@pytest.mark.parametrize(("pre", "pattern", "form"), FAMILIES)
def test_ids_are_those_of_the_tokenizer_that_was_converted(
    pre: str, pattern: str | None, form: dict[str, bool], tmp_path: Path
) -> None:
    content = byte_level(pattern, **form)
    found, expected = tokenizer_of(write(tmp_path / "x.gguf", of_bytes(content, pre))), Tokenizer.from_str(content)
    cases = list(texts())
    assert len(cases) == NUM_TEXTS
    wrong = [text for text in cases if found.encode(text).ids != expected.encode(text).ids]
    assert wrong == []
    ids = [expected.encode(text).ids for text in cases]
    assert [found.decode(one) for one in ids] == [expected.decode(one) for one in ids]
    misled = [tokenizer_of(write(tmp_path / "y.gguf", of_bytes(content, name))) for name, *_ in FAMILIES if name != pre]
    for one in misled:
        assert any(one.encode(text).ids != expected.encode(text).ids for text in cases), "the texts tell them apart"


@pytest.mark.parametrize(("pre", "pattern", "form"), FAMILIES)
def test_what_is_written_is_read_again(pre: str, pattern: str | None, form: dict[str, bool], tmp_path: Path) -> None:
    content = byte_level(pattern, **form)
    metadata = written(content, tmp_path)
    assert metadata.pop("tokenizer.huggingface.json") == content
    assert metadata["tokenizer.ggml.pre"] == pre
    found = tokenizer_of(write(tmp_path / "x.gguf", of_metadata(metadata)))
    expected = Tokenizer.from_str(content)
    assert [text for text in texts() if found.encode(text).ids != expected.encode(text).ids] == []


def written(content: str, folder: Path) -> dict[str, Any]:
    (folder / "tokenizer.json").write_text(content, encoding="utf-8")
    settings = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "chat_template": "{{ messages }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return dict(write_tokenizer(folder, {"eos_token_id": None}, 1000))


def of_metadata(metadata: dict[str, Any]) -> Writing:
    def add(writer: gguf.GGUFWriter) -> None:
        for key, value in metadata.items():
            if isinstance(value, bool):
                writer.add_bool(key, value)
            elif isinstance(value, str):
                writer.add_string(key, value)
            elif isinstance(value, int):
                writer.add_uint32(key, value)
            else:
                writer.add_array(key, value.tolist() if isinstance(value, np.ndarray) else value)

    return add


def test_a_way_to_split_without_a_name_is_written_whole_alone(tmp_path: Path) -> None:
    metadata = written((NANO / "tokenizer.json").read_text(), tmp_path)
    assert metadata["tokenizer.ggml.pre"] == UNNAMED
    assert metadata["tokenizer.ggml.eos_token_id"] == 1


def test_an_unknown_way_to_split_needs_the_tokenizer_beside_the_file(tmp_path: Path) -> None:
    content = byte_level(LLAMA3)
    path = write(tmp_path / "x.gguf", of_bytes(content, "of-tomorrow"))
    with pytest.raises(ModelError, match=r"splits texts in the way 'of-tomorrow'.*put the tokenizer.json of the model"):
        tokenizer_of(path)
    (tmp_path / "tokenizer.json").write_text(content, encoding="utf-8")
    assert tokenizer_of(path).encode("a 12 b").ids == Tokenizer.from_str(content).encode("a 12 b").ids
    (tmp_path / "tokenizer.json").write_text((NANO / "tokenizer.json").read_text())
    with pytest.raises(ModelError, match=r"the bos token is '<\|begin\|>', and not so"):
        tokenizer_of(path)


def test_special_tokens_begin_texts_and_end_answers(tmp_path: Path) -> None:
    def changed(writer: gguf.GGUFWriter) -> None:
        of_bytes(byte_level(LLAMA3), "llama-bpe")(writer)
        writer.kv_data[0]["tokenizer.ggml.add_bos_token"].value = True
        writer.kv_data[0].pop("tokenizer.ggml.pre")
        writer.add_tokenizer_pre("llama-bpe")
        writer.add_chat_template([{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}])

    path = write(tmp_path / "x.gguf", changed)
    found = tokenizer_of(path)
    begin, end, im_end = (found.token_to_id(token) for token in SPECIALS[:3])
    assert found.encode("a").ids[0] == begin
    assert found.encode("a", "b").ids.count(begin) == 2
    assert end_tokens(read_gguf(path)) == [end, im_end], "a known end of turns counts without a key"
    settings = json.loads(read_tokenizer(read_gguf(path), path)["tokenizer_config.json"])
    assert settings["eos_token"] == "<|end|>"
    assert settings["chat_template"] == [
        {"name": "default", "template": "a"},
        {"name": "tool_use", "template": "b"},
    ]


@cache
def sentencepiece_model(*, adds_space: bool) -> bytes:
    """A small BPE of SentencePiece, as those of Llama 2, Mistral and Gemma."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text.replace("\x00", "") for text in corpus()),
        model_writer=model,
        model_type="bpe",
        vocab_size=900,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=adds_space,
        split_digits=True,
        allow_whitespace_only_pieces=adds_space,
        control_symbols=["<|end|>"],
        user_defined_symbols=[] if adds_space else ["▁▁", "▁▁▁"],
        minloglevel=2,
    )
    return model.getvalue()


def of_pieces(processor: Any, *, adds_space: bool) -> Writing:
    """The keys of a SentencePiece model, as llama.cpp's converter writes them."""

    def add(writer: gguf.GGUFWriter) -> None:
        kinds = []
        names = []
        for index in range(processor.GetPieceSize()):
            piece = processor.IdToPiece(index)
            kind = 1
            if processor.IsUnknown(index):
                kind = 2
            elif processor.IsControl(index):
                kind = 3
            elif processor.IsByte(index):
                kind = 6
            elif not adds_space and piece in ("▁▁", "▁▁▁"):
                kind, piece = 4, piece.replace("▁", " ")
            kinds.append(kind)
            names.append(piece)
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(names)
        writer.add_token_scores([processor.GetScore(index) for index in range(len(names))])
        writer.add_token_types(kinds)
        writer.add_bos_token_id(processor.bos_id())
        writer.add_eos_token_id(processor.eos_id())
        writer.add_unk_token_id(processor.unk_id())
        writer.add_add_space_prefix(adds_space)

    return add


@pytest.mark.parametrize("architecture", ["llama", "phi3"])
def test_ids_of_a_sentencepiece_model_are_its_own(architecture: str, tmp_path: Path) -> None:
    processor = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model(adds_space=True))
    found = tokenizer_of(write(tmp_path / "x.gguf", of_pieces(processor, adds_space=True), architecture))
    cases = [text.replace("\x00", "") for text in texts(2 * NUM_TEXTS)]
    cases = [text for text in cases if text and not any(mark in text for mark in ("<|end|>", "▁"))]
    assert len(cases) > NUM_TEXTS
    wrong = [text for text in cases if found.encode(text).ids != [processor.bos_id(), *processor.Encode(text)]]
    assert wrong == []
    assert found.encode("a<|end|>").ids[-1] == processor.PieceToId("<|end|>")
    # llama.cpp and transformers put no space back before the first word
    assert [text for text in cases if found.decode(processor.Encode(text)) != text] == []


def test_a_tokenizer_of_gemma_keeps_runs_of_spaces(tmp_path: Path) -> None:
    processor = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model(adds_space=False))
    found = tokenizer_of(write(tmp_path / "x.gguf", of_pieces(processor, adds_space=False), "gemma2"))
    # SentencePiece cuts longer runs into tokens of three, where Gemma has tokens for them
    marks = ("\x00", "<|end|>", "▁", " " * 4)
    cases = [text for text in texts(3 * NUM_TEXTS) if not any(mark in text for mark in marks)]
    assert len(cases) > NUM_TEXTS
    wrong = [text for text in cases if found.encode(text).ids != [processor.bos_id(), *processor.Encode(text)]]
    assert wrong == []
    assert [text for text in cases if found.decode(processor.Encode(text)) != text] == []
    assert found.encode("a  b", add_special_tokens=False).tokens == ["a", "▁▁", "b"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda keys: keys.pop("tokenizer.ggml.model"), "tokenizer.ggml.model is missing"),
        (lambda keys: keys.update({"tokenizer.ggml.model": "t5"}), "its tokenizer is of the kind 't5'"),
        (lambda keys: keys.pop("tokenizer.ggml.merges"), "no list of merges"),
        (lambda keys: keys["tokenizer.ggml.merges"].append("abc"), "the merge 'abc' is not of two tokens"),
        (lambda keys: keys["tokenizer.ggml.merges"].append("zq qz"), "its tokenizer is none: .*zq"),
        (lambda keys: keys["tokenizer.ggml.tokens"].append("x"), "no tokenizer.ggml.token_type for each of its"),
        (lambda keys: keys["tokenizer.ggml.tokens"].__setitem__(7, "a"), "a token of its list is there twice"),
        (lambda keys: keys.update({"tokenizer.ggml.add_bos_token": "yes"}), "add_bos_token is 'yes', and should be"),
        (lambda keys: keys.update({"tokenizer.ggml.bos_token_id": 10**6}), "bos_token_id is 1000000, and there are"),
    ],
)
def test_a_broken_tokenizer_says_what_is_wrong(
    change: Callable[[dict[str, Any]], object], reason: str, tmp_path: Path
) -> None:
    metadata = written(byte_level(LLAMA3), tmp_path)
    del metadata["tokenizer.huggingface.json"]
    (tmp_path / "tokenizer.json").unlink()
    change(metadata)
    path = write(tmp_path / "x.gguf", of_metadata(metadata))
    with pytest.raises(ModelError, match=reason):
        tokenizer_of(path)


def test_a_tokenizer_of_another_kind_is_not_written(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "<|begin|>": 1, "<|end|>": 2}, unk_token="a"))
    with pytest.raises(ModelError, match="a tokenizer of the kind WordLevel is not written as GGUF"):
        written(tokenizer.to_str(), tmp_path)
