"""Learn to be polite in few words; the model that it started from is the judge."""

from collections.abc import Mapping, Sequence

from parallm.environment.environment import Ask
from parallm.types import Message, Problem, Split

WISHES = ("Tell me the time.", "Say that you are late.", "Refuse an invitation.", "Ask for the bill.")


class Polite:
    weights: Mapping[str, float] = {"polite": 1.0, "short": 0.2}

    def problems(self, split: Split) -> Sequence[Problem]:
        wishes = WISHES[-1:] if split == "test" else WISHES[:-1]
        return [
            Problem(problem_id=f"polite/{wish}", messages=(Message(role="user", content=wish),), answer="")
            for wish in wishes
        ]

    def connect(self, ask: Ask) -> None:
        self._ask = ask  # given once, before the first completion

    async def score(self, problem: Problem, text: str) -> Mapping[str, float]:
        question = f"Is this polite? Answer yes or no.\n\n{text}"
        verdict = await self._ask([Message(role="user", content=question)], max_tokens=4)  # or model="policy"
        return {"polite": float(verdict.strip().lower().startswith("yes")), "short": float(len(text) < 200)}
