"""Policy nets against NumPy: layers, recurrent steps, hidden states that travel, rows that do not see each other."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from parallm.errors import ModelError
from parallm.model.policy_nets.config import read_config, read_signature
from parallm.model.policy_nets.net import PolicyNet
from tests.tasks.policy_files import BOX, GRU, LSTM, MLP, Weights, gru, layers, lstm, policy_file, weights_of

CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}
STEPS, ROWS = 10, 3


def make(config: Mapping[str, Any], weights: Weights | None = None, signature: Any = None) -> PolicyNet:
    read = read_config(json.dumps(config))
    text = None if signature is None else json.dumps(signature)
    return PolicyNet(read, read_signature(text, read), policy_file(config, weights))


def observations(*shape: int) -> np.ndarray:
    return np.random.default_rng(5).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("sizes", [{}, {"trunk": [16]}, {"trunk": [16], "actor": [], "critic": []}])
def test_an_mlp_is_that_of_numpy(sizes: dict[str, Any]) -> None:
    config, obs = MLP | sizes, observations(7, 4)
    weights = weights_of(config)
    outputs = make(config).run({"obs": obs})
    shared = layers(weights, "trunk", obs.astype(np.float64), is_last_plain=False)
    np.testing.assert_allclose(outputs["logits"], layers(weights, "actor", shared, is_last_plain=True), **CLOSE)
    np.testing.assert_allclose(outputs["value"], layers(weights, "critic", shared, is_last_plain=True)[:, 0], **CLOSE)


@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_hidden_states_that_travel_through_ten_calls_are_those_of_one_run(name: str) -> None:
    config = LSTM if name == "lstm" else GRU
    weights, net, obs = weights_of(config), make(config), observations(STEPS, ROWS, 4)
    h = c = np.zeros((ROWS, 5))
    travelling: dict[str, np.ndarray] = {}
    for step in range(STEPS):
        x = layers(weights, "trunk", obs[step].astype(np.float64), is_last_plain=False)
        h, c = lstm(weights, x, h, c) if name == "lstm" else (gru(weights, x, h), c)
        outputs = net.run({"obs": obs[step], **travelling})
        travelling = {spec.name: outputs[spec.name] for spec in net.signature.hidden}
        np.testing.assert_allclose(outputs["h"], h, **CLOSE)
        np.testing.assert_allclose(outputs["logits"], layers(weights, "actor", h, is_last_plain=True), **CLOSE)
    # the control: a hidden state that stays behind gives other numbers
    assert np.abs(net.run({"obs": obs[-1]})["h"] - h).max() > 1e-3


def test_an_episode_that_starts_has_a_hidden_state_of_zeros() -> None:
    net, obs = make(LSTM), observations(2, 4)
    states = net.run({"obs": obs})
    hidden = {name: states[name] for name in ("h", "c")}
    started = net.run({"obs": obs, **hidden, "episode_start": np.array([True, False])})
    np.testing.assert_array_equal(started["h"][0], net.run({"obs": obs})["h"][0])
    np.testing.assert_array_equal(started["h"][1], net.run({"obs": obs, **hidden})["h"][1])
    assert (started["h"][1] != net.run({"obs": obs})["h"][1]).any()


@pytest.mark.cpu
@pytest.mark.parametrize("config", [MLP, LSTM, GRU, BOX, MLP | {"actor": [64, 64]}], ids=str)
def test_a_row_alone_is_bit_for_bit_the_row_beside_others(config: dict[str, Any]) -> None:
    net, obs = make(config), observations(34, 4)
    for size in (1, 2, 15, 16, 33):
        alone, together = net.run({"obs": obs[:size]}), net.run({"obs": obs})
        for name, array in alone.items():
            np.testing.assert_array_equal(array, together[name][:size])


def test_standard_deviations_are_a_tensor_or_the_second_half_of_the_outputs() -> None:
    obs = observations(2, 4)
    plain = make(BOX).run({"obs": obs})
    np.testing.assert_array_equal(plain["log_std"], np.tile(weights_of(BOX)["log_std"], (2, 1)))
    config = BOX | {"log_std": "output"}
    computed = make(config).run({"obs": obs})
    whole = layers(weights_of(config), "actor", obs.astype(np.float64), is_last_plain=True)
    np.testing.assert_allclose(np.hstack([computed["mean"], computed["log_std"]]), whole, **CLOSE)
    clipped = make(config | {"log_std_range": [-0.1, 0.1]}).run({"obs": obs})
    np.testing.assert_allclose(clipped["log_std"], np.clip(whole[:, 2:], -0.1, 0.1), **CLOSE)


def test_observations_are_joined_in_the_order_of_the_signature() -> None:
    signature = {
        "inputs": [
            {"name": "speed", "datatype": "FP64", "shape": [-1, 1]},
            {"name": "where", "datatype": "UINT8", "shape": [-1, 3, 1]},
        ]
    }
    net, obs = make(MLP, signature=signature), np.array([[0.5, 1, 2, 3]], np.float32)
    parts = {"where": np.array([[[1], [2], [3]]], np.uint8), "speed": np.array([[0.5]])}
    np.testing.assert_array_equal(net.run(parts)["logits"], make(MLP).run({"obs": obs})["logits"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"actor.0.weight": np.zeros((8, 5), np.float32)}, r"actor.0.weight has shape \[8, 5\]; .* has \[8, 4\]"),
        ({"actor.4.weight": np.zeros((8, 5), np.float32)}, "actor.4.weight is none of this net's, which are actor.0"),
        ({"actor.0.bias": np.full(8, np.nan, np.float32)}, "actor.0.bias holds NaN or infinity"),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(change: Weights, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        make(MLP, weights_of(MLP) | change)


def test_a_missing_tensor_is_named() -> None:
    weights = weights_of(MLP)
    del weights["critic.2.bias"]
    with pytest.raises(ModelError, match=r"critic.2.bias \[1\] is missing; there are actor"):
        make(MLP, weights)
