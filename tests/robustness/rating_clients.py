"""Clients that ask for completions and rate them, go on after each end of the server, and keep their own account.

Each rating is a number of its own, by which the samples that a run has trained on tell whose they are.
"""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

CLIENTS = 6
CHOICES = 4
PROMPTS = ("1 + 1", "2 + 3", "7 - 4", "3 * 3")
RESENT = 0.2
"""Share of the ratings that are sent again though they were answered."""
UNIT = 2.0**-20
"""Between two ratings; all are exact in float32."""
TIMEOUT = 60.0
OK, REFUSED, GONE = 200, 400, 404


@dataclass(slots=True)
class Account:
    """The clients' own account."""

    ratings: dict[str, float] = field(default_factory=dict)
    """Ratings that were answered with 200, by trajectory."""
    num_sent: int = 0
    num_resent: int = 0
    wrong: list[str] = field(default_factory=list)
    """Answers that a client could not go on with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The account beside what the run has trained on."""

    num_ratings: int
    num_resent: int
    lost: tuple[str, ...]
    """Answered ratings that were neither trained on nor wait."""
    twice: tuple[str, ...]
    """Trajectories that steps of the surviving run have trained on more than once."""
    wrong: tuple[str, ...]
    num_trained: int


class RatingClients:
    """Ask until `stop`; requests that a kill has ended are sent again."""

    def __init__(self, url: str, seed: int) -> None:
        self.account = Account()
        self._random = random.Random(seed)
        self._number = 0
        self._is_over = False
        limits = httpx.Limits(max_connections=None)
        self._http = httpx.AsyncClient(base_url=url, timeout=TIMEOUT, limits=limits, trust_env=False)

    async def run(self) -> None:
        await asyncio.gather(*(self._be_client() for _ in range(CLIENTS)))

    def stop(self) -> None:
        """End after the requests under way."""
        self._is_over = True

    async def judge(self, run_folder: Path) -> Outcome:
        """What became of every rating, after `run` has ended and with the server up. Pauses the training."""
        await self._post("/v1/training/pause", {})
        while (await self._http.get("/v1/training/status")).json()["state"] != "paused":
            await asyncio.sleep(0.05)
        trained = Counter(row["reward"] for row in rows_of(run_folder / "samples.jsonl"))
        lost = []
        for name, reward in self.account.ratings.items():
            if await self._send(name, reward) != OK:
                self.account.wrong.append(f"{name} was rated, and is not known in the end")
            # one that waits takes another rating; nothing else does
            if not trained[reward] and await self._send(name, reward + UNIT / 2) != OK:
                lost.append(name)
        by_reward = {reward: name for name, reward in self.account.ratings.items()}
        twice = tuple(by_reward.get(reward, str(reward)) for reward, count in trained.items() if count > 1)
        await self._http.aclose()
        return Outcome(
            num_ratings=len(self.account.ratings),
            num_resent=self.account.num_resent,
            lost=tuple(lost),
            twice=twice,
            wrong=tuple(self.account.wrong),
            num_trained=len(trained),
        )

    async def _be_client(self) -> None:
        while not self._is_over:
            self._number += 1
            for name, is_certain in await self._ask(f"k{self._number}"):
                await self._rate(name, is_certain=is_certain)

    async def _ask(self, request_id: str) -> list[tuple[str, bool]]:
        """Trajectories, and whether an answer has named them: else the answer was lost, and their ids are guessed."""
        body = {
            "model": "policy",
            "prompt": self._random.choice(PROMPTS),
            "max_tokens": 8,
            "n": CHOICES,
            "request_id": request_id,
            "collect_trajectory": True,
        }
        answer, is_first = await self._post("/v1/completions", body)
        if answer.status_code == OK:
            return [(one["trajectory_id"], True) for one in answer.json()["choices"] if one["trajectory_id"]]
        if answer.status_code == REFUSED and not is_first:
            return [(f"cmpl-{request_id}-{place}", False) for place in range(CHOICES)]
        self.account.wrong.append(f"{request_id}: {answer.status_code} {answer.text[:200]}")
        return []

    async def _rate(self, name: str, *, is_certain: bool) -> None:
        self.account.num_sent += 1
        reward = self.account.num_sent % 2 + self.account.num_sent * UNIT
        status = await self._send(name, reward)
        if status == OK:
            self.account.ratings[name] = reward
        elif is_certain or status != GONE:
            self.account.wrong.append(f"{name}: {status}, though an answer has named it")
        if status == OK and self._random.random() < RESENT:
            self.account.num_resent += 1
            if await self._send(name, reward) != OK:
                self.account.wrong.append(f"{name}: another answer when it was sent again")

    async def _send(self, name: str, reward: float) -> int:
        answer, is_first = await self._post(f"/v1/trajectories/{name}/reward", {"reward": reward})
        self.account.num_resent += not is_first
        return answer.status_code

    async def _post(self, path: str, body: dict[str, Any]) -> tuple[httpx.Response, bool]:
        """The answer, and whether it is to the first try that may have reached the server."""
        is_first = True
        while True:
            try:
                return await self._http.post(path, json=body), is_first
            except httpx.ConnectError:
                await asyncio.sleep(0.05)  # no server: the request was not sent
            except httpx.TransportError:
                is_first = False


def rows_of(file: Path) -> Sequence[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines() if line.strip()] if file.is_file() else []
