"""`parallm.export`: what it writes serves elsewhere with the tokens of our engine, and what it refuses."""

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.generate import generate_step
from pydantic import TypeAdapter
from tokenizers import Tokenizer

from parallm.config.schema import ExportConfig
from parallm.device.blas import load_blas
from parallm.device.settings import BlasSettings
from parallm.device.streams import DeviceStreams
from parallm.engine.engine import Engine
from parallm.engine.settings import EngineSettings
from parallm.environment.arithmetic import Arithmetic
from parallm.environment.settings import ArithmeticSettings
from parallm.errors import AdapterError, CheckpointError, ConfigError, ModelError
from parallm.model.adapters.adapter import HEAD, Adapter, make_adapter, with_arrays
from parallm.model.adapters.files import read_adapter, write_mlx, write_peft
from parallm.model.adapters.initial import initial_arrays
from parallm.model.adapters.reward_head import read_reward_model, with_reward_head
from parallm.model.adapters.table import AdapterTable
from parallm.model.load import NANO, load_shared_model
from parallm.model.settings import ModelSettings
from parallm.model.shared_model import SharedModel
from parallm.model.task_spec import read_task_spec
from parallm.run.export import end_texts_with, run_export
from parallm.trainer.saving import write_adapter
from parallm.types import Activation, GenerationRequest, SamplingParams, TaskSpec, TokenEvent

ROOT = Path(__file__).parents[2]
BLAS = load_blas(BlasSettings())
NUM_TOKENS = 24
Export = Callable[..., Path]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def adapter(nano: SharedModel) -> Adapter:
    """Changes what the nano model says, and leaves it words."""
    arrays = initial_arrays(nano.targets, 4, mx.random.key(1))
    keys = iter(mx.random.split(mx.random.key(2), len(nano.targets)))
    arrays |= {
        name: 0.05 * mx.random.normal(array.shape, key=next(keys))
        for name, array in arrays.items()
        if name.endswith("lora_b")
    }
    return make_adapter(arrays, version=7, step=7, rank=4, alpha=8.0)


@pytest.fixture
def export(nano: SharedModel, adapter: Adapter, tmp_path: Path) -> Export:
    """Exports the adapter with the given keys; returns the folder."""

    def run(**keys: Any) -> Path:
        write_mlx(adapter, tmp_path / "trained", num_layers=nano.num_layers)
        values = {"model": {"adapter": str(tmp_path / "trained")}, "output": str(tmp_path / "out"), **keys}
        config = TypeAdapter(ExportConfig).validate_python(values)
        assert run_export(config, tmp_path / "run", BLAS) == 0
        return tmp_path / "out"

    return run


@pytest.fixture(scope="module")
def prompts(nano: SharedModel) -> list[tuple[int, ...]]:
    problems = Arithmetic(ArithmeticSettings(num_train=8, num_test=12)).problems("test")
    return [nano.tokenizer.encode_chat(problem.messages) for problem in problems]


def engine_tokens(
    model: SharedModel, streams: DeviceStreams, adapter: Adapter | None, prompts: Sequence[tuple[int, ...]]
) -> list[list[int]]:
    """Greedy tokens of our engine, all prompts at once."""
    events: list[TokenEvent] = []
    table = AdapterTable()
    if adapter is not None:
        table.publish(adapter)
    engine = Engine(model, table, streams, EngineSettings(), emit=events.extend, report=lambda *_: None)
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    for place, prompt in enumerate(prompts):
        engine.add(GenerationRequest(request_id=str(place), prompt_tokens=prompt, sampling=sampling), False)
    while engine.has_work("serving"):
        engine.step("serving")
    done = {event.request_id: event.completion for event in events if event.completion is not None}
    return [list(done[str(place)].tokens) for place in range(len(prompts))]


def mlx_lm_tokens(model: Any, prompts: Sequence[tuple[int, ...]]) -> list[list[int]]:
    """Greedy tokens of mlx-lm, prompt by prompt."""
    return [
        [int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=NUM_TOKENS)] for prompt in prompts
    ]


def test_mlx_lm_says_with_the_fused_model_what_our_engine_says_with_the_adapter(
    export: Export, nano: SharedModel, streams: DeviceStreams, adapter: Adapter, prompts: list[tuple[int, ...]]
) -> None:
    model, tokenizer = mlx_lm.load(str(export() / "fused"))
    expected = engine_tokens(nano, streams, adapter, prompts)
    assert mlx_lm_tokens(model, prompts) == expected
    assert engine_tokens(nano, streams, None, prompts) != expected
    chat = [{"role": "user", "content": "1 + 1?"}]
    assert tokenizer.apply_chat_template(chat) == mlx_lm.load(str(NANO))[1].apply_chat_template(chat)


def test_the_exported_adapter_says_the_same_in_mlx_lm(
    export: Export, nano: SharedModel, streams: DeviceStreams, adapter: Adapter, prompts: list[tuple[int, ...]]
) -> None:
    model, _ = mlx_lm.load(str(NANO), adapter_path=str(export() / "adapter"))
    assert mlx_lm_tokens(model, prompts) == engine_tokens(nano, streams, adapter, prompts)


def test_our_engine_serves_the_fused_model_too(
    export: Export, nano: SharedModel, streams: DeviceStreams, adapter: Adapter, prompts: list[tuple[int, ...]]
) -> None:
    fused = load_shared_model(ModelSettings(path=str(export() / "fused")))
    assert engine_tokens(fused, streams, None, prompts) == engine_tokens(nano, streams, adapter, prompts)


def test_peft_is_refused_before_anything_is_written_where_names_are_unknown(
    load_tiny: Callable[..., SharedModel], tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    model = load_tiny("falcon_h1")
    made = make_adapter(initial_arrays(model.targets, 4, mx.random.key(1)), version=1, rank=4, alpha=8.0)
    write_mlx(made, tmp_path / "trained", num_layers=model.num_layers)
    values = {"model": {"path": str(tiny_model("falcon_h1")), "adapter": str(tmp_path / "trained")}}
    values["output"] = str(tmp_path / "out")  # type: ignore[assignment]  # one of all keys
    export = TypeAdapter(ExportConfig).validate_python
    with pytest.raises(AdapterError, match=r"of falcon_h1 is not written in PEFT's format.*formats=\[mlx,fused\]"):
        run_export(export(values), tmp_path / "run", BLAS)
    assert not (tmp_path / "out").exists()
    assert run_export(export(values | {"formats": ["mlx"]}), tmp_path / "run", BLAS) == 0
    assert read_adapter(tmp_path / "out" / "adapter").digest == made.digest


def test_a_run_leaves_out_a_format_that_it_cannot_write(
    load_tiny: Callable[..., SharedModel], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = load_tiny("falcon_h1")
    made = make_adapter(initial_arrays(model.targets, 4, mx.random.key(1)), version=1, rank=4, alpha=8.0)
    write_adapter(made, tmp_path, model)
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]
    assert "adapter_peft is left out: an adapter of falcon_h1 is not written in PEFT's format" in caplog.text


def test_both_adapter_formats_hold_the_adapter_to_the_bit(export: Export, adapter: Adapter) -> None:
    output = export()
    hashes = {read_adapter(output / name).digest for name in ("adapter", "adapter_peft")}
    assert hashes == {adapter.digest}


def test_tokenizer_and_chat_template_are_those_of_the_base(export: Export) -> None:
    fused = export() / "fused"
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (fused / name).read_bytes() == (NANO / name).read_bytes()


@pytest.mark.parametrize(
    ("dtype", "bits", "kind"), [("auto", None, "F32"), ("bfloat16", None, "BF16"), ("auto", 8, "Q8_0")]
)
def test_a_gguf_file_is_the_fused_model(
    export: Export,
    nano: SharedModel,
    streams: DeviceStreams,
    adapter: Adapter,
    prompts: list[tuple[int, ...]],
    tmp_path: Path,
    dtype: str,
    bits: int | None,
    kind: str,
) -> None:
    model = {"adapter": str(tmp_path / "trained"), "dtype": dtype}
    path = export(formats=["gguf"], model=model, quantize={"bits": bits}) / "fused.gguf"
    reader = gguf.GGUFReader(path)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    assert stored["blk.3.attn_q.weight"].tensor_type.name == kind
    assert stored["blk.3.attn_norm.weight"].tensor_type.name == "F32"
    assert reader.fields["general.architecture"].contents() == "llama"
    assert reader.fields["general.name"].contents() == "nano"
    fused = load_shared_model(ModelSettings(path=str(path)))
    found, expected = (engine_tokens(one, streams, own, prompts) for one, own in ((fused, None), (nano, adapter)))
    equal = [
        one == other
        for some, others in zip(found, expected, strict=True)
        for one, other in zip(some, others, strict=True)
    ]
    assert sum(equal) / len(equal) > (0.5 if kind != "F32" else 0.999)  # one early difference changes the rest
    assert fused.tokenizer.sha256 == nano.tokenizer.sha256


def test_an_adapter_of_a_gguf_base_is_exported_with_it(export: Export, adapter: Adapter, tmp_path: Path) -> None:
    first = export(formats=["gguf"], quantize={"bits": 8})
    base = first.rename(tmp_path / "first") / "fused.gguf"
    model = {"path": str(base), "adapter": str(tmp_path / "trained")}
    output = export(formats=["fused", "gguf", "peft"], model=model)
    fused, again = (load_shared_model(ModelSettings(path=str(output / name))) for name in ("fused", "fused.gguf"))
    tokens = mx.array([[5, 300, 17, 9]])
    assert mx.array_equal(fused.base(tokens), again.base(tokens))
    assert fused.sha256 == again.sha256
    assert fused.tokenizer.sha256 == again.tokenizer.sha256
    assert read_adapter(output / "adapter_peft").digest == adapter.digest


def test_what_a_gguf_file_cannot_hold_is_refused(
    export: Export, nano: SharedModel, adapter: Adapter, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"quantize\.bits=4: a GGUF file is written with 8 bits"):
        export(formats=["gguf"], quantize={"bits": 4})
    write_mlx(replace(adapter, task=EMBED), tmp_path / "embeds", num_layers=nano.num_layers)
    with pytest.raises(ConfigError, match="cannot be said in a GGUF file; leave gguf out"):
        export(formats=["gguf"], model={"adapter": str(tmp_path / "embeds")})
    assert not (tmp_path / "out").exists()


def test_eight_bits_leave_most_tokens_as_they_were(
    export: Export, nano: SharedModel, streams: DeviceStreams, adapter: Adapter, prompts: list[tuple[int, ...]]
) -> None:
    fused = export(quantize={"bits": 8, "group_size": 32}) / "fused"
    assert json.loads((fused / "config.json").read_text())["quantization"]["bits"] == 8
    model, _ = mlx_lm.load(str(fused))
    pairs = zip(mlx_lm_tokens(model, prompts), engine_tokens(nano, streams, adapter, prompts), strict=True)
    equal = [one == other for some, others in pairs for one, other in zip(some, others, strict=True)]
    assert sum(equal) / len(equal) > 0.5  # one early difference changes the rest of a text


def test_only_the_formats_that_were_asked_for_are_written(export: Export) -> None:
    assert [path.name for path in export(formats=["peft"]).iterdir()] == ["adapter_peft"]


def test_without_an_output_the_runs_own_folder_is_used(export: Export, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.log").write_text("")
    export(output=None)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"run.log", "adapter", "adapter_peft", "fused"}


def test_an_output_that_exists_is_not_touched(export: Export, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("precious")
    with pytest.raises(ConfigError, match=r"output=.*out exists already"):
        export()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_a_full_disk_is_noticed_before_anything_is_written(
    export: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(CheckpointError, match=r"has 1,000 bytes free, about [\d,]+ are needed"):
        export()
    assert not (tmp_path / "out").exists()


def test_a_disk_that_fails_in_the_middle_leaves_nothing(
    export: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("parallm.model.adapters.fuse.write_arrays", fail)
    with pytest.raises(CheckpointError, match="No space left on device"):
        export()
    assert not (tmp_path / "out").exists()


def test_settings_that_contradict_are_refused(export: Export) -> None:
    with pytest.raises(ConfigError, match=r"quantize\.bits=4 is for the fused model"):
        export(formats=["mlx"], quantize={"bits": 4})
    with pytest.raises(ConfigError, match=r"model\.adapter: must be given"):
        export(model={})


def test_a_folder_without_an_adapter_is_refused(export: Export, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="neither an adapter, a checkpoint nor a run"):
        export(model={"adapter": str(tmp_path)})
    assert not (tmp_path / "out").exists()


def test_the_command_says_what_it_wrote(adapter: Adapter, nano: SharedModel, tmp_path: Path) -> None:
    write_mlx(adapter, tmp_path / "trained", num_layers=nano.num_layers)
    result = subprocess.run(
        [sys.executable, "-m", "parallm.export", "model.adapter=trained", "output=out", "model.dtype=bfloat16"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("version 7 of step 7\nadapter for mlx-lm, --adapter-path\n  out/adapter\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "trained"], "and nothing that it did not say"
    assert json.loads((tmp_path / "out" / "fused" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_reward_model_is_exported_in_pefts_format_alone(nano: SharedModel, adapter: Adapter, tmp_path: Path) -> None:
    trained = with_reward_head(adapter, nano, 0)
    write_peft(trained, tmp_path / "trained", nano.name, nano.sha256, model_type="llama")
    values = {"model": {"adapter": str(tmp_path / "trained")}, "output": str(tmp_path / "out")}
    with pytest.raises(AdapterError, match=r"is a reward model: .* export it with formats=\[peft\] alone"):
        run_export(TypeAdapter(ExportConfig).validate_python(values), tmp_path / "run", BLAS)
    assert not (tmp_path / "out").exists()
    run_export(TypeAdapter(ExportConfig).validate_python({**values, "formats": ["peft"]}), tmp_path / "run", BLAS)
    assert read_reward_model(tmp_path / "out" / "adapter_peft", nano).digest == trained.digest


EMBED = TaskSpec(pooling=("mean",), dimensions=(16, 64), prompts={"query": "Q: "}, source="learner=embedding")


@pytest.mark.parametrize("task", [EMBED, replace(EMBED, pooling=("last",), normalizes=False, dimensions=None)])
def test_what_makes_vectors_pools_the_same_after_its_export(
    nano: SharedModel, adapter: Adapter, tmp_path: Path, task: TaskSpec
) -> None:
    write_mlx(replace(adapter, task=task), tmp_path / "trained", num_layers=nano.num_layers)
    values = {"model": {"adapter": str(tmp_path / "trained")}, "output": str(tmp_path / "out")}
    assert run_export(TypeAdapter(ExportConfig).validate_python(values), tmp_path / "run", BLAS) == 0
    fused, peft = tmp_path / "out/fused", tmp_path / "out/adapter_peft"
    found, beside = read_task_spec(fused), read_task_spec(peft)
    assert found is not None
    assert beside is not None
    assert replace(found, source=task.source) == task
    assert replace(beside, source=task.source, dimensions=task.dimensions) == task
    assert read_adapter(tmp_path / "out/adapter").task == task
    assert (peft / "tokenizer.json").is_file(), "sentence-transformers looks for it beside the adapter"
    config = json.loads((peft / "adapter_config.json").read_text())
    assert config["task_type"] == "FEATURE_EXTRACTION"
    assert all(name.startswith("layers.") for name in config["target_modules"]), "as the trunk alone has them"
    for targets in (None, nano.targets):
        again = read_adapter(peft, targets, model_type=nano.model_type)
        assert (again.digest, again.task) == (adapter.digest, task)
    (fused / "modules.json").unlink()
    assert read_task_spec(fused) is None, "it is these files that say it"


def test_the_exported_tokenizer_ends_texts_as_those_of_training(
    nano: SharedModel, adapter: Adapter, tmp_path: Path
) -> None:
    end = nano.tokenizer.end_token
    task = replace(EMBED, pooling=("last",), end_token=end)
    write_mlx(replace(adapter, task=task), tmp_path / "trained", num_layers=nano.num_layers)
    values = {"model": {"adapter": str(tmp_path / "trained")}, "output": str(tmp_path / "out")}
    assert run_export(TypeAdapter(ExportConfig).validate_python(values), tmp_path / "run", BLAS) == 0
    plain = nano.tokenizer.encode("2 + 3")
    for name in ("fused", "adapter_peft"):
        tokenizer = Tokenizer.from_file(str(tmp_path / "out" / name / "tokenizer.json"))
        assert tokenizer.encode("2 + 3").ids == [*plain, end] != list(plain)
        assert tokenizer.encode("2 + 3", add_special_tokens=False).ids == list(plain)
    again = load_shared_model(ModelSettings(path=str(tmp_path / "out" / "fused"), dtype="float32"))
    assert again.tokenizer.encode("2 + 3") == (*plain, end)
    (tmp_path / "out" / "fused" / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"has no tokenizer.json that could; export with formats=\[mlx\]"):
        end_texts_with(tmp_path / "out" / "fused", end)


@pytest.mark.parametrize(("activation", "labels"), [("softmax", "abc"), ("sigmoid", "abc"), ("sigmoid", "a")])
def test_a_classifier_is_exported_with_its_labels(
    nano: SharedModel, adapter: Adapter, tmp_path: Path, activation: Activation, labels: str
) -> None:
    size = nano.targets["model.layers.0.self_attn.q_proj"][0]
    task = TaskSpec(
        task="classify" if len(labels) > 1 else "score",
        pooling=("last",),
        activation=activation,
        labels=tuple(labels),
        normalizes=False,
        source="learner=classifier",
    )
    made = replace(with_arrays(adapter, {**adapter.arrays, HEAD: mx.ones((len(labels), size))}, version=8), task=task)
    write_peft(made, tmp_path / "trained", nano.name, nano.sha256, model_type="llama")
    values = {"model": {"adapter": str(tmp_path / "trained")}, "output": str(tmp_path / "out")}
    with pytest.raises(AdapterError, match=r"export it with formats=\[peft\] alone"):
        run_export(TypeAdapter(ExportConfig).validate_python(values), tmp_path / "run", BLAS)
    run_export(TypeAdapter(ExportConfig).validate_python({**values, "formats": ["peft"]}), tmp_path / "run", BLAS)
    folder = tmp_path / "out/adapter_peft"
    found = read_task_spec(folder)
    assert found is not None
    assert replace(found, source=task.source) == task
    assert read_adapter(folder, nano.targets, model_type="llama").task == task
    assert json.loads((folder / "adapter_config.json").read_text())["task_type"] == "SEQ_CLS"
    (folder / "config.json").unlink()
    assert read_task_spec(folder) is None, "it is this file that says it"


def test_a_task_that_the_files_cannot_say_is_refused(nano: SharedModel, adapter: Adapter, tmp_path: Path) -> None:
    write_mlx(replace(adapter, task=replace(EMBED, template="{query}")), tmp_path / "trained", num_layers=2)
    values = {"model": {"adapter": str(tmp_path / "trained")}, "output": str(tmp_path / "out")}
    with pytest.raises(ModelError, match=r"cannot be said in files .* formats=\[mlx\]"):
        run_export(TypeAdapter(ExportConfig).validate_python(values), tmp_path / "run", BLAS)
    assert not (tmp_path / "out").exists()
