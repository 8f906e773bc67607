"""Sections and calls in the notations of several models, by mlx-lm's parsers."""

import json
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.utils import load_tokenizer

from parallm.conversation import Section
from parallm.model.chat.tokenizer import ChatTokenizer
from parallm.model.load import NANO

ADD: dict[str, Any] = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
NOTATIONS = {
    "json": ("{# <tool_call> tool_call.name #}", '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'),
    "qwen3_coder": (
        "{# <tool_call>\n<function= #}",
        "<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n</function>\n</tool_call>",
    ),
    "mistral": ("{# [TOOL_CALLS] #}", '[TOOL_CALLS]add[ARGS]{"a": 2}'),
    "pythonic": ("{# <|tool_call_start|> #}", "<|tool_call_start|>[add(a=2)]<|tool_call_end|>"),
    "glm47": ("{# <arg_key> #}", "<tool_call>add<arg_key>a</arg_key><arg_value>2</arg_value></tool_call>"),
}


def tokenizer_of(folder: Path, template: str, *special: str) -> ChatTokenizer:
    plain = load_tokenizer(NANO)._tokenizer
    plain.chat_template = template
    plain.add_special_tokens({"additional_special_tokens": list(special)})
    plain.save_pretrained(folder)
    return ChatTokenizer(load_tokenizer(folder))


def sections(tokenizer: ChatTokenizer, pieces: list[str]) -> list[tuple[Section, str]]:
    """Neighbouring pieces of one section joined, empty ones left out."""
    reader = tokenizer.output.reader(begins_in_reasoning=False, has_tools=True)
    joined: list[tuple[Section, str]] = []
    for section, text in [*(item for piece in pieces for item in reader.read(piece)), *reader.finish()]:
        if joined and joined[-1][0] == section:
            joined[-1] = (section, joined[-1][1] + text)
        elif text:
            joined.append((section, text))
    return joined


@pytest.mark.parametrize("name", NOTATIONS)
@pytest.mark.parametrize("size", [1, 5, 1000])
def test_a_call_is_found_however_its_text_comes(tmp_path: Path, name: str, size: int) -> None:
    template, written = NOTATIONS[name]
    tokenizer = tokenizer_of(tmp_path, template)
    text = f"I add. {written}"
    (before, call) = sections(tokenizer, [text[place : place + size] for place in range(0, len(text), size)])
    assert (before, call[0]) == (("text", "I add. "), "tool")
    (parsed,) = tokenizer.output.parse_calls(call[1], [ADD])
    assert (parsed.name, json.loads(parsed.arguments)) == ("add", {"a": 2})


def test_marks_that_are_special_tokens_reach_the_reader(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, NOTATIONS["mistral"][0], "[TOOL_CALLS]", "[ARGS]")
    (end,) = tokenizer.eos_token_ids
    text = tokenizer.decode([*tokenizer.encode_more('[TOOL_CALLS]add[ARGS]{"a": 2}'), end])
    assert sections(tokenizer, [text]) == [("tool", 'add[ARGS]{"a": 2}')]


DEEP = '{"name": "add", "arguments": "' + "[" * 3000 + '"}'
"""A call whose arguments are JSON as a text, and too deep to be read."""


@pytest.mark.parametrize("name", NOTATIONS)
@pytest.mark.parametrize(
    "text", ["[", "{", "add(", "[1, 2]", '{"name": null}', "[ARGS]", "<function=", "{" * 3000, DEEP]
)
def test_nonsense_is_no_call(tmp_path: Path, name: str, text: str) -> None:
    assert tokenizer_of(tmp_path, NOTATIONS[name][0]).output.parse_calls(text, [ADD]) == []


def test_only_notations_of_json_have_marks_for_grammars(tmp_path: Path) -> None:
    marks = {
        name: tokenizer_of(tmp_path / name, template).output.json_call_marks
        for name, (template, _) in NOTATIONS.items()
    }
    assert {name for name, found in marks.items() if found is not None} == {"json"}
