"""Which texts a grammar lets through, token by token."""

import json
import time
from pathlib import Path

import numpy as np
import pytest
from mlx_lm.utils import load_tokenizer

from parallm.conversation import GrammarForm, GrammarSource
from parallm.errors import InvalidRequest
from parallm.model.chat.grammar import GrammarCompiler
from parallm.model.chat.tokenizer import ChatTokenizer
from parallm.model.load import NANO
from parallm.types import Grammar

POINT = {
    "type": "object",
    "properties": {"x": {"$ref": "#/$defs/number"}, "y": {"$ref": "#/$defs/number"}},
    "required": ["x", "y"],
    "additionalProperties": False,
    "$defs": {"number": {"type": "integer"}},
}
CALLS = {"functions": [{"name": "draw", "parameters": POINT}, {"name": "stop", "parameters": {"type": "object"}}]}
ONE = '[{"name": "draw", "arguments": {"x": 1, "y": 2}}]'
OTHER = '[{"name": "stop", "arguments": {}}]'
WRONG = '[{"name": "draw", "arguments": {}}]'


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer(load_tokenizer(NANO))


def thinker(folder: Path, *, special: bool) -> ChatTokenizer:
    plain = load_tokenizer(NANO)._tokenizer
    plain.add_tokens(["<think>", "</think>"], special_tokens=special)
    plain.save_pretrained(folder)
    return ChatTokenizer(load_tokenizer(folder))


def source(form: GrammarForm, text: object, whitespace: str | None = None) -> GrammarSource:
    return GrammarSource(
        form=form,
        text=text if isinstance(text, str) else json.dumps(text),
        parameter="response_format",
        whitespace=whitespace,
    )


def is_allowed(tokenizer: ChatTokenizer, what: GrammarSource, text: str, reasoning: bool | None = None) -> bool:
    return lets_through(tokenizer, tokenizer.compile_grammar(what, reasoning=reasoning), text)


def lets_through(tokenizer: ChatTokenizer, grammar: Grammar, text: str) -> bool:
    """Whether each token of `text` is allowed in its turn, and the end behind it."""
    mask = grammar.start()
    (end,) = tokenizer.eos_token_ids
    for token in (*tokenizer.encode_more(text), end):
        bits = np.unpackbits(np.frombuffer(mask.allowed(), np.uint8), bitorder="little")
        if not bits[token]:
            return False
        if token != end:
            mask.accept(token)
    return True


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"x": 1, "y": -20}', True),
        ('{"x":1,"y":2}', True),
        ('{\n"x": 1,\n"y": 2\n}', True),
        ('{ "x" : 1 , "y" : 2 }', True),
        ('{\n  "x": 1,\n  "y": 2\n}', False),
        ('{\t"x": 1, "y": 2}', False),
        ('{"x": 1}', False),
        ('{"x": 1, "y": 2, "z": 3}', False),
        ('{"x": "1", "y": 2}', False),
        ("[]", False),
        ("", False),
        ('{"x": 1, "y": 2} ', False),
        ('{"x":  1, "y": 2}', False),
        ('{"x": 9007199254740991, "y": -9007199254740991}', True),
        ('{"x": 9007199254740992, "y": 2}', False),
    ],
)
def test_a_schema_is_kept(tokenizer: ChatTokenizer, text: str, expected: bool) -> None:
    assert is_allowed(tokenizer, source("json", POINT), text) == expected


@pytest.mark.parametrize(
    ("whitespace", "right", "wrong"),
    [
        ("", ['{"x":1,"y":2}'], ['{"x": 1,"y":2}', '{"x":1,\n"y":2}']),
        (r"[ \n]{1,3}", ['{"x":1,"y":2}', '{\n  "x": 1,\n  "y": 2\n}'], ['{"x":    1,"y":2}']),
    ],
)
def test_white_space_between_tokens_of_json_is_what_the_client_says(
    tokenizer: ChatTokenizer, whitespace: str, right: list[str], wrong: list[str]
) -> None:
    calls = CALLS | {"several": False}
    for form, text, around in (("json", POINT, "{}"), ("calls", calls, '[{{"name": "draw", "arguments": {}}}]')):
        what = source(form, text, whitespace)  # type: ignore[arg-type]  # mypy takes the form for any text
        assert all(is_allowed(tokenizer, what, around.format(one)) for one in right)
        assert not any(is_allowed(tokenizer, what, around.format(one)) for one in wrong)


def test_options_that_a_schema_has_itself_count(tokenizer: ChatTokenizer) -> None:
    schema = POINT | {"x-guidance": {"whitespace_pattern": "~"}}
    assert is_allowed(tokenizer, source("json", schema), '{"x":~1,"y":2}')
    assert not is_allowed(tokenizer, source("json", schema), '{"x": 1,"y":2}')


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (True, ["[1, {}]"], ["[1,  {}]"]),
        ({"type": "integer", "minimum": 5}, ["5"], ["4", "9007199254740992"]),
        ({"type": "integer", "exclusiveMaximum": 5}, ["4"], ["5", "-9007199254740992"]),
        ({"type": "integer", "minimum": 10**17}, ["100000000000000001"], ["1"]),
        ({"type": ["integer", "null"]}, ["null", "1"], ["9007199254740992"]),
        ({"type": ["integer", "number"]}, ["9007199254740992"], []),
        ({"const": {"type": "integer"}}, ['{"type": "integer"}'], ['{"type": "integer", "minimum": 1}']),
        ({"items": {"anyOf": [{"type": "integer"}]}, "type": "array"}, ["[1]"], ["[9007199254740992]"]),
        ({"type": "integer", "enum": [10**18]}, ["1000000000000000000"], ["1"]),
    ],
)
def test_integers_without_bounds_are_those_that_readers_of_json_agree_on(
    tokenizer: ChatTokenizer, schema: object, right: list[str], wrong: list[str]
) -> None:
    assert all(is_allowed(tokenizer, source("json", schema), one) for one in right)
    assert not any(is_allowed(tokenizer, source("json", schema), one) for one in wrong)


def test_a_schema_of_a_thousand_levels_is_refused(tokenizer: ChatTokenizer) -> None:
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        tokenizer.compile_grammar(source("json", '{"items":' * 900 + "true" + "}" * 900))


@pytest.mark.parametrize(
    ("form", "text", "right", "wrong"),
    [
        ("regex", r"[0-9]+/[0-9]+|a\/b", ["1/2", "a/b"], ["1", "1/", "a"]),
        ("choice", ["yes", 'no "né\n🙂"'], ["yes", 'no "né\n🙂"'], ["no", "maybe", "yesyes"]),
        ("calls", CALLS | {"several": False}, [ONE, OTHER], [f"[{ONE[1:-1]}, {ONE[1:-1]}]", "[]", WRONG]),
        ("calls", CALLS | {"several": True}, [ONE, f"[{ONE[1:-1]}, {OTHER[1:-1]}]"], ["[]", WRONG, ONE[:-1]]),
    ],
)
def test_other_forms_are_kept(
    tokenizer: ChatTokenizer, form: GrammarForm, text: object, right: list[str], wrong: list[str]
) -> None:
    assert all(is_allowed(tokenizer, source(form, text), one) for one in right)
    assert not any(is_allowed(tokenizer, source(form, text), one) for one in wrong)


@pytest.mark.parametrize("special", [False, True])
def test_reasoning_may_stand_before_the_answer(tmp_path: Path, special: bool) -> None:
    tokenizer = thinker(tmp_path, special=special)
    schema = source("json", {"type": "object"})
    assert is_allowed(tokenizer, schema, "<think>\n1 < 2\n</think>\n\n{}", reasoning=False)
    assert is_allowed(tokenizer, schema, "{}", reasoning=False)
    assert is_allowed(tokenizer, schema, "1 < 2\n</think>\n\n{}", reasoning=True)
    assert not is_allowed(tokenizer, schema, "{}", reasoning=True)
    assert not is_allowed(tokenizer, schema, "<think>1</think>{}", reasoning=None)
    assert not is_allowed(tokenizer, schema, "<think>1</think>one", reasoning=False)


def test_marks_that_are_plain_text_are_found_in_it(tokenizer: ChatTokenizer) -> None:
    marks = ("[a]", "[/a]"), ("(call)", "(end)")
    compiler = GrammarCompiler(
        tokenizer._tokenizer, tokenizer.eos_token_ids, reasoning_marks=marks[0], call_marks=marks[1]
    )
    what = source("text_and_calls", CALLS | {"several": True})
    call = f"(call){ONE[1:-1]}(end)"
    for text in ("hello", call, f"well {call} and {call}", f"[a]hm[/a]\n{call}"):
        assert lets_through(tokenizer, compiler.compile(what, reasoning=False), text)
    for text in ("(call)no(end)", f"(call){WRONG[1:-1]}(end)"):
        assert not lets_through(tokenizer, compiler.compile(what, reasoning=False), text)


def test_a_model_with_another_notation_of_calls_cannot_promise_them(tokenizer: ChatTokenizer) -> None:
    with pytest.raises(InvalidRequest, match="send strict false"):
        tokenizer.compile_grammar(source("text_and_calls", CALLS | {"several": True}))


def test_completions_go_their_own_ways(tokenizer: ChatTokenizer) -> None:
    grammar = tokenizer.compile_grammar(source("choice", ["12", "34"]))
    first, second = grammar.start(), grammar.start()
    one, three = tokenizer.encode_more("1")[0], tokenizer.encode_more("3")[0]
    first.accept(one)
    second.accept(three)
    assert first.allowed() != second.allowed()


@pytest.mark.parametrize("regex", ["(x?)?" * 50 + "x" * 50, "(a+)+b", "(.*a){30}", "([a-z]+)*1", "(.*)*(.*)*(.*)*x"])
def test_expressions_of_clients_are_followed_in_a_time_that_grows_with_the_text(
    regex: str, tokenizer: ChatTokenizer
) -> None:
    """A library that tries all ways through an expression would take longer than the universe is old."""
    start = time.process_time()
    mask = tokenizer.compile_grammar(source("regex", regex)).start()
    for token in tokenizer.encode("a" * 60):
        mask.accept(token)
        mask.allowed()
    assert time.process_time() - start < 2


def test_what_the_grammar_does_not_allow_leaves_nothing_to_say(tokenizer: ChatTokenizer) -> None:
    mask = tokenizer.compile_grammar(source("choice", ["1"])).start()
    mask.accept(tokenizer.encode_more("2")[0])
    assert mask.allowed() == b""


@pytest.mark.parametrize(
    ("form", "text", "reason"),
    [
        ("json", {"type": "strange"}, "Invalid type: strange"),
        ("json", {"not": {}}, "Unimplemented keys"),
        ("json", {"$ref": "http://example.com/schema"}, "not present"),
        ("json", {"type": "string", "pattern": "(?=a)"}, "look-ahead"),
        ("json", {"anyOf": [False]}, "Unsatisfiable"),
        ("regex", "(", "unclosed group"),
        ("calls", {"functions": [{"name": "a", "parameters": {"not": {}}}], "several": True}, "Unimplemented"),
    ],
)
def test_what_cannot_be_enforced_is_refused_with_the_reason(
    tokenizer: ChatTokenizer, form: GrammarForm, text: object, reason: str
) -> None:
    with pytest.raises(InvalidRequest, match=reason) as refused:
        tokenizer.compile_grammar(source(form, text))
    assert refused.value.parameter == "response_format"
