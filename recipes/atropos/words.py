"""An environment of Atropos to begin your own with: questions, and a reward for answers of many words.

The reward is dense: answers of different length differ in it, so a small model learns from its first step on.
"""

import random
from typing import Any

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup

NAMES = ("Mia", "Tom", "Ana", "Ben", "Eva", "Leo", "Ida", "Max")
THINGS = ("apples", "pens", "books", "coins", "shells")
HALF = 24  # words that are worth half of the reward


class Words(BaseEnv):
    name = "words"

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, list[APIServerConfig]]:
        # a list: of anything else atroposlib drops the URL that the command line or a file gives
        return BaseEnvConfig(wandb_name=cls.name), [APIServerConfig(server_type="vllm")]

    async def setup(self) -> None:
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
    num_words = len(text.split())
    return num_words / (num_words + HALF)


if __name__ == "__main__":
    Words.cli()
