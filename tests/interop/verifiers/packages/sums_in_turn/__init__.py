"""Two word problems in one conversation, which a scripted user of verifiers 0.4 opens and goes on with."""

import json
import re
from collections.abc import Iterable
from pathlib import Path

import verifiers.v1 as vf

__all__ = ["SumsInTurnEnv", "SumsInTurnTaskset"]
ANSWER = re.compile(r"####\s*(-?\d+)\s*$")


class SumsInTurnData(vf.TaskData):
    questions: list[str]
    answers: list[str]


class SumsInTurnTask(vf.Task[SumsInTurnData]):
    @vf.reward(weight=1.0)
    async def right_turns(self, trace: vf.Trace) -> float:
        found = [ANSWER.search(message.content or "") for message in trace.assistant_messages]
        right = [one is not None and one[1] == answer for one, answer in zip(found, self.data.answers, strict=False)]
        return sum(right) / len(self.data.answers)


class SumsInTurnConfig(vf.TasksetConfig):
    path: str
    split: str = "train"


class SumsInTurnTaskset(vf.Taskset[SumsInTurnTask, SumsInTurnConfig]):
    def load(self) -> Iterable[SumsInTurnTask]:
        lines = (Path(self.config.path) / f"{self.config.split}.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        for pair in zip(rows[::2], rows[1::2], strict=False):
            questions, answers = [row["question"] for row in pair], [row["answer"] for row in pair]
            yield SumsInTurnTask(SumsInTurnData(questions=questions, answers=answers), self.config.task)


class SumsInTurnEnv(vf.SingleAgentEnv):
    async def run(self, task: SumsInTurnTask, agents: vf.Agents) -> None:
        async with agents.agent.interaction(task) as interaction:
            for question in task.data.questions:
                if (await interaction.turn(question)).terminated:
                    break
