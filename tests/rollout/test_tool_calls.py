"""Prompts with functions, and what a model's text calls."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from mlx_lm.utils import load_tokenizer

from parallm.conversation import ToolCall
from parallm.errors import InvalidRequest
from parallm.model.chat.tokenizer import ChatTokenizer
from parallm.model.load import NANO
from parallm.rollout.runner import RolloutRunner, encode_problem, parse_response
from parallm.rollout.settings import EpisodeSettings
from parallm.types import Completion, GenerationRequest, Message, Problem, SamplingParams, Split

TOOLS = json.dumps([{"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}])
PROBLEM = Problem(problem_id="p", messages=(Message(role="user", content="2 + 2"),), answer="4", tools=TOOLS)
TEMPLATE = (
    "{% if tools %}<|system|>{{ tools | tojson }}{% endif %}"
    "{% for message in messages %}{{ '<|' + message.role + '|>' + message.content }}{% endfor %}"
    "{# <tool_call> tool_call.name #}<|assistant|>"
)
CALL = '<tool_call>{"name": "add", "arguments": {"numbers": [2, 2]}}</tool_call>'


@pytest.fixture
def tokenizer(tmp_path: Path) -> ChatTokenizer:
    for file in NANO.iterdir():
        if file.suffix == ".json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    settings = json.loads((NANO / "tokenizer_config.json").read_text()) | {"chat_template": TEMPLATE}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return ChatTokenizer(load_tokenizer(tmp_path))


def test_the_prompt_tells_the_functions(tokenizer: ChatTokenizer) -> None:
    text = tokenizer.decode(encode_problem(tokenizer, PROBLEM), special=True)
    assert '"name": "add"' in text


def test_a_template_that_knows_no_functions_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="tools"):
        encode_problem(ChatTokenizer(load_tokenizer(NANO)), PROBLEM)


def test_calls_are_taken_out_of_the_text(tokenizer: ChatTokenizer) -> None:
    turn = parse_response(tokenizer, PROBLEM, (), f"let me see {CALL}")
    call = ToolCall(name="add", arguments='{"numbers": [2, 2]}')
    assert turn == Message(role="assistant", content="let me see", calls=(call,))


def test_what_is_no_call_stays_text(tokenizer: ChatTokenizer) -> None:
    text = "so <tool_call>2 + 2</tool_call>"
    assert parse_response(tokenizer, PROBLEM, (), text) == Message(role="assistant", content=text)


def test_without_functions_text_is_text(tokenizer: ChatTokenizer) -> None:
    plain = Problem(problem_id="p", messages=PROBLEM.messages, answer="4")
    assert parse_response(tokenizer, plain, (), CALL) is None


class Adding:
    """Answers a call with its result; an episode whose last turn calls nothing is over."""

    weights: Mapping[str, float] = {"calls": 1.0}

    def problems(self, split: Split) -> Sequence[Problem]:
        return [PROBLEM]

    def reply(self, problem: Problem, turns: Sequence[Message]) -> Sequence[Message] | None:
        return [Message(role="tool", content="4")] if turns[-1].calls else None

    def score(self, problem: Problem, turns: Sequence[Message]) -> Mapping[str, float]:
        return {"calls": float(sum(len(turn.calls) for turn in turns))}


def test_a_call_is_answered_behind_the_very_tokens_that_made_it(tokenizer: ChatTokenizer) -> None:
    texts = iter([CALL, "#### 4"])
    prompts: list[tuple[int, ...]] = []

    async def generate_all(requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        prompts.extend(request.prompt_tokens for request in requests)
        tokens = (*tokenizer.encode_more(next(texts)), tokenizer.encode_more("<|end|>")[0])
        completion = Completion(
            request_id="a",
            index=0,
            tokens=tokens,
            logprobs=(-1.0,) * len(tokens),
            top_logprobs=(),
            text="",
            finish_reason="stop",
            weight_versions=(),
        )
        return [[completion]]

    runner = RolloutRunner(generate_all, tokenizer, Adding(), EpisodeSettings(max_turns=4))
    first = encode_problem(tokenizer, PROBLEM)
    request = GenerationRequest(request_id="a", prompt_tokens=first, sampling=SamplingParams(max_tokens=200))
    ((scored,),) = asyncio.run(runner.run_episodes([PROBLEM], [request]))
    assert scored.score.parts == {"calls": 1}
    text = tokenizer.decode(prompts[1][len(first) :], special=True)
    assert text == f"{CALL}<|end|><|tool|>4<|assistant|>"
