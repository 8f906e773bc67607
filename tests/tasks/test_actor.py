"""Policy nets in memory: versions, seeds, requests that share a pass, what is refused."""

import asyncio
import json
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parallm.device.governor import Governor
from parallm.device.thread import DeviceThread
from parallm.errors import EngineFull, InvalidRequest, ModelError, NotFinite, UnknownModel
from parallm.model.adapters.table import AdapterTable
from parallm.model.policy_nets.net import PolicyNet
from parallm.seeds import mix_all
from parallm.tasks.actor import KEPT_VERSIONS, Actor
from parallm.tensors import Actions, ActRequest
from tests.tasks.policy_files import BOX, DISCRETE, GRU, LSTM, MLP, policy_file, weights_of, write_policy

NUM_ROWS = 34


@pytest.fixture
def device() -> Iterator[DeviceThread]:
    thread = DeviceThread(Governor(serving_share=0.7, engine_share=0.5))
    yield thread
    thread.stop()


@pytest.fixture
def actor(device: DeviceThread) -> Actor:
    return Actor(device, max_names=3, max_waiting=64)


def publish(actor: Actor, config: Mapping[str, Any] | None = MLP, name: str = "agent", **options: Any) -> str:
    card = asyncio.run(actor.publish(name, policy_file(config, **options)))
    return f"{card.name}@{card.version}"


def observations(num_rows: int = NUM_ROWS) -> np.ndarray:
    return np.random.default_rng(3).normal(size=(num_rows, 4)).astype(np.float32)


def seeds(num_rows: int = NUM_ROWS) -> np.ndarray:
    return mix_all(np.full(num_rows, 7, np.uint64), np.arange(num_rows, dtype=np.uint64))


def act(actor: Actor, obs: np.ndarray, row_seeds: np.ndarray | None = None, **fields: Any) -> Actions:
    inputs = {"obs": obs, **fields.pop("inputs", {})}
    row_seeds = seeds(len(obs)) if row_seeds is None else row_seeds
    return asyncio.run(actor.act(ActRequest(model="agent", inputs=inputs, seeds_N=row_seeds, **fields)))


@pytest.mark.parametrize(
    "config", [MLP, BOX, BOX | {"squash": True}, MLP | {"action_space": {"type": "multi_binary", "n": 3}}, GRU], ids=str
)
def test_the_same_seed_gives_the_same_action_in_any_batch(actor: Actor, config: dict[str, Any]) -> None:
    publish(actor, config)
    obs, row_seeds = observations(), seeds()
    together = act(actor, obs, row_seeds)
    order = np.random.default_rng(0).permutation(NUM_ROWS)
    shuffled = act(actor, obs[order], row_seeds[order])
    for row in (0, 1, 17, 33):
        alone = act(actor, obs[row : row + 1], row_seeds[row : row + 1])
        np.testing.assert_array_equal(alone.actions[0], together.actions[row])
        np.testing.assert_allclose(alone.log_probs_N[0], together.log_probs_N[row], atol=1e-5)
    np.testing.assert_array_equal(shuffled.actions, together.actions[order])
    # the control: other seeds give other actions
    assert (act(actor, obs, row_seeds + np.uint64(1)).actions != together.actions).any()


def test_actions_without_chance_are_the_modes(actor: Actor) -> None:
    publish(actor, BOX)
    obs = observations(3)
    mean = asyncio.run(actor.run("agent", {"obs": obs}))["mean"]
    first, second = (act(actor, obs, seeds(3) + np.uint64(n), is_deterministic=True) for n in range(2))
    np.testing.assert_array_equal(first.actions, mean)
    np.testing.assert_array_equal(second.actions, mean)
    assert first.clipped is not None
    np.testing.assert_array_equal(first.clipped, np.clip(mean, np.float32(-0.5), np.array([1, 2], np.float32)))


def test_requests_that_wait_for_the_device_share_a_pass(
    actor: Actor, device: DeviceThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(actor, LSTM)
    obs, is_free, sizes, run = observations(), threading.Event(), [], PolicyNet.run

    def counted(net: PolicyNet, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        sizes.append(len(inputs["obs"]))
        return run(net, inputs)

    monkeypatch.setattr(PolicyNet, "run", counted)

    async def ask() -> list[Actions]:
        device.call(is_free.wait)
        hidden = {"h": np.ones((1, 5), np.float32), "c": np.zeros((1, 5), np.float32)}
        requests = [
            ActRequest(
                model="agent",
                inputs={"obs": obs[row : row + 1], **(hidden if row % 2 else {})},
                seeds_N=seeds()[row : row + 1],
            )
            for row in range(8)
        ]
        waiting = [asyncio.ensure_future(actor.act(request)) for request in requests]
        await asyncio.sleep(0)  # all of them have queued their rows
        is_free.set()
        return await asyncio.gather(*waiting)

    found = asyncio.run(ask())
    assert sizes == [8]
    hidden = {"h": np.array([[row % 2] * 5 for row in range(8)], np.float32), "c": np.zeros((8, 5), np.float32)}
    together = act(actor, obs[:8], seeds()[:8], inputs=hidden)
    np.testing.assert_array_equal([actions.actions[0] for actions in found], together.actions)
    np.testing.assert_allclose([actions.hidden["h"][0] for actions in found], together.hidden["h"], atol=1e-6)


def test_an_error_of_a_shared_pass_reaches_each_of_its_requests(
    actor: Actor, device: DeviceThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(actor)
    is_free = threading.Event()

    def fail(net: PolicyNet, inputs: object) -> dict[str, np.ndarray]:
        raise RuntimeError("out of memory")

    async def ask() -> list[object]:
        device.call(is_free.wait)
        waiting = [asyncio.ensure_future(actor.run("agent", {"obs": observations(1)})) for _ in range(3)]
        await asyncio.sleep(0)
        is_free.set()
        return await asyncio.gather(*waiting, return_exceptions=True)

    with monkeypatch.context() as patch:
        patch.setattr(PolicyNet, "run", fail)
        assert [str(error) for error in asyncio.run(ask())] == ["out of memory"] * 3
    assert len(act(actor, observations(2)).actions) == 2


def test_a_request_of_many_rows_is_computed_in_units(actor: Actor, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(actor)
    obs, whole = observations(), act(actor, observations())
    monkeypatch.setattr("parallm.tasks.actor.UNIT_NUMBERS", 8 * 10)
    np.testing.assert_array_equal(act(actor, obs).actions, whole.actions)


def test_a_cancelled_request_is_not_computed(
    actor: Actor, device: DeviceThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(actor)
    is_free, sizes, run = threading.Event(), [], PolicyNet.run

    def counted(net: PolicyNet, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        sizes.append(len(inputs["obs"]))
        return run(net, inputs)

    monkeypatch.setattr(PolicyNet, "run", counted)

    async def ask() -> None:
        device.call(is_free.wait)
        gone, stays = (asyncio.ensure_future(actor.run("agent", {"obs": observations(n)})) for n in (5, 2))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.sleep(0)
        is_free.set()
        assert len((await stays)["logits"]) == 2

    asyncio.run(ask())
    assert sizes == [2]


def test_a_version_is_published_beside_requests_that_run_on_another(actor: Actor, device: DeviceThread) -> None:
    publish(actor, weights=weights_of(MLP, 0))
    old = act(actor, observations()).log_probs_N
    is_free = threading.Event()

    async def ask() -> tuple[Actions, Actions]:
        device.call(is_free.wait)
        request = ActRequest(model="agent", inputs={"obs": observations()}, seeds_N=seeds())
        before = asyncio.ensure_future(actor.act(request))
        await asyncio.sleep(0)
        published = asyncio.ensure_future(actor.publish("agent", policy_file(None, weights_of(MLP, 1))))
        is_free.set()
        await published
        return await before, await actor.act(request)

    before, after = asyncio.run(ask())
    np.testing.assert_array_equal(before.log_probs_N, old)
    assert (after.log_probs_N != old).any()
    pinned = ActRequest(model="agent@1", inputs={"obs": observations()}, seeds_N=seeds())
    np.testing.assert_array_equal(asyncio.run(actor.act(pinned)).log_probs_N, old)


def test_names_mean_the_newest_version_and_numbers_do_not_come_again(actor: Actor) -> None:
    assert [publish(actor) for _ in range(3)] == ["agent@1", "agent@2", "agent@3"]
    assert (actor.card("agent").version, actor.card("agent@latest").version, actor.card("agent@2").version) == (3, 3, 2)
    asyncio.run(actor.unload("agent@2"))
    with pytest.raises(UnknownModel, match="of agent there are agent@1, agent@3"):
        actor.card("agent@2")
    with pytest.raises(InvalidRequest, match="agent means agent@3"):
        asyncio.run(actor.unload("agent@3"))
    asyncio.run(actor.unload("agent"))
    with pytest.raises(UnknownModel, match="there are none; PUT one to /v1/rl/policies/NAME"):
        actor.card("agent")
    assert publish(actor) == "agent@4"


def test_a_language_models_route_says_where_a_policy_net_acts(actor: Actor) -> None:
    publish(actor)
    table = AdapterTable()
    table.elsewhere = actor.elsewhere
    for name in ("agent", "agent@1"):
        with pytest.raises(UnknownModel, match="agent is a policy net; ask /v1/rl/act or /v1/predict"):
            table.resolve(name)
    with pytest.raises(UnknownModel, match="no model 'other'"):
        table.resolve("other")
    with pytest.raises(UnknownModel, match="Language models answer at /v1/chat/completions"):
        actor.card("base")


def test_old_versions_leave_memory(actor: Actor) -> None:
    for _ in range(KEPT_VERSIONS + 2):
        publish(actor)
    assert [card.version for card in actor.cards()] == list(range(3, KEPT_VERSIONS + 3))
    assert [card.version for card in actor.cards() if card.is_served] == [KEPT_VERSIONS + 2]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no whole safetensors file; pickled files are never read"),
        (policy_file(MLP)[:-4], "more or fewer bytes than their header says"),
        (policy_file(None), 'put the text of its config.json into the metadata of the file as "config"'),
        (policy_file(None, signature={}), '"signature" belongs to a "config"'),
        (policy_file(MLP | {"actor": [1 << 20]}, weights_of(MLP)), r"by config.json it has \[1048576, 4\]"),
        (policy_file(MLP | {"observation_size": -1}, weights_of(MLP)), "config.json: observation_size"),
    ],
)
def test_uploads_that_are_no_policy_net_are_refused(actor: Actor, content: bytes, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        asyncio.run(actor.publish("agent", content))
    assert actor.cards() == ()


def test_a_version_of_another_form_brings_its_configuration(actor: Actor) -> None:
    publish(actor)
    with pytest.raises(InvalidRequest, match=r"actor\.0\.weight has shape"):
        publish(actor, None, weights=weights_of(LSTM))
    publish(actor, LSTM)
    assert [card.model_type for card in actor.cards()] == ["mlp_policy", "lstm_policy"]


@pytest.mark.parametrize("name", ["base", "policy", "best", "a@3", "", "1", "a/b"])
def test_names_that_mean_others_are_refused(actor: Actor, name: str) -> None:
    with pytest.raises(InvalidRequest, match="cannot be the name of a policy net"):
        publish(actor, name=name)


def test_names_are_limited(actor: Actor) -> None:
    for name in ("a", "b", "c"):
        publish(actor, name=name)
    with pytest.raises(InvalidRequest, match=r"3 policy nets are loaded, the limit; .*server\.max_adapters"):
        publish(actor, name="d")
    assert publish(actor, name="c") == "c@2"


def test_numbers_that_are_not_finite_are_an_error(actor: Actor) -> None:
    weights = weights_of(MLP)
    weights["actor.2.bias"][:] = 3e38
    weights["actor.2.weight"][:] = 3e38
    publish(actor, weights=weights)
    with pytest.raises(NotFinite, match="agent computes values that are not finite: logits of row 0"):
        act(actor, observations(2))


def test_actions_that_are_not_finite_are_an_error(actor: Actor) -> None:
    weights = weights_of(BOX)
    weights["log_std"][:] = 1000.0
    publish(actor, BOX, weights=weights)
    with pytest.raises(NotFinite, match="actions of row 0"):
        act(actor, observations(2))


def test_more_requests_than_may_wait_are_refused(device: DeviceThread) -> None:
    full = Actor(device, max_names=3, max_waiting=0)
    publish(full)
    with pytest.raises(EngineFull, match="0 requests for actions wait"):
        act(full, observations(1))


def test_nets_are_loaded_from_folders(actor: Actor, tmp_path: Path) -> None:
    signature = {"inputs": [{"name": "cart", "datatype": "FP32", "shape": [-1, 4]}]}
    folder = write_policy(tmp_path / "net", MLP, signature=signature)
    asyncio.run(actor.load({"agent": str(folder)}))
    assert [spec.name for spec in actor.card("agent@1").signature.inputs] == ["cart"]


@pytest.mark.parametrize(
    ("broken", "message"),
    [("config.json", "No such file"), ("model.safetensors", "No such file"), (None, "n: Field req")],
)
def test_a_folder_that_is_no_net_is_named_with_its_key(
    actor: Actor, tmp_path: Path, broken: str | None, message: str
) -> None:
    space = {"action_space": {"type": "discrete"}} if broken is None else {}
    folder = write_policy(tmp_path / "net", MLP)
    (folder / "config.json").write_text(json.dumps(MLP | space))
    if broken is not None:
        (folder / broken).unlink()
    with pytest.raises(ModelError, match=rf"tasks\.policies\.agent={folder}: .*{message}"):
        asyncio.run(actor.load({"agent": str(folder)}))


@pytest.mark.parametrize(
    "space", [DISCRETE, {"type": "multi_discrete", "nvec": [2, 2]}, {"type": "box", "shape": [2, 2]}]
)
def test_actions_have_the_form_of_their_space(actor: Actor, space: dict[str, Any]) -> None:
    publish(actor, MLP | {"action_space": space, "critic": None})
    found = act(actor, observations(3), wants_entropy=True)
    shape = {"discrete": (3,), "multi_discrete": (3, 2), "box": (3, 2, 2)}[space["type"]]
    assert found.actions.shape == shape
    assert found.actions.dtype == (np.float32 if space["type"] == "box" else np.int64)
    assert found.values_N is None
    assert found.entropy_N is not None
