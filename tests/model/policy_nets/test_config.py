"""What config.json and signature.json may say."""

import json
from typing import Any

import pytest

from parallm.errors import ModelError
from parallm.model.policy_nets.config import read_config, read_signature
from tests.tasks.policy_files import BOX, LSTM, MLP


def space(**fields: Any) -> dict[str, Any]:
    return {"action_space": fields}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "transformer"}, "config.json: model_type: Input should be 'mlp_policy'"),
        ({"observation_size": 0}, "observation_size: Input should be greater than or equal to 1"),
        ({"observation_size": "4"}, "observation_size: Input should be a valid integer"),
        ({"actor": [1 << 40]}, "actor.0: Input should be less than or equal to 1048576"),
        ({"colour": "red"}, "colour: Extra inputs are not permitted"),
        ({"rnn_size": 4}, "rnn_size is the size of lstm_policy"),
        ({"squash": True}, "are for a box"),
        (space(type="discrete"), "action_space.discrete.n: Field required"),
        (space(type="tuple"), "action_space: Input tag 'tuple'"),
        (space(type="multi_discrete", nvec=[]), "at least 1 item"),
        (space(type="box", shape=[1 << 20, 1 << 20]), "a box of 1099511627776 numbers; the limit"),
        (space(type="box", shape=[2], low=0.0), "low and high, or neither"),
        (space(type="box", shape=[2], low=0.0, high=[1.0]), "2 numbers with 1 bounds"),
        (space(type="box", shape=[2], low=0.0, high=[1.0, 0.0]), "below its high"),
        ({**BOX, "log_std_range": [-1.0, 1.0]}, "needs log_std"),
        ({**BOX, "log_std": "output", "log_std_range": [1.0, -1.0]}, "lower and the higher"),
    ],
)
def test_a_wrong_configuration_is_refused_by_field(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_config(json.dumps(MLP | change))


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, "NaN"])
def test_what_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        read_config(text)


def test_shapes_are_those_of_pytorchs_modules() -> None:
    assert read_config(json.dumps(LSTM)).shapes() == {
        "trunk.0.weight": (6, 4),
        "trunk.0.bias": (6,),
        "rnn.weight_ih_l0": (20, 6),
        "rnn.weight_hh_l0": (20, 5),
        "rnn.bias_ih_l0": (20,),
        "rnn.bias_hh_l0": (20,),
        "actor.0.weight": (8, 5),
        "actor.0.bias": (8,),
        "actor.2.weight": (3, 8),
        "actor.2.bias": (3,),
        "critic.0.weight": (8, 5),
        "critic.0.bias": (8,),
        "critic.2.weight": (1, 8),
        "critic.2.bias": (1,),
    }


def tensor(name: str, *shape: int, **fields: Any) -> dict[str, Any]:
    return {"name": name, "datatype": "FP32", "shape": list(shape), **fields}


@pytest.mark.parametrize(
    ("inputs", "outputs", "message"),
    [
        ([tensor("obs", -1, 3)], None, "the observations have 3 numbers, and observation_size in config.json is 4"),
        ([tensor("obs", 1, 4)], None, "shape of obs should be -1 and then"),
        ([tensor("obs", -1, -1)], None, "shape of obs should be -1 and then"),
        ([tensor("h", -1, 4)], None, "can be called 'h'"),
        ([tensor("a", -1, 2), tensor("a", -1, 2)], None, "can be called 'a', or two"),
        ([tensor("obs", -1, 4), tensor("h", -1, 9, role="hidden")], None, r"h FP32 \[-1, 9\] is none of this net's"),
        ([tensor("obs", -1, 4)], [tensor("mean", -1, 3)], r"mean FP32 .* which are logits FP32 \[-1, 3\], value"),
        ([tensor("obs", -1, 4, datatype="TEXT")], None, "inputs.0.datatype"),
    ],
)
def test_a_signature_that_is_not_the_nets_is_refused(inputs: Any, outputs: Any, message: str) -> None:
    text = json.dumps({"inputs": inputs} | ({} if outputs is None else {"outputs": outputs}))
    with pytest.raises(ModelError, match=message):
        read_signature(text, read_config(json.dumps(LSTM)))


def test_a_signature_may_say_all_that_the_net_has() -> None:
    config = read_config(json.dumps(LSTM))
    inputs = [tensor("obs", -1, 4), tensor("h", -1, 5, role="hidden"), tensor("c", -1, 5, role="hidden")]
    outputs = [tensor("logits", -1, 3), tensor("value", -1), tensor("h", -1, 5)]
    assert read_signature(json.dumps({"inputs": inputs, "outputs": outputs}), config) == config.signature()
