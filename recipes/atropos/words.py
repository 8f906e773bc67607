"""An environment of Atropos to begin your own with: word problems; the reward is how near an answer comes."""

import re
from typing import Any

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup

TEXT = "Tom has {0} pens, finds {1} more and loses {2}. How many pens are left?"
NUM_PROBLEMS = 64


class Words(BaseEnv):
    name = "words"

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, list[APIServerConfig]]:
        # a list: of anything else atroposlib drops the URL that the command line or a file gives
        return BaseEnvConfig(wandb_name=cls.name), [APIServerConfig(server_type="vllm")]

    async def setup(self) -> None:
        self._problems, self._turn = problems(), 0

    async def get_next_item(self) -> tuple[str, int]:
        """One problem, in whatever form `collect_trajectories` likes."""
        self._turn += 1
        return self._problems[self._turn % NUM_PROBLEMS]

    async def collect_trajectories(self, item: tuple[str, int]) -> tuple[ScoredDataGroup | None, list[Any]]:
        """All completions of one problem with their scores, and items to try again later."""
        messages = [{"role": "user", "content": item[0]}]
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            chat = await managed.chat_completion(
                messages=messages, n=self.config.group_size, max_tokens=self.config.max_token_length, temperature=1.0
            )
            nodes = managed.get_state()["nodes"]  # tokens, masks and log-probs as they were sampled
        return ScoredDataGroup(
            tokens=[node.tokens for node in nodes],
            masks=[node.masked_tokens for node in nodes],
            inference_logprobs=[node.logprobs for node in nodes],
            scores=[score(choice.message.content, item[1]) for choice in chat.choices],
        ), []

    async def evaluate(self, *_: object, **__: object) -> None:
        """Only with steps_per_eval above 0."""


def problems() -> list[tuple[str, int]]:
    numbers = [(20 + 7 * turn % 31, 3 + 11 * turn % 37, 2 + turn % 17) for turn in range(NUM_PROBLEMS)]
    return [(TEXT.format(a, b, c), a + b - c) for a, b, c in numbers]


def score(text: str, answer: int) -> float:
    """1 for the right number at the end, a half for the one beside it, and so on."""
    found = re.findall(r"-?\d+", text)
    return 1 / (1 + abs(int(found[-1][:9]) - answer)) if found else 0.0


if __name__ == "__main__":
    Words.cli()
