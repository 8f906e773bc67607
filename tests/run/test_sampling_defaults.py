"""Sampling defaults from generation_config.json and from the configuration."""

import json
from pathlib import Path
from typing import Any

import pytest

from parallm.errors import ConfigError
from parallm.run.sampling_defaults import sampling_defaults
from parallm.server.settings import SamplingDefaults, ServerSettings

QWEN = {
    "do_sample": True,
    "eos_token_id": [151645, 151643],
    "repetition_penalty": 1.05,
    "temperature": 0.7,
    "top_k": 20,
    "top_p": 0.8,
    "transformers_version": "4.37.0",
}


def write(folder: Path, values: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "generation_config.json").write_text(json.dumps(values))
    return folder


def told(model: Path, choice: str, **override: Any) -> dict[str, float]:
    settings = ServerSettings(generation_config=choice, override_generation_config=SamplingDefaults(**override))
    return sampling_defaults(settings, model)


def test_a_model_brings_its_own_where_that_is_asked_for(tmp_path: Path) -> None:
    model, other = write(tmp_path / "model", QWEN), write(tmp_path / "other", {"min_p": 0.1, "max_new_tokens": 2048})
    assert told(model, "parallm") == {}
    assert told(model, "auto") == {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}
    assert told(model, str(other)) == {"min_p": 0.1, "max_new_tokens": 2048}
    assert told(model, "auto", temperature=0.2, min_p=0.05)["temperature"] == 0.2
    assert told(model, "parallm", temperature=0.2) == {"temperature": 0.2}
    assert told(write(model, {"do_sample": False, "top_p": None}), "auto") == {"temperature": 0.0}


def test_a_model_without_the_file_has_none(tmp_path: Path) -> None:
    assert told(tmp_path, "auto") == {}


def test_what_cannot_be_used_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no folder; name one"):
        told(tmp_path, str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"says top_p=1\.5: .*override_generation_config"):
        told(write(tmp_path, {"top_p": 1.5}), "auto")
    with pytest.raises(ConfigError, match="set 0 for greedy"):
        told(write(tmp_path, {"temperature": 0.001}), "auto")
    with pytest.raises(ConfigError, match="is no JSON object"):
        told(write(tmp_path, []), "auto")
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        told(tmp_path, "auto")
