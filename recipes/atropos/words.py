"""An environment of Atropos to begin your own with: questions to be answered in a given number of words.

The reward is dense: any two answers of different length differ in it, so that a small model learns from its first step
on. It runs in an interpreter with atroposlib 0.4.0; `+recipe=atropos` starts it.
"""

import random
from typing import Any

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup

NAMES = ("Mia", "Tom", "Ana", "Ben", "Eva", "Leo", "Ida", "Max")
THINGS = ("apples", "pens", "books", "coins", "shells")
NUM_WORDS = 24


class Words(BaseEnv):
    name = "words"

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, list[APIServerConfig]]:
        # a list: of anything else atroposlib drops the URL that the command line or a file gives
        return BaseEnvConfig(wandb_name=cls.name), [APIServerConfig(server_type="vllm")]

    async def setup(self) -> None:
        """Once, before the first item: read data here."""
        self._random = random.Random(0)

    async def get_next_item(self) -> str:
        """One problem, in whatever form `collect_trajectories` likes."""
        name, thing = self._random.choice(NAMES), self._random.choice(THINGS)
        has, gets = self._random.randint(2, 9), self._random.randint(2, 9)
        return f"{name} has {has} {thing}. {name} gets {gets} more. How many {thing} does {name} have?"

    async def collect_trajectories(self, item: str) -> tuple[ScoredDataGroup | None, list[Any]]:
        """All completions of one problem, with their scores; and items to try again later."""
        messages = [{"role": "user", "content": item}]
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            answer = await managed.chat_completion(
                messages=messages, n=self.config.group_size, max_tokens=self.config.max_token_length, temperature=1.0
            )
            nodes = managed.get_state()["nodes"]  # tokens, masks and log-probs as they were sampled
        group = ScoredDataGroup(tokens=[], masks=[], scores=[], inference_logprobs=[])
        for node, choice in zip(nodes, answer.choices, strict=True):
            group["tokens"].append(node.tokens)
            group["masks"].append(node.masked_tokens)
            group["inference_logprobs"].append(node.logprobs)
            group["scores"].append(score(choice.message.content))
        return group, []

    async def evaluate(self, *_: object, **__: object) -> None:
        """Only with steps_per_eval above 0."""


def score(text: str) -> float:
    """1 for the right number of words, less the further away."""
    return 1 - min(abs(len(text.split()) - NUM_WORDS) / NUM_WORDS, 1)


if __name__ == "__main__":
    Words.cli()
