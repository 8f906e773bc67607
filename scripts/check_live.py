"""Does the policy learn from live traffic? Clients ask, send rewards late, and its reward on their prompts rises.

Everything goes through HTTP: completions asked with `collect_trajectory`, rewards some time after them, other clients
that stream meanwhile, and the reward on the prompts before and after. A second run, with a learning rate of 0, must not
move.
"""

import asyncio
import random
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

import httpx
from clients import stream_for
from problems import make_environment
from report import print_figures, print_table
from server_process import server_process

from parallm.client import ApiError, AsyncClient
from parallm.environment.arithmetic import Arithmetic
from parallm.reports import TrajectoryReport
from parallm.types import Problem

NUM_PROMPTS = 5
CLIENTS = 16
OTHERS = 4
"""Clients that stream and are not learned from."""
LATE = (0.1, 1.0)
"""Seconds from a completion to its reward."""
SAMPLES = 64
"""Of each prompt, before and after."""
MAX_TOKENS = 64
WAIT_SECONDS = 3.0
NOT_THERE = 404
RUN = (
    "name=live",
    "rollout=live",
    f"rollout.problems_per_step={NUM_PROMPTS}",
    "rollout.group_size=8",
    f"rollout.max_tokens={MAX_TOKENS}",
    f"rollout.live.wait_seconds={WAIT_SECONDS}",
    "learner.warmup_steps=0",
    "trainer.max_off_policy_steps=4",
    "trainer.steps=1000",
    "trainer.evaluate_problems=0",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One run."""

    before: float
    after: float
    report: TrajectoryReport
    steps: int
    seconds: float
    failed: int
    """Requests of all clients."""
    served: int
    """Streams of the others."""

    @property
    def gain(self) -> float:
        return self.after - self.before


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--completions", type=int, default=200, help="with rewards (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=5e-3, help="default: %(default)s")
    parser.add_argument("overrides", nargs="*", help="of the run, such as rollout.live.group_by=request")
    arguments = parser.parse_args()
    learned = learn(arguments, arguments.learning_rate)
    control = learn(arguments, 0.0)
    rows: list[tuple[str, ...]] = [
        ("", "reward before", "after", "gain", "trained on", "dropped", "steps", "seconds", "other streams", "failed")
    ]
    for name, one in (("learning", learned), ("learning rate 0", control)):
        rewards = (f"{one.before:.3f}", f"{one.after:.3f}", f"{one.gain:+.3f}")
        trained = one.report.num_trained + one.report.num_reserved
        counts = (trained, sum(one.report.dropped.values()), one.steps, round(one.seconds))
        rows.append((name, *rewards, *map(str, (*counts, one.served, one.failed))))
    print_table(f"{arguments.completions} completions of {NUM_PROMPTS} prompts, rewards {LATE} s late", rows)
    print_figures(
        {
            "live.reward_before": learned.before,
            "live.reward_after": learned.after,
            "live.reward_gain": learned.gain,
            "live.control_gain": control.gain,
            "live.failed_requests": float(learned.failed + control.failed),
        }
    )


def learn(arguments: Namespace, learning_rate: float) -> Outcome:
    overrides = [*RUN, *arguments.overrides, f"learner.learning_rate={learning_rate}"]
    with TemporaryDirectory() as folder, server_process("parallm.train", overrides, Path(folder)) as url:
        return asyncio.run(measure(url, arguments.completions))


class Crowd:
    """Clients that ask the prompts of `environment` and judge the answers."""

    def __init__(self, http: httpx.AsyncClient, environment: Arithmetic) -> None:
        self._http = http
        self._parallm = AsyncClient("", http=http)
        self._environment = environment
        self._late = random.Random(0)
        self.num_failed = 0

    async def reward(self, problems: Sequence[Problem]) -> float:
        """The mean over samples of what the policy answers now. Nothing of it is learned from."""
        answers = await asyncio.gather(*(self._ask(one, n=SAMPLES, seed=0) for one in problems))
        scores = [self._score(one, text) for one, choices in zip(problems, answers, strict=True) for text, _ in choices]
        return fmean(scores)

    async def ask(self, problems: Sequence[Problem], number: int) -> None:
        """Ask for `number` completions, one at a time each client, and send their rewards some time after them."""
        turns, rewards = iter(range(number)), []

        async def one_client() -> None:
            for turn in turns:
                problem = problems[turn % len(problems)]
                for text, trajectory in await self._ask(problem, seed=1 + turn, collect_trajectory=True):
                    rewards.append(asyncio.create_task(self._send_late(trajectory, self._score(problem, text))))

        await asyncio.gather(*(one_client() for _ in range(CLIENTS)))
        await asyncio.gather(*rewards)

    async def wait_until_trained(self) -> TrajectoryReport:
        """Until no step can come of what is left; what became of all."""
        trained, since = -1, time.perf_counter()
        while time.perf_counter() - since < 3 * WAIT_SECONDS:
            report = (await self._parallm.trajectories())["policy"]
            if report.num_trained != trained:
                trained, since = report.num_trained, time.perf_counter()
            if report.num_rewarded == 0 and (await self._parallm.training_status()).state == "collecting":
                break
            await asyncio.sleep(0.2)
        return report

    async def num_steps(self) -> int:
        return (await self._parallm.training_status()).step

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
            if error.status != NOT_THERE:  # it has become too old, which the report counts
                raise

    def _score(self, problem: Problem, text: str) -> float:
        return self._environment.score(problem, text)["correct"]


async def measure(url: str, number: int) -> Outcome:
    environment = make_environment(None, 64)
    assert isinstance(environment, Arithmetic), "without a data folder"
    problems = environment.problems("train")
    chosen, others = problems[:NUM_PROMPTS], [problem.messages[0].content for problem in problems[NUM_PROMPTS:]]
    async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as http:
        crowd, is_over = Crowd(http, environment), asyncio.Event()
        before, began = await crowd.reward(chosen), time.perf_counter()
        serving = asyncio.create_task(stream_until(is_over, url, others))
        await crowd.ask(chosen, number)
        report = await crowd.wait_until_trained()
        is_over.set()
        finished, errors = await serving
        return Outcome(
            before=before,
            after=await crowd.reward(chosen),
            report=report,
            steps=await crowd.num_steps(),
            seconds=time.perf_counter() - began,
            failed=crowd.num_failed + errors,
            served=finished,
        )


async def stream_until(is_over: asyncio.Event, url: str, questions: Sequence[str]) -> tuple[int, int]:
    """Streams that have ended well, and those that have not."""
    finished = errors = 0
    while not is_over.is_set():
        traffic = await stream_for(url, questions, clients=OTHERS, seconds=1, max_tokens=MAX_TOKENS)
        finished, errors = finished + traffic.finished, errors + len(traffic.errors)
    return finished, errors


if __name__ == "__main__":
    main()
