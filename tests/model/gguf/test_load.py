"""GGUF files as bases: their logits are those of the folder that they were made from."""

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from mlx.utils import tree_flatten, tree_map
from mlx_lm.gguf import convert_to_gguf
from mlx_lm.utils import _get_classes, load_model

from parallm.errors import ModelError
from parallm.model.gguf.facts import read_facts
from parallm.model.gguf.folder import WEIGHTS
from parallm.model.gguf.writer import write_gguf
from parallm.model.load import NANO, check_local, find_folder, load_base, load_shared_model
from parallm.model.lora.single import LoraScaling, single_lora
from parallm.model.quantized import choose_dtype
from parallm.model.settings import LoraSettings, ModelSettings
from parallm.model.shared_model import SharedModel
from parallm.model.task_spec import read_task_spec

TOKENS = [[5, 300, 17, 9, 44, 2, 7, 7]]
Write = Callable[..., Path]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def load(path: Path | str, **settings: Any) -> SharedModel:
    return load_shared_model(ModelSettings(path=str(path), lora=LoraSettings(rank=4), **settings))


def logits(model: SharedModel) -> mx.array:
    return model.head(model.hidden(mx.array(TOKENS), model.make_cache(), None)[0])


def test_nano_as_gguf_is_nano(write_llama: Write) -> None:
    found, expected = load(write_llama()), load("nano")
    assert mx.array_equal(logits(found), logits(expected))
    assert found.sha256 == expected.sha256, "so adapters of the one are those of the other"
    assert found.tokenizer.sha256 == expected.tokenizer.sha256
    assert found.max_context == expected.max_context
    messages = [{"role": "user", "content": "1 + 2"}]
    assert found.tokenizer.encode_prompt(messages) == expected.tokenizer.encode_prompt(messages)


def test_rows_of_queries_and_keys_left_as_they_are_stored_would_be_another_model(
    write_llama: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("parallm.model.gguf.names._rotated_heads", lambda *_: 0)
    assert not mx.allclose(logits(load(write_llama())), logits(load("nano")), atol=0.1)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4"])
def test_matrices_of_any_type_are_what_gguf_py_makes_of_them(write_llama: Write, kind: str) -> None:
    one = GGMLQuantizationType[kind]
    path = write_llama(kind=one)
    base, config = load_base(find_folder(str(path)), "")
    assert config.get("dtype") == (None if kind in ("F16", "BF16") else "bfloat16")
    reference, _ = load_model(NANO)
    read = gguf.GGUFReader(path)
    stored = {tensor.name: tensor for tensor in read.tensors}["blk.2.ffn_up.weight"]
    weight = mx.array(gguf.quants.dequantize(stored.data, one))
    layer = base.model.layers[2].mlp.up_proj
    if "scales" in layer:
        found = mx.dequantize(layer.weight, layer.scales, layer.get("biases"), layer.group_size, layer.bits, layer.mode)
        assert layer.scales.dtype == (mx.uint8 if kind == "MXFP4" else mx.float32)
    else:
        found = layer.weight
    assert mx.array_equal(found.astype(mx.float32), weight)
    error = mx.abs(weight - reference.model.layers[2].mlp.up_proj.weight).max().item()
    assert 0 < error < 0.2


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K", "Q5_0"])
def test_packed_and_unpacked_weights_make_the_same_logits(tmp_path: Path, kind: str) -> None:
    path = wide_llama(tmp_path, GGMLQuantizationType[kind])
    expected = logits(load(path, quantized="unpacked" if kind != "Q6_K" else "auto"))
    assert mx.isfinite(expected).all()
    if kind == "Q6_K":
        base, _ = load_base(find_folder(str(path)), "")
        assert "scales" not in base.model.layers[0].mlp.up_proj
        return
    found, unpacked = (load(path, quantized=how) for how in ("packed", "unpacked"))
    assert mx.allclose(logits(found), expected, atol=1e-4)
    assert found.sha256 == unpacked.sha256, "adapters of the one are those of the other"
    assert gradient(found) == pytest.approx(gradient(unpacked), rel=1e-4)
    assert gradient(found) != 0


def gradient(model: SharedModel) -> float:
    """How the loss changes with B of one adapted layer."""
    target = "model.layers.0.mlp.up_proj"
    inputs, outputs = model.targets[target]

    def loss(b: mx.array) -> mx.array:
        arrays = {f"{target}.lora_a": mx.full((inputs, 4), 0.01), f"{target}.lora_b": b}
        lora = single_lora(arrays, LoraScaling({target: 2.0}, {}))
        hidden_TH = model.hidden(mx.array(TOKENS), model.make_cache(), lora)[0]
        return mx.logsumexp(model.head(hidden_TH), axis=-1).sum()

    return float(mx.abs(mx.grad(loss)(mx.zeros((4, outputs)))).sum().item())


def wide_llama(folder: Path, kind: GGMLQuantizationType) -> Path:
    """A llama of one layer whose matrices are random blocks of 256 weights."""
    path, random = folder / "wide.gguf", np.random.default_rng(0)
    elements, nbytes = gguf.GGML_QUANT_SIZES[kind]
    writer = gguf.GGUFWriter(path, "llama")
    sizes = {"block_count": 1, "context_length": 64, "embedding_length": 256, "feed_forward_length": 512}
    for key, value in (sizes | {"head_count": 4, "layer_norm_rms_eps": 1e-5}).items():
        getattr(writer, f"add_{key}")(value)
    tokenizer = json.loads((NANO / "tokenizer.json").read_text())
    ids = tokenizer["model"]["vocab"] | {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(ids, key=lambda token: ids[token]))
    writer.add_eos_token_id(1)
    writer.add_string("tokenizer.huggingface.json", (NANO / "tokenizer.json").read_text())
    shapes = {"attn_q": (256, 256), "attn_k": (256, 256), "attn_v": (256, 256), "attn_output": (256, 256)}
    shapes |= {"ffn_gate": (512, 256), "ffn_up": (512, 256), "ffn_down": (256, 512)}
    matrices = {f"blk.0.{name}.weight": shape for name, shape in shapes.items()}
    for name, (rows, columns) in (matrices | {"token_embd.weight": (len(ids), 256)}).items():
        blocks = random.integers(0, 256, (rows * columns // elements, nbytes), dtype=np.uint8)
        for at in {"Q6_K": (208,), "Q5_0": (0,)}.get(kind.name, (0, 2)):
            blocks[:, at : at + 2] = np.full((len(blocks), 1), 1e-3, "<f2").view(np.uint8)
        writer.add_tensor(name, blocks.reshape(rows, -1), raw_dtype=kind)
    for name in ("blk.0.attn_norm.weight", "blk.0.ffn_norm.weight", "output_norm.weight"):
        writer.add_tensor(name, np.ones(256, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0} | {
    "original_max_position_embeddings": 8192
}
LONG = {"type": "longrope", "rope_type": "longrope", "long_factor": [1.5] * 4, "short_factor": [1.0] * 4}
YARN = {"rope_type": "yarn", "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"rope_scaling": ROPE}),
    ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    ("mistral", {}),
    ("qwen2", {"head_dim": None}),
    ("qwen3", {"rope_scaling": YARN}),
    ("gemma2", {}),
    ("gemma3_text", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    ("phi3", {"head_dim": None}),
    ("phi3", {"rope_scaling": LONG, "partial_rotary_factor": 0.5, "original_max_position_embeddings": 64}),
]


@pytest.mark.parametrize(("model_type", "changes"), CASES)
def test_an_architecture_comes_back_as_it_was_written(
    model_type: str, changes: dict[str, Any], tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = changed_copy(tiny_model(model_type), changes, tmp_path / "model")
    base, config = load_base(folder, "")
    path = tmp_path / "x.gguf"
    write_gguf(base, config, folder, path, name="x", is_q8_0=False)
    found, expected = load(path), load(folder)
    assert mx.array_equal(logits(found), logits(expected))
    assert found.targets == expected.targets
    reader = gguf.GGUFReader(path)
    arch = reader.fields["general.architecture"].contents()
    known = gguf.get_tensor_name_map(
        next(one for one, name in gguf.MODEL_ARCH_NAMES.items() if name == arch), config["num_hidden_layers"]
    )
    names = {tensor.name for tensor in reader.tensors}
    prefixes = {f"model.{name}" for name in ("embed_tokens", "norm")} | {"lm_head"}
    for target in prefixes | {f"model.layers.0.{name}" for name in ("input_layernorm", "mlp.down_proj")}:
        if f"{target}.weight" in dict_of(base):
            assert known.get_name(f"{target}.weight", (".weight",)) in names


def dict_of(base: Any) -> set[str]:
    return {name for name, _ in tree_flatten(base.parameters())}


def test_biases_of_a_llama_are_ordered_like_their_rows(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    folder = changed_copy(tiny_model("llama"), {"attention_bias": True, "mlp_bias": True}, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    model_class, arguments = _get_classes(config)
    base = model_class(arguments.from_dict(config))
    keys = iter(mx.random.split(mx.random.key(0), 100))
    base.update(tree_map(lambda array: mx.random.normal(array.shape, key=next(keys)) / 8, base.parameters()))
    path = tmp_path / "x.gguf"
    write_gguf(base, config, folder, path, name="x", is_q8_0=False)
    found, _ = load_base(find_folder(str(path)), "")
    assert mx.array_equal(found(mx.array(TOKENS)), base(mx.array(TOKENS)))


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        ("olmo2", {}, "a olmo2 is not written as GGUF; known are llama, qwen2"),
        ("gemma2", {"query_pre_attn_scalar": 24}, "query_pre_attn_scalar=24 of config.json cannot be said in GGUF"),
        ("llama", {"rope_scaling": ROPE | {"low_freq_factor": 2.0}}, "rope_scaling=.* is not written as GGUF"),
        ("gemma2", {"max_position_embeddings": None}, "config.json lacks 'max_position_embeddings'"),
    ],
)
def test_what_a_file_cannot_say_is_not_written(
    model_type: str, changes: dict[str, Any], reason: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    base, config = load_base(changed_copy(tiny_model(model_type), changes, tmp_path / "model"), "")
    config = {key: value for key, value in config.items() if value is not None}
    with pytest.raises(ModelError, match=reason):
        write_gguf(base, config, tmp_path / "model", tmp_path / "x.gguf", name="x", is_q8_0=False)


def test_numbers_beyond_float16_are_not_written_as_such(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    base, config = load_base(tiny_model("llama"), "")
    base.update(tree_map(lambda array: (1e5 * array).astype(mx.float16), base.parameters()))
    with pytest.raises(ModelError, match=r"has numbers beyond the range of float16; set model\.dtype=bfloat16"):
        write_gguf(base, config, tiny_model("llama"), tmp_path / "x.gguf", name="x", is_q8_0=False)


def changed_copy(folder: Path, changes: dict[str, Any], target: Path) -> Path:
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).symlink_to(file)
    config = json.loads((folder / "config.json").read_text())
    (target / "config.json").unlink()
    (target / "config.json").write_text(json.dumps(config | changes))
    return target


def test_norms_of_gemma_are_stored_with_their_one(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    base, config = load_base(tiny_model("gemma2"), "")
    write_gguf(base, config, tiny_model("gemma2"), tmp_path / "x.gguf", name="x", is_q8_0=False)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "x.gguf").tensors}
    expected = np.array(base.model.layers[0].input_layernorm.weight) + 1
    assert np.array_equal(tensors["blk.0.attn_norm.weight"].data, expected)


@pytest.mark.parametrize("model_type", ["llama", "mistral"])
def test_what_mlx_lm_writes_is_read(
    model_type: str, tiny_model: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny_model(model_type)
    config = json.loads((folder / "config.json").read_text()) | {"rope_scaling": None}
    loaded = mx.load(str(folder / "model.safetensors"))
    arrays = {name: array.astype(mx.bfloat16) for name, array in loaded.items()}
    convert_to_gguf(folder, arrays, config, str(tmp_path / "x.gguf"))
    (tmp_path / "tokenizer.json").write_text((folder / "tokenizer.json").read_text())
    file = find_folder(str(tmp_path / "x.gguf"))
    base, _ = load_base(file, "")
    reference, _ = load_model(folder)
    tokens = mx.array(TOKENS)
    assert mx.allclose(base(tokens).astype(mx.float32), reference(tokens), atol=0.3)
    capsys.readouterr()


@pytest.mark.cpu
@pytest.mark.parametrize(("kind", "expected"), [("Q8_0", mx.bfloat16), ("F16", mx.float16), (None, mx.float32)])
def test_a_gpu_does_not_compute_in_the_type_of_exact_scales(
    write_llama: Write, kind: str | None, expected: mx.Dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_llama(kind=None if kind is None else GGMLQuantizationType[kind])
    base, config = load_base(find_folder(str(path)), "")
    assert choose_dtype("auto", base, config) == mx.float32
    monkeypatch.setattr("parallm.model.quantized._on_cpu", lambda: False)
    assert choose_dtype("auto", base, config) == expected
    assert choose_dtype("float32", base, config) == mx.float32


def test_a_folder_of_the_file_lies_in_the_cache(write_llama: Write, tmp_path: Path) -> None:
    path = write_llama()
    folder = find_folder(str(path))
    assert folder.parent == tmp_path / "cache" / "parallm" / "gguf"
    assert (folder / WEIGHTS).resolve() == path
    assert json.loads((folder / "config.json").read_text())["rms_norm_eps"] == 1e-6
    assert find_folder(str(path)) == folder
    (tmp_path / "empty").mkdir()
    path.rename(tmp_path / "empty" / "y.gguf")
    with pytest.raises(ModelError, match=r"no config\.json; name one of its files, such as .*empty/y\.gguf"):
        check_local(str(tmp_path / "empty"))


def test_a_file_without_the_name_of_one_is_known_by_its_content(write_llama: Write, tmp_path: Path) -> None:
    blob = write_llama().rename(tmp_path / "sha256-0123")
    assert mx.array_equal(logits(load(blob)), logits(load("nano")))


def test_a_user_without_a_cache_has_a_folder_as_long_as_the_process(
    write_llama: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/nowhere")
    folder = find_folder(str(write_llama()))
    assert folder.parent.name.startswith("parallm-gguf-")
    assert (folder / WEIGHTS).is_file()


def test_a_full_disk_says_where_else_to_write(write_llama: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_llama()

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(Path, "symlink_to", fail)
        with pytest.raises(ModelError, match=r"No space left.*name another place with XDG_CACHE_HOME"):
            find_folder(str(path))
    assert find_folder(str(path)).is_dir()


def test_a_model_that_makes_vectors_says_so(write_llama: Write) -> None:
    folder = find_folder(str(write_llama(change=lambda writer: writer.add_pooling_type(gguf.PoolingType.LAST))))
    spec = read_task_spec(folder)
    assert spec is not None
    assert (spec.pooling, spec.normalizes) == (("last",), True)


def remove(key: str) -> Callable[[gguf.GGUFWriter], object]:
    return lambda writer: writer.kv_data[0].pop(key)


def put(key: str, value: Any, kind: Any = gguf.GGUFValueType.UINT32) -> Callable[[gguf.GGUFWriter], None]:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0].pop(key, None)
        writer.add_key_value(key, value, kind)

    return change


def drop(name: str) -> Callable[[gguf.GGUFWriter], object]:
    return lambda writer: writer.tensors[0].pop(name)


FLOAT, TEXT, BOOL = gguf.GGUFValueType.FLOAT32, gguf.GGUFValueType.STRING, gguf.GGUFValueType.BOOL
WRONG: list[tuple[Callable[[gguf.GGUFWriter], object], str]] = [
    (put("general.architecture", "mamba", TEXT), "its architecture 'mamba' is not known here; known are llama, qwen2"),
    (put("general.type", "adapter", TEXT), "it is no model but of the type 'adapter'"),
    (put("split.count", 3), "it is one of 3 parts"),
    (put("llama.expert_count", 8), "llama.expert_count is 8, and only 0 is known"),
    (put("llama.attention.causal", False, BOOL), "llama.attention.causal is False"),
    (put("llama.residual_scale", 0.2, FLOAT), "llama.residual_scale is not known here, and may change"),
    (put("llama.block_count", 1 << 31), "llama.block_count is 2147483648, and it has tensors of 4 layers"),
    (
        put("llama.embedding_length", 64),
        "llama.embedding_length asks for 64 columns of token_embd.weight, which has 128",
    ),
    (
        put("llama.attention.head_count", 3),
        "llama.attention.head_count asks for 96 columns of blk.0.attn_output.weight",
    ),
    (put("llama.attention.head_count_kv", 3), "4 heads of 32 numbers cannot share 3"),
    (put("llama.rope.dimension_count", 16), "llama.attention.head_count asks for 64 columns"),
    (put("llama.attention.value_length", 16), "llama.attention.value_length differs"),
    (put("llama.rope.freq_base", float("nan"), FLOAT), "llama.rope.freq_base is nan, and should be a positive number"),
    (put("llama.rope.scaling.type", "dynamic", TEXT), "llama.rope.scaling.type is 'dynamic'"),
    (remove("llama.context_length"), "llama.context_length is missing, and should be an integer"),
    (put("llama.pooling_type", 4), "llama.pooling_type is 4, and a model that ranks"),
    (remove("tokenizer.ggml.tokens"), "it has no list of tokens"),
    (put("tokenizer.ggml.eos_token_id", 999), "tokenizer.ggml.eos_token_id is 999, and there are 375 tokens"),
    (put("tokenizer.ggml.padding_token_id", 999), "tokenizer.ggml.padding_token_id is 999, and the model has 375"),
    (
        put("tokenizer.huggingface.json", (NANO / "tokenizer.json").read_text().replace("<|end|>", "<|fin|>"), TEXT),
        r"the eos token is '<\|end\|>', and not so in its tokenizer.json",
    ),
    (put("tokenizer.huggingface.json", "{", TEXT), "its tokenizer is none: EOF while parsing"),
    (remove("tokenizer.huggingface.json"), r"splits texts in the way 'of-nano-alone' \(tokenizer.ggml.pre\).*put the"),
    (drop("blk.1.ffn_up.weight"), "the tensor blk.1.ffn_up.weight is missing"),
    (lambda writer: writer.add_tensor("blk.0.ssm_a", np.zeros(4, np.float32)), "the tensor blk.0.ssm_a is not known"),
    (
        lambda writer: writer.add_tensor("rope_freqs.weight", np.full(16, 3, np.float32)),
        "rope_freqs.weight holds other rotary factors than those of Llama 3",
    ),
]


@pytest.mark.parametrize(("change", "reason"), WRONG)
def test_what_is_not_known_is_refused_by_name(
    write_llama: Write, change: Callable[[gguf.GGUFWriter], object], reason: str
) -> None:
    path = write_llama(change=change)
    with pytest.raises(ModelError, match=rf"{path}: .*{reason}"):
        check_local(str(path))


def test_a_tensor_of_another_shape_is_refused(write_llama: Write) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.tensors[0].pop("blk.3.ffn_up.weight")
        writer.add_tensor("blk.3.ffn_up.weight", np.zeros((128, 384), np.float32))

    path = write_llama(change=change)
    with pytest.raises(
        ModelError, match=r"'blk.3.ffn_up.weight' has the shape \(128, 384\), the model has \(384, 128\)"
    ):
        load(path)


def test_a_file_that_is_not_there_or_is_no_gguf_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"x\.gguf: cannot be read: .*No such file"):
        check_local(str(tmp_path / "x.gguf"))
    (tmp_path / "x.gguf").write_bytes(b"")
    with pytest.raises(ModelError, match="does not begin as a GGUF file"):
        check_local(str(tmp_path / "x.gguf"))
    for version, reason in ((b"\x00\x00\x00\x03", "big-endian"), (b"\x01\x00\x00\x00", "GGUF of version 1")):
        (tmp_path / "x.gguf").write_bytes(b"GGUF" + version + bytes(64))
        with pytest.raises(ModelError, match=reason):
            check_local(str(tmp_path / "x.gguf"))


def test_the_header_tells_what_a_catalogue_says(write_llama: Write) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_file_type(15)
        writer.add_license("apache-2.0")

    facts = read_facts(write_llama(change=change))
    parameters = sum(array.size for array in mx.load(str(NANO / "model.safetensors")).values())
    assert (facts.architecture, facts.parameters, facts.quantization) == ("llama", parameters, "Q4_K_M")
    assert (facts.context, facts.hidden, facts.vocabulary) == (1024, 128, 375)
    assert facts.chat_template is not None
    assert (facts.pooling, facts.license) == (None, "apache-2.0")
    assert read_facts(write_llama(name="y.gguf", kind=GGMLQuantizationType.Q8_0)).quantization == "Q8_0"
