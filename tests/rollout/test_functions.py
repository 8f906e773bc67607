"""Prompts with functions, and what a model's text calls."""

import json
from pathlib import Path

import pytest
from mlx_lm.utils import load_tokenizer

from parallm.conversation import ToolCall
from parallm.errors import InvalidRequest
from parallm.model.chat import ChatTokenizer
from parallm.model.load import NANO
from parallm.rollout.functions import heard, prompt_of
from parallm.types import Message, Problem

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
    text = tokenizer.decode(prompt_of(tokenizer, PROBLEM), special=True)
    assert '"name": "add"' in text


def test_a_template_that_knows_no_functions_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="tools"):
        prompt_of(ChatTokenizer(load_tokenizer(NANO)), PROBLEM)


def test_calls_are_taken_out_of_the_text(tokenizer: ChatTokenizer) -> None:
    turn = heard(tokenizer, PROBLEM, (), f"let me see {CALL}")
    call = ToolCall(name="add", arguments='{"numbers": [2, 2]}')
    assert turn == Message(role="assistant", content="let me see", calls=(call,))


def test_what_is_no_call_stays_text(tokenizer: ChatTokenizer) -> None:
    text = "so <tool_call>2 + 2</tool_call>"
    assert heard(tokenizer, PROBLEM, (), text) == Message(role="assistant", content=text)


def test_without_functions_text_is_text(tokenizer: ChatTokenizer) -> None:
    plain = Problem(problem_id="p", messages=PROBLEM.messages, answer="4")
    assert heard(tokenizer, plain, (), CALL) is None
