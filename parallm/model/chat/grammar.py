"""Grammars of completions as masks over the model's tokens, computed by llguidance; its limits bound the time of each.

JSON schemas of clients get bounds on white space and integers, which models repeat without end.
"""

import json
import re
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from parallm.conversation import GrammarSource
from parallm.errors import InvalidRequest
from parallm.types import Grammar

NUM_CACHED = 128
TEXT = r"/(.|\n)*/"
AFTER_REASONING = r"/[ \n]{0,4}/"

WHITESPACE = r"[\x20\x0A]"
"""White space allowed between two tokens of JSON, at most once. Small models fill more room until their tokens are used
up. Without any they do not end a number, since they learned to end it by a space or a line end."""
MAX_INTEGER = 2**53 - 1
"""The largest integer that all readers of JSON agree on (RFC 8259)."""
OPTIONS = "x-guidance"
BY_NAME = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
"""Keywords that hold schemas by name."""
SCHEMAS = {"items", "prefixItems", "additionalProperties", "anyOf", "oneOf", "allOf"}
"""Keywords that hold a schema, or a list of some."""
BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
VALUES = {"enum", "const"}


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar, before the first token."""

    matcher: LLMatcher
    source: GrammarSource
    reasoning: bool | None
    """`source` and `reasoning` of `GrammarCompiler.compile`, by which another process can compile the same."""

    def start(self) -> "GrammarMask":
        return GrammarMask(self.matcher.deep_copy())


@dataclass(frozen=True, slots=True)
class GrammarMask:
    """The state of one text."""

    matcher: LLMatcher

    def allowed(self) -> bytes:
        mask = self.matcher.compute_bitmask()
        return b"" if self.matcher.is_error() else mask

    def accept(self, token: int) -> None:
        self.matcher.consume_token(token)


class GrammarCompiler:
    """Grammars over one model's tokens. Usable on any thread; the first use may take a second."""

    def __init__(
        self,
        tokenizer: Any,
        eos_token_ids: frozenset[int],
        *,
        reasoning_marks: tuple[str, str] | None,
        call_marks: tuple[str, str] | None,
    ) -> None:
        """`call_marks` are for a model that writes JSON between them."""
        self._tokenizer = tokenizer  # the Hugging Face tokenizer
        self._eos_token_ids = sorted(eos_token_ids)
        self._reasoning_marks = reasoning_marks
        self._call_marks = call_marks
        self._compiled = lru_cache(NUM_CACHED)(self._compile)

    def compile(self, source: GrammarSource, *, reasoning: bool | None) -> Grammar:
        """`reasoning`: True if the text begins inside of reasoning, False if it may begin with it, None if it does not.

        Raises InvalidRequest with the library's reason.
        """
        return self._compiled(source, reasoning if self._reasoning_marks else None)

    def _compile(self, source: GrammarSource, reasoning: bool | None) -> Grammar:
        try:
            lark = self._lark(source, reasoning)
        except RecursionError as error:
            raise InvalidRequest(f"{source.parameter} is nested too deeply; flatten it", source.parameter) from error
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(self._tokens, LLMatcher.grammar_from_lark(lark), log_level=0, limits=limits)
        if matcher.is_error():
            reason = " ".join(matcher.get_error().split())[:500]
            raise InvalidRequest(f"{source.parameter} cannot be enforced: {reason}", source.parameter)
        return CompiledGrammar(matcher, source, reasoning)

    def _lark(self, source: GrammarSource, reasoning: bool | None) -> str:
        match source.form:
            case "json":
                rules = f"answer: %json {enforceable(json.loads(source.text), source.whitespace)}"
            case "regex":
                rules = f"answer: /{_slashed(source.text)}/"
            case "choice":
                rules = "answer: " + " | ".join(
                    json.dumps(choice, ensure_ascii=False) for choice in json.loads(source.text)
                )
            case "calls":
                rules = _calls(source.whitespace, **json.loads(source.text))
            case "text_and_calls":
                rules = self._text_and_calls(source, **json.loads(source.text))
        prefix = {None: "", True: "reasoning", False: "(reasoning_start reasoning)?"}[reasoning]
        return "\n".join([f"start: {prefix} answer", rules, *self._reasoning_rules])

    def _text_and_calls(self, source: GrammarSource, functions: Sequence[dict[str, Any]], several: bool) -> str:
        if self._call_marks is None:
            raise InvalidRequest(
                f"{source.parameter}: strict functions need a model that writes its calls as JSON, or a tool_choice of "
                "'required' or of one function; send strict false",
                source.parameter,
            )
        start, end = self._call_marks
        turn = f"turn: before WHITE? call WHITE? {self._special(end) or json.dumps(end)}"
        rules = [f"answer: turn{'*' if several else '?'} TEXT", turn, *self._up_to("before", start)]
        return "\n".join([*rules, f"TEXT: {TEXT}", r"WHITE: /\n/", _functions(functions, source.whitespace)])

    def _up_to(self, rule: str, mark: str) -> Sequence[str]:
        """`rule` is any text up to and with the mark."""
        if special := self._special(mark):
            return [f"{rule}: {rule.upper()} {special}", f"{rule.upper()}: {TEXT}"]
        spelled = "".join(f"\\x{{{ord(character):x}}}" for character in mark)
        return [f"{rule}[lazy]: /(.|\\n)*{spelled}/"]

    @cached_property
    def _reasoning_rules(self) -> Sequence[str]:
        if self._reasoning_marks is None:
            return ()
        start, end = self._reasoning_marks
        rules = [f"reasoning_start: {self._special(start) or json.dumps(start)}", "reasoning: thoughts AFTER"]
        return [*rules, *self._up_to("thoughts", end), f"AFTER: {AFTER_REASONING}"]

    def _special(self, mark: str) -> str | None:
        """The mark in llguidance's notation, if it is a token that no text can contain."""
        token = self._tokenizer.convert_tokens_to_ids(mark)
        is_special = isinstance(token, int) and token < self._tokens.vocab_size and self._tokens.is_special_token(token)
        return f"<[{token}]>" if is_special else None

    @cached_property
    def _tokens(self) -> LLTokenizer:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise InvalidRequest("grammars need a fast tokenizer, which this model has not", "response_format")
        backend = copy(backend)
        backend.no_padding()
        backend.no_truncation()
        return LLTokenizer(backend.to_str(), eos_token=self._eos_token_ids)


def _calls(whitespace: str | None, functions: Sequence[dict[str, Any]], several: bool) -> str:
    more = ' (", " call)*' if several else ""
    return f'answer: "[" call{more} "]"\n{_functions(functions, whitespace)}'


def _functions(functions: Sequence[dict[str, Any]], whitespace: str | None) -> str:
    """The rule `call`: a call of one of the functions."""
    rules = ["call: " + " | ".join(f"call_{number}" for number in range(len(functions)))]
    for number, function in enumerate(functions):
        begin = json.dumps(f'{{"name": {json.dumps(function["name"])}, "arguments": ')
        rules.append(f'call_{number}: {begin} arguments_{number} "}}"')
        rules.append(f"arguments_{number}: %json {enforceable(function['parameters'], whitespace)}")
    return "\n".join(rules)


def _slashed(regex: str) -> str:
    """A regular expression between slashes, in which slashes that are not escaped and line ends are."""
    escaped = re.sub(r"\\.|/", lambda match: "\\/" if match[0] == "/" else match[0], regex, flags=re.DOTALL)
    return escaped.replace("\n", "\\n")


def enforceable(schema: Any, whitespace: str | None) -> str:
    """Return the schema as JSON, with llguidance's options at its top level; the schema's own options win.

    `whitespace` is that of `GrammarSource`. Integers without bounds get those of `MAX_INTEGER`.
    """
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        return json.dumps(schema)
    pattern = WHITESPACE if whitespace is None else whitespace
    usual = {"whitespace_pattern": pattern} if pattern else {"whitespace_flexible": False}
    own = schema.get(OPTIONS, {})
    return json.dumps({**_bounded(schema), OPTIONS: {**usual, **own} if isinstance(own, dict) else own})


def _bounded(schema: Any) -> Any:
    """Return the schema with bounds for each integer. Values of `enum` and the like stay as they are."""
    if isinstance(schema, list):
        return [_bounded(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    bounded = {keyword: _bounded(value) if keyword in SCHEMAS else value for keyword, value in schema.items()}
    for keyword, schemas in schema.items():
        if keyword in BY_NAME and isinstance(schemas, dict):
            bounded[keyword] = {name: _bounded(each) for name, each in schemas.items()}
    return bounded | (_missing_bounds(schema) if _is_integer(schema.get("type")) and not VALUES & schema.keys() else {})


def _is_integer(kind: Any) -> bool:
    """Return whether only integers are numbers here: bounds of an integer would bound a number, too."""
    return kind == "integer" or (isinstance(kind, list) and "integer" in kind and "number" not in kind)


def _missing_bounds(schema: Mapping[str, Any]) -> dict[str, int]:
    """Return no bounds where a given bound lies beyond `MAX_INTEGER`: together they could allow nothing."""
    bounds = [schema[name] for name in BOUNDS & schema.keys()]
    if any(not isinstance(bound, int | float) or abs(bound) > MAX_INTEGER for bound in bounds):
        return {}
    low = {} if {"minimum", "exclusiveMinimum"} & schema.keys() else {"minimum": -MAX_INTEGER}
    high = {} if {"maximum", "exclusiveMaximum"} & schema.keys() else {"maximum": MAX_INTEGER}
    return low | high
