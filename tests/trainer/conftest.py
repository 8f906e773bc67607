"""Whole runs of the embedded model in this process: seconds long, with environments that make trouble when told to."""

import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import pytest
from pydantic import TypeAdapter

from parallm.config.schema import RunConfig
from parallm.device.blas import load_blas
from parallm.environment.arithmetic import Arithmetic
from parallm.environment.settings import ArithmeticSettings
from parallm.errors import ProblemError
from parallm.learner.passes.gradient import PassResult, PolicyGradient
from parallm.rollout.runner import RolloutRunner
from parallm.rollout.scoring import ScoredEpisode
from parallm.run.train import run_training
from parallm.types import Problem, Split

TINY: Mapping[str, Mapping[str, Any]] = {
    "model": {"lora": {"rank": 4}},
    "rollout": {"problems_per_step": 2, "group_size": 4, "max_tokens": 16, "temperature": 1.5, "refill_rounds": 1},
    "learner": {"warmup_steps": 0, "learning_rate": 1e-3},
    "trainer": {"steps": 3, "evaluate_problems": 0, "evaluate_every": 0},
    "checkpoint": {"every": 1},
    "metrics": {"display": "off", "samples_per_step": 1000, "curves": False},
    "server": {"enabled": False},
}


class Parity:
    """Rewards a completion whose text has an even sum: half of the samples, so nearly every group has a signal."""

    weights: Mapping[str, float] = {"even": 1.0}

    def __init__(self) -> None:
        self._arithmetic = Arithmetic(ArithmeticSettings(num_train=32, num_test=4))
        self.num_scored = 0

    def problems(self, split: Split) -> Sequence[Problem]:
        return self._arithmetic.problems(split)

    def score(self, problem: Problem, text: str) -> Mapping[str, float]:
        self.num_scored += 1
        return {"even": float(sum(text.encode()) % 2 == 0)}


class Calling(Parity):
    """`Parity` that calls `function` at the given scorings, counted from 1; what it returns is the reward, but None."""

    def __init__(self, function: Callable[[], float | None], *places: int) -> None:
        super().__init__()
        self._function = function
        self._places = places

    def score(self, problem: Problem, text: str) -> Mapping[str, float]:
        parts = super().score(problem, text)
        reward = self._function() if self.num_scored in self._places else None
        return parts if reward is None else {"even": reward}


class Constant(Parity):
    """Gives every completion the same reward after the first `num_before` scorings."""

    def __init__(self, num_before: int = 0) -> None:
        super().__init__()
        self._num_before = num_before

    def score(self, problem: Problem, text: str) -> Mapping[str, float]:
        parts = super().score(problem, text)
        return parts if self.num_scored <= self._num_before else {"even": 0.5}


@pytest.fixture
def parity() -> type[Parity]:
    return Parity


@pytest.fixture
def calling() -> type[Calling]:
    return Calling


@pytest.fixture
def constant() -> type[Constant]:
    return Constant


@pytest.fixture
def fail_in_round(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Lets the given round of sampling, counted from 1, end with a ProblemError: its problems are drawn by then."""
    run_episodes, numbers = RolloutRunner.run_episodes, count(1)

    def fail_once(chosen: int) -> None:
        async def fail(runner: RolloutRunner, *arguments: Any) -> list[list[ScoredEpisode]]:
            if next(numbers) == chosen:
                raise ProblemError("cannot be played")
            return await run_episodes(runner, *arguments)

        monkeypatch.setattr(RolloutRunner, "run_episodes", fail)

    return fail_once


@pytest.fixture
def break_gradient(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes the gradient of the given pass, counted from 1, NaN: of the step, where a step is one pass."""
    compute, numbers = PolicyGradient.__call__, count(1)

    def break_pass(chosen: int) -> None:
        def broken(self: PolicyGradient, *arguments: Any) -> PassResult:
            result = compute(self, *arguments)
            if next(numbers) != chosen:
                return result
            return replace(result, gradients=[mx.full(one.shape, math.nan) for one in result.gradients])

        monkeypatch.setattr(PolicyGradient, "__call__", broken)

    return break_pass


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Trains as the command does; `train(environment, folder, trainer={"steps": 2})` adds settings to tiny ones.

    No curves are drawn: that takes longer than most of these runs. `keys` are those that the configuration has for the
    environment.
    """

    def run(
        environment: Parity | None = None,
        folder: str = "run",
        seed: int = 0,
        *,
        keys: Mapping[str, Any] | None = None,
        **parts: Mapping[str, Any],
    ) -> int:
        chosen = environment or Parity()
        monkeypatch.setattr("parallm.run.training_data.build_environment", lambda _: chosen)
        values = {name: {**TINY.get(name, {}), **parts.get(name, {})} for name in {*TINY, *parts}}
        config = TypeAdapter(RunConfig).validate_python(
            {**values, "seed": seed, "environment": keys or {"name": "arithmetic"}}
        )
        (tmp_path / folder).mkdir(exist_ok=True)
        return run_training(config, tmp_path / folder, load_blas(config.device))

    return run


@pytest.fixture
def run_with_client(train: Callable[..., int]) -> Callable[..., int]:
    """Trains while `act` is a client in another thread, whose failures are raised here; training is paused first."""

    def whole(act: Callable[[httpx.Client], None], **parts: Any) -> int:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        failures: list[BaseException] = []
        ended = threading.Event()

        def be_client() -> None:
            try:
                with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60.0) as client:
                    pause(client, ended)
                    act(client)
            except BaseException as error:  # noqa: BLE001  raised by the test's own thread
                failures.append(error)
            if not ended.is_set():
                os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=be_client)
        thread.start()
        try:
            server = {"enabled": True, "port": port, **parts.pop("server", {})}
            code = train(server=server, **{"trainer": {"steps": 1000}, **parts})
        finally:
            ended.set()
            thread.join()
        if failures:
            raise failures[0]
        return code

    return whole


def pause(client: httpx.Client, ended: threading.Event) -> None:
    while not ended.is_set():
        try:
            if client.post("/v1/training/pause").status_code == 200:
                break
        except httpx.TransportError:
            pass
        time.sleep(0.02)
    while client.get("/v1/training/status").json()["state"] != "paused":
        time.sleep(0.02)
