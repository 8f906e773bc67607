"""A policy learns from live traffic: clients ask, send rewards late, and its reward on their prompts rises.

Everything goes through HTTP: completions asked with `collect_trajectory`, rewards some time after them, other clients
that stream meanwhile, and the reward on the prompts before and after. A second run, with a learning rate of 0, must not
move by more than chance: both are sampled with seeds of their own before and after.
"""

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
import pytest
from bench.clients import stream_for
from bench.compare import Change, change
from bench.measurement import request_of_tests
from bench.processes import running

from parallm.client import ApiError, AsyncClient
from parallm.environment.arithmetic import Arithmetic
from parallm.environment.settings import ArithmeticSettings
from parallm.types import Problem

NUM_PROMPTS, CLIENTS, MAX_TOKENS, WAIT_SECONDS = 5, 16, 64, 3.0
OTHERS = 4
"""Clients that stream and are not learned from."""
LATE = (0.1, 1.0)
"""Seconds from a completion to its reward."""
SAMPLES, CHOICES = 256, 64
"""Samples of each prompt, before and after, and of one request."""
RUN = (
    *("name=live", "rollout=live", f"rollout.problems_per_step={NUM_PROMPTS}", "rollout.group_size=8"),
    *(f"rollout.max_tokens={MAX_TOKENS}", f"rollout.live.wait_seconds={WAIT_SECONDS}", "learner.warmup_steps=0"),
    *("trainer.max_off_policy_steps=4", "trainer.steps=1000", "trainer.evaluate_problems=0"),
)


@pytest.mark.learning
def test_late_rewards_of_clients_make_the_policy_better_and_without_learning_they_do_not(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    number = request_of_tests().size(200, 120)
    learned, steps, failed = learn(tmp_path / "learned", number, 5e-3)
    control, control_steps, control_failed = learn(tmp_path / "control", number, 0.0)
    record_property("live.reward_gain", learned.gain)
    record_property("live.control_gain", control.gain)
    record_property("live.control_steps", control_steps)
    record_property("live.failed_requests", failed + control_failed)
    record_property("remark", f"gain {learned.text()}, with a learning rate of 0 {control.text()}, {steps} steps")
    assert failed + control_failed == 0
    assert learned.gain > 0.1
    assert control_steps > 0


def learn(folder: Path, number: int, learning_rate: float) -> tuple[Change, int, int]:
    """The change of the reward, the steps of the run, and the requests that failed."""
    folder.mkdir()
    with running("parallm.train", [*RUN, f"learner.learning_rate={learning_rate}"], folder) as server:
        return asyncio.run(measure(server.url, number))


async def measure(url: str, number: int) -> tuple[Change, int, int]:
    environment = Arithmetic(ArithmeticSettings(num_train=64))
    problems = environment.problems("train")
    chosen, others = problems[:NUM_PROMPTS], [problem.messages[0].content for problem in problems[NUM_PROMPTS:]]
    async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as http:
        crowd, is_over = Crowd(http, environment), asyncio.Event()
        before = await crowd.rewards(chosen)
        serving = asyncio.create_task(errors_of_streams(is_over, url, others))
        await crowd.ask(chosen, number)
        await crowd.wait_until_trained()
        is_over.set()
        errors = await serving
        after = await crowd.rewards(chosen)
        steps = (await AsyncClient("", http=http).training_status()).step
    return change(before, after), steps, crowd.num_failed + errors


async def errors_of_streams(is_over: asyncio.Event, url: str, questions: Sequence[str]) -> int:
    errors = 0
    while not is_over.is_set():
        traffic = await stream_for(url, questions, clients=OTHERS, seconds=1, max_tokens=MAX_TOKENS)
        errors += len(traffic.errors)
    return errors


class Crowd:
    """Clients that ask the prompts of `environment` and judge the answers."""

    def __init__(self, http: httpx.AsyncClient, environment: Arithmetic) -> None:
        self._http = http
        self._parallm = AsyncClient("", http=http)
        self._environment = environment
        self._late = random.Random(0)
        self._seeds = itertools.count()
        self.num_failed = 0

    async def rewards(self, problems: Sequence[Problem]) -> list[float]:
        """The rewards of what the policy answers now, with seeds that no request had before. None is learned from."""
        asked = [problem for problem in problems for _ in range(SAMPLES // CHOICES)]
        replies = await asyncio.gather(*(self._ask(one, n=CHOICES, seed=next(self._seeds)) for one in asked))
        return [self._score(one, text) for one, choices in zip(asked, replies, strict=True) for text, _ in choices]

    async def ask(self, problems: Sequence[Problem], number: int) -> None:
        """Ask for `number` completions, one at a time each client, and send their rewards some time after them."""
        turns, rewards = iter(range(number)), []

        async def one_client() -> None:
            for turn in turns:
                problem = problems[turn % len(problems)]
                for text, trajectory in await self._ask(problem, seed=next(self._seeds), collect_trajectory=True):
                    rewards.append(asyncio.create_task(self._send_late(trajectory, self._score(problem, text))))

        await asyncio.gather(*(one_client() for _ in range(CLIENTS)))
        await asyncio.gather(*rewards)

    async def wait_until_trained(self) -> None:
        """Return when no step can come of what is left."""
        trained, since = -1, time.perf_counter()
        while time.perf_counter() - since < 3 * WAIT_SECONDS:
            report = (await self._parallm.trajectories())["policy"]
            if report.num_trained != trained:
                trained, since = report.num_trained, time.perf_counter()
            if report.num_rewarded == 0 and (await self._parallm.training_status()).state == "collecting":
                return
            await asyncio.sleep(0.2)

    async def _ask(self, problem: Problem, **fields: object) -> list[tuple[str, str]]:
        """Text and trajectory of each choice; nothing where the request fails."""
        messages = [{"role": one.role, "content": one.content} for one in problem.messages]
        body = {"model": "policy", "messages": messages, "max_tokens": MAX_TOKENS, **fields}
        response = await self._http.post("/v1/chat/completions", json=body)
        self.num_failed += response.is_error
        choices = [] if response.is_error else response.json()["choices"]
        return [(choice["message"]["content"], choice.get("trajectory_id", "")) for choice in choices]

    async def _send_late(self, trajectory: str, reward: float) -> None:
        await asyncio.sleep(self._late.uniform(*LATE))
        try:
            await self._parallm.reward(trajectory, reward)
        except ApiError as error:
            if error.status != httpx.codes.NOT_FOUND:  # it has become too old, which the report counts
                raise

    def _score(self, problem: Problem, text: str) -> float:
        return self._environment.score(problem, text)["correct"]
