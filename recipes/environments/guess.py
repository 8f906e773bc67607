"""Learn to find a number with few guesses; the environment says where to look."""

from collections.abc import Mapping, Sequence

from parallm.types import Message, Problem, Split


class Guess:
    weights: Mapping[str, float] = {"correct": 1.0, "guesses": -0.05}

    def problems(self, split: Split) -> Sequence[Problem]:
        question = Message(role="user", content="Guess my number from 1 to 99.")
        return [
            Problem(problem_id=f"guess/{number}", messages=(question,), answer=str(number))
            for number in range(1, 100)
            if (number % 5 == 0) == (split == "test")
        ]

    def reply(self, problem: Problem, turns: Sequence[Message]) -> Sequence[Message] | None:
        said = turns[-1].content.strip()
        if said == problem.answer:
            return None
        if not said.isdecimal():
            return [Message(role="user", content="a number, please")]
        return [Message(role="user", content="higher" if int(said) < int(problem.answer) else "lower")]

    def score(self, problem: Problem, turns: Sequence[Message]) -> Mapping[str, float]:
        guesses = [turn.content.strip() for turn in turns if turn.role == "assistant"]
        return {"correct": float(guesses[-1] == problem.answer), "guesses": float(len(guesses))}
