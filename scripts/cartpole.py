#!/usr/bin/env python
"""A policy net learns CartPole over HTTP: PPO (https://arxiv.org/abs/1707.06347) against `/v1/rl/act`.

    python -m parallm.serve model=nano        # in another terminal
    python scripts/cartpole.py http://localhost:8000

A thread acts on the environments through the server, and the learner publishes each update as the next version
meanwhile. An action's log-prob and value come with it from the
version that acted, so the ratios of PPO are those of the version that sampled. Needs `parallm[gym]`.
Axes: T steps, N environments, O numbers of an observation, B transitions of a batch.
"""

import argparse
import base64
import io
import json
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import gymnasium
import numpy as np

from parallm.client import Client
from parallm.device.blas import load_blas
from parallm.device.settings import DeviceSettings

load_blas(DeviceSettings())  # before MLX

import mlx.core as mx  # noqa: E402
import mlx.nn as nn  # noqa: E402
import mlx.optimizers as optimizers  # noqa: E402
from mlx.utils import tree_flatten  # noqa: E402

NUM_ENVS, NUM_STEPS, NUM_EPOCHS, BATCH = 32, 32, 10, 256
GAMMA, LAMBDA, CLIP, ENTROPY, VALUE = 0.98, 0.9, 0.2, 0.005, 0.5
CONFIG = {
    "model_type": "mlp_policy",
    "observation_size": 4,
    "action_space": {"type": "discrete", "n": 2},
    "actor": [64, 64],
    "critic": [64, 64],
}
EVALUATION_SEED = 10_000
GOOD = 475.0
"""Mean return of the last episodes at which the policy is evaluated: gymnasium's threshold of CartPole-v1."""


class Server:
    """The two calls that a learner needs."""

    def __init__(self, url: str, name: str) -> None:
        self._client = Client(url)
        self._name = name

    def act(self, obs_NO: np.ndarray, **fields: object) -> dict[str, np.ndarray | int]:
        packed = base64.b64encode(obs_NO.astype("<f4").tobytes()).decode()
        observations = {"shape": list(obs_NO.shape), "datatype": "FP32", "b64": packed}
        answer = self._client.act(self._name, observations, encoding="b64", **fields)
        arrays = {name: as_array(value) for name, value in answer.items() if isinstance(value, dict) and "b64" in value}
        return {"version": answer["policy_version"], **arrays}

    def publish(self, net: "Net") -> str:
        file = io.BytesIO()
        mx.save_safetensors(file, dict(tree_flatten(net.parameters())), metadata={"config": json.dumps(CONFIG)})
        return self._client.publish_policy(self._name, file.getvalue())


def as_array(tensor: dict) -> np.ndarray:
    kind = {"FP32": "<f4", "INT64": "<i8"}[tensor["datatype"]]
    return np.frombuffer(base64.b64decode(tensor["b64"]), kind).reshape(tensor["shape"])


class Net(nn.Module):
    """The learner's copy; its parameters have the names that the server knows."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = layers(4, 64, 64, 2), layers(4, 64, 64, 1)
        self.actor[-1].weight *= 0.01  # all actions are likely at first

    def __call__(self, obs_BO: mx.array) -> tuple[mx.array, mx.array]:
        return through(self.actor, obs_BO), through(self.critic, obs_BO)[:, 0]


def layers(*sizes: int) -> list[nn.Module]:
    found: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        found += [nn.Linear(inputs, outputs), nn.Tanh()]
    return found[:-1]


def through(modules: list[nn.Module], x: mx.array) -> mx.array:
    for module in modules:
        x = module(x)
    return x


@dataclass(frozen=True)
class Rollout:
    """Steps of all environments. A step after the end of an episode only starts the next one: `is_real` is false."""

    obs_TNO: np.ndarray
    actions_TN: np.ndarray
    log_probs_TN: np.ndarray
    values_TN: np.ndarray
    rewards_TN: np.ndarray
    terminated_TN: np.ndarray
    done_TN: np.ndarray
    is_real_TN: np.ndarray
    last_values_N: np.ndarray
    versions: frozenset[int]
    returns: list[float]
    """Returns of the episodes that ended."""


def environments(seed: int, num_envs: int = NUM_ENVS) -> tuple[gymnasium.vector.VectorEnv, np.ndarray]:
    envs = gymnasium.make_vec("CartPole-v1", num_envs=num_envs, vectorization_mode="vector_entry_point")
    return envs, envs.reset(seed=seed)[0]


def rollouts(server: Server, seed: int) -> Iterator[Rollout]:
    """Act without end."""
    envs, obs_NO = environments(seed)
    was_done_N, return_N = np.zeros(NUM_ENVS, bool), np.zeros(NUM_ENVS)
    call = 0
    while True:
        rows, versions, returns = [], set(), []
        for _ in range(NUM_STEPS):
            call += 1
            acted = server.act(obs_NO, seed=seed * 1_000_003 + call)
            versions.add(acted["version"])
            next_NO, reward_N, terminated_N, truncated_N, _ = envs.step(acted["actions"])
            done_N = terminated_N | truncated_N
            found = acted["actions"], acted["action_log_probs"], acted["value_estimates"]
            rows.append((obs_NO, *found, reward_N, terminated_N, done_N, ~was_done_N))
            return_N += np.where(was_done_N, 0, reward_N)
            returns += return_N[done_N].tolist()
            return_N[done_N] = 0
            obs_NO, was_done_N = next_NO, done_N
        last_values_N = server.act(obs_NO)["value_estimates"]
        arrays = (np.stack(column) for column in zip(*rows, strict=True))
        yield Rollout(*arrays, last_values_N, frozenset(versions), returns)


def advantages(rollout: Rollout) -> np.ndarray:
    """Generalized advantages (T, N), https://arxiv.org/abs/1506.02438. The state at the end of an episode is the
    observation of the step after it, so one that was cut off goes on with its value."""
    found_TN = np.zeros_like(rollout.values_TN)
    next_value_N, next_N = rollout.last_values_N, np.zeros(NUM_ENVS, np.float32)
    for step in reversed(range(NUM_STEPS)):
        target_N = rollout.rewards_TN[step] + GAMMA * next_value_N * ~rollout.terminated_TN[step]
        next_N = target_N - rollout.values_TN[step] + GAMMA * LAMBDA * next_N * ~rollout.done_TN[step]
        found_TN[step] = next_N
        next_value_N = rollout.values_TN[step]
    return found_TN


def loss(
    net: Net, obs_BO: mx.array, actions_B: mx.array, old_B: mx.array, advantage_B: mx.array, target_B: mx.array
) -> mx.array:
    """The clipped objective of PPO, with the value's squared error and the entropy."""
    logits_BA, value_B = net(obs_BO)
    log_probs_BA = logits_BA - mx.logsumexp(logits_BA, axis=1, keepdims=True)
    ratio_B = mx.exp(mx.take_along_axis(log_probs_BA, actions_B[:, None], axis=1)[:, 0] - old_B)
    clipped_B = mx.clip(ratio_B, 1 - CLIP, 1 + CLIP)
    surrogate = mx.minimum(ratio_B * advantage_B, clipped_B * advantage_B).mean()
    entropy = -(mx.exp(log_probs_BA) * log_probs_BA).sum(axis=1).mean()
    return -surrogate + VALUE * mx.square(value_B - target_B).mean() - ENTROPY * entropy


class Learner:
    def __init__(self, seed: int, learning_rate: float) -> None:
        mx.random.seed(seed)
        self.net = Net()
        self._chance = np.random.default_rng(seed)
        self._optimizer = optimizers.Adam(learning_rate, eps=1e-5)
        self._gradient = nn.value_and_grad(self.net, loss)
        mx.eval(self.net.parameters())

    def update(self, rollout: Rollout) -> None:
        advantage_TN = advantages(rollout)
        columns = rollout.actions_TN, rollout.log_probs_TN, advantage_TN, advantage_TN + rollout.values_TN
        data = [array[rollout.is_real_TN] for array in (rollout.obs_TNO, *columns)]
        for _ in range(NUM_EPOCHS):
            order = self._chance.permutation(len(data[0]))
            for start in range(0, len(order) - BATCH + 1, BATCH):
                batch = [mx.array(column[order[start : start + BATCH]]) for column in data]
                batch[3] = (batch[3] - batch[3].mean()) / (mx.std(batch[3]) + 1e-8)
                _, gradient = self._gradient(self.net, *batch)
                gradient, _ = optimizers.clip_grad_norm(gradient, 0.5)
                self._optimizer.update(self.net, gradient)
                mx.eval(self.net.parameters(), self._optimizer.state)


def evaluate(server: Server, num_episodes: int = 64) -> float:
    """Return the mean return of as many episodes, each of an environment of its own, acted without chance."""
    envs, obs_NO = environments(EVALUATION_SEED, num_episodes)
    return_N, is_running_N = np.zeros(num_episodes), np.ones(num_episodes, bool)
    while is_running_N.any():
        obs_NO, reward_N, terminated_N, truncated_N, _ = envs.step(server.act(obs_NO, deterministic=True)["actions"])
        return_N += np.where(is_running_N, reward_N, 0)
        is_running_N &= ~(terminated_N | truncated_N)
    return float(return_N.mean())


def fill(waiting: "queue.Queue[Rollout]", server: Server, seed: int, has_ended: threading.Event) -> None:
    for rollout in rollouts(server, seed):
        while not has_ended.is_set():
            try:
                waiting.put(rollout, timeout=0.1)
                break
            except queue.Full:
                continue
        if has_ended.is_set():
            return


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a policy net on CartPole over HTTP.")
    parser.add_argument("url", help="address of a server, such as http://localhost:8000")
    parser.add_argument("--name", default="cartpole", help="name of the policy net")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seconds", type=float, default=150, help="seconds to learn for at most")
    parser.add_argument("--updates", type=int, default=1000, help="updates to make at most")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    server, learner = Server(given.url, given.name), Learner(given.seed, given.learning_rate)
    began = time.perf_counter()
    server.publish(learner.net)
    report = {"before": evaluate(server), "updates": 0, "steps": 0}
    waiting: queue.Queue[Rollout] = queue.Queue(maxsize=1)
    has_ended, acted, recent = threading.Event(), set(), []
    actor = threading.Thread(target=fill, args=(waiting, Server(given.url, given.name), given.seed, has_ended))
    actor.start()
    try:
        while report["updates"] < given.updates and time.perf_counter() - began < given.seconds:
            rollout = waiting.get(timeout=60)
            learner.update(rollout)
            version = server.publish(learner.net)
            acted |= rollout.versions
            recent = (recent + rollout.returns)[-64:]
            report["updates"] += 1
            report["steps"] += int(rollout.is_real_TN.sum())
            if report["updates"] % 10 == 0:
                print(f"{version}: return {np.mean(recent):.0f} in the last episodes", flush=True)
            if len(recent) == 64 and np.mean(recent) >= GOOD * 0.9 and evaluate(server) >= GOOD:
                break
    finally:
        has_ended.set()
        actor.join()
    report |= {"versions": len(acted), "return": evaluate(server), "seconds": time.perf_counter() - began}
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
