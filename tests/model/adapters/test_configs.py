"""What configs of adapters may say: each refusal names the key and its value."""

import json
from typing import Any

import pytest

from parallm.errors import AdapterError
from parallm.model.adapters.configs import MlxConfig, PeftConfig, parse_config

MLX = {"num_layers": 2, "lora_parameters": {"rank": 4, "scale": 20.0, "dropout": 0.1, "keys": ["q_proj"]}}
PEFT = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "target_modules": "any|(text)*"}


def parsed(config: dict[str, Any], **changes: Any) -> MlxConfig | PeftConfig:
    return parse_config(json.dumps(config | changes))


def test_usual_configs_are_read() -> None:
    mlx = parsed(MLX)
    assert isinstance(mlx, MlxConfig)
    assert (mlx.fine_tune_type, mlx.lora_parameters.rank, mlx.lora_parameters.scale) == ("lora", 4, 20.0)
    peft = parsed(PEFT, rank_pattern={"q_proj": 5, "^model.layers.0.mlp.down_proj": 2, ".*v_proj": 3}, alpha_pattern={})
    assert isinstance(peft, PeftConfig)
    assert (peft.r, peft.lora_alpha, peft.use_rslora, peft.use_dora) == (4, 8.0, False, False)
    assert peft.rank_pattern == {"q_proj": 5, "^model.layers.0.mlp.down_proj": 2, ".*v_proj": 3}


@pytest.mark.parametrize(
    ("key", "text", "reason"),
    [
        ("scale", "-1", "is -1: it should be greater than 0"),
        ("scale", "0", "is 0: it should be greater than 0"),
        ("scale", "1e999", "is Infinity: it should be a finite number"),
        ("scale", "1" + "0" * 400, r"is 1000.*\.\.\.: it"),
        ("scale", "1" + "0" * 5000, "is no JSON"),
        ("scale", "NaN", "NaN is no number of JSON"),
        ("scale", "null", "is null: it should be a valid number"),
        ("scale", '"20"', 'is "20": it should be a valid number'),
        ("scale", "true", "is true: it should be a valid number"),
        ("rank", '"16"', 'is "16": it should be a valid integer'),
        ("rank", "0", "is 0: it should be greater than or equal to 1"),
        ("rank", "-4", "is -4: "),
        ("rank", "4.5", "is 4.5: it should be a valid integer"),
        ("rank", "1" + "0" * 400, r"is 1000.*: it should be less than or equal to 65536"),
        ("dropout", "5", "is 5: it should be less than 1"),
        ("dropout", "-1", "is -1: it should be greater than or equal to 0"),
        ("dropout", "1", "is 1: it should be less than 1"),
    ],
)
def test_values_of_mlx_lm_that_mean_nothing_are_refused(key: str, text: str, reason: str) -> None:
    parameters = ", ".join(f'"{name}": {text if name == key else value}' for name, value in PARAMETERS.items())
    with pytest.raises(AdapterError, match=reason) as caught:
        parse_config(f'{{"lora_parameters": {{{parameters}}}}}')
    assert "no number" in str(caught.value) or "no JSON" in str(caught.value) or key in str(caught.value)
    assert len(str(caught.value)) < 200


PARAMETERS = {"rank": "4", "scale": "20.0", "dropout": "0.0"}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"r": "16"}, r'^r in adapter_config.json is "16": it should be a valid integer'),
        ({"lora_alpha": -1}, "lora_alpha in adapter_config.json is -1"),
        ({"lora_alpha": None}, "lora_alpha in adapter_config.json is null"),
        ({"lora_dropout": 1.5}, "lora_dropout in adapter_config.json is 1.5: it should be less than 1"),
        ({"use_rslora": "yes"}, "use_rslora in adapter_config.json is .yes.: it should be a valid boolean"),
        ({"use_dora": 1}, "use_dora in adapter_config.json is 1"),
        ({"peft_type": "LOHA"}, "peft_type in adapter_config.json is .LOHA.: it should be .LORA."),
        ({"peft_type": None}, "peft_type in adapter_config.json is null"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern in adapter_config.json is .*valid dictionary"),
        ({"rank_pattern": {"q_proj": "8"}}, r"rank_pattern\.q_proj in adapter_config.json is .8."),
        ({"rank_pattern": {"q_proj": 0}}, r"rank_pattern\.q_proj in adapter_config.json is 0"),
        ({"rank_pattern": {"(x?)?(x?)?": 8}}, r"the key '\(x\?\)\?\(x\?\)\?' of a pattern is an expression"),
        ({"alpha_pattern": {"(a+)+": 8}}, "is an expression that is not read here"),
        ({"alpha_pattern": {"q_proj": None}}, r"alpha_pattern\.q_proj in adapter_config.json is null"),
        ({"alpha_pattern": {"q_proj": "text"}}, r"alpha_pattern\.q_proj in adapter_config.json is .text."),
        ({"alpha_pattern": {"q_proj": [1]}}, r"alpha_pattern\.q_proj in adapter_config.json is \[1\]"),
        ({"alpha_pattern": {"q_proj": 10**400}}, r"alpha_pattern\.q_proj in adapter_config.json is 1000"),
        ({"target_parameters": "mlp.experts.down_proj"}, "target_parameters in .*valid list"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save in .*it replaces whole modules"),
        ({"layer_replication": [[0, 4], [2, 5]]}, "layer_replication in .*it repeats layers of the base"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens in .*after certain tokens only"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights in .*it changes the base, too; save the adapter"),
    ],
)
def test_values_of_peft_that_mean_nothing_here_are_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(AdapterError, match=reason):
        parsed(PEFT, **changes)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"[]", "adapter_config.json is no JSON object"),
        (b"{", "adapter_config.json is no JSON"),
        (b"\xff", "adapter_config.json is no JSON"),
        (b"[" * 100_000, "adapter_config.json is no JSON"),
        (b'{"r": ' * 100_000, "adapter_config.json is no JSON"),
        (b"{}", "adapter_config.json lacks lora_parameters"),
        (b'{"peft_type": "LORA", "r": 2}', "adapter_config.json lacks lora_alpha"),
        (b'{"lora_parameters": {"rank": 2}}', "adapter_config.json lacks lora_parameters.scale"),
        (b'{"fine_tune_type": "full", "lora_parameters": {}}', "fine_tune_type in adapter_config.json is .full."),
    ],
)
def test_what_is_no_config_is_refused(content: bytes, reason: str) -> None:
    with pytest.raises(AdapterError, match=reason):
        parse_config(content)


def test_a_start_that_leaves_the_base_alone_is_fine() -> None:
    for start in (True, False, "gaussian", "eva", "orthogonal", None):
        parsed(PEFT, init_lora_weights=start)
