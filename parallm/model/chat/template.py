"""The model's chat template, and control tokens in the contents of messages; called by `ChatTokenizer`.

Tokenizers take the text of a control token for the token wherever it stands, so a message could end its turn and begin
one of the system. In a content such a text gets a mark inside of it, and the template is rendered with that. The text
is encoded with a token in place of the mark, which splits it as tokenizers split at every control token, and that token
is taken out again.
"""

import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeVar

import jinja2
from jinja2.meta import find_undeclared_variables

from parallm.conversation import PromptEnd
from parallm.errors import InvalidRequest

GENERATION_MARK = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
"""A tag of transformers alone, which marks the assistant's turns for training."""
Value = TypeVar("Value")
RESERVED = {
    *("messages", "tools", "add_generation_prompt"),
    *("bos_token", "eos_token", "unk_token", "pad_token", "cls_token", "sep_token", "mask_token"),
    *("raise_exception", "strftime_now"),
}
"""Variables of templates that are never a client's to set by name."""


class ChatTemplate:
    """One model's template. Pure Python: usable on any thread."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer  # the Hugging Face tokenizer

    @cached_property
    def variables(self) -> frozenset[str]:
        """Names that the template reads and a client may set, such as `enable_thinking`."""
        return self._reads(None) - RESERVED

    @cached_property
    def knows_tools(self) -> bool:
        return "tools" in self._reads([{}])

    @property
    def source_with_tools(self) -> str:
        """The text of the template that renders chats with tools."""
        return self._source([{}])

    def render(
        self,
        turns: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] = (),
        variables: Mapping[str, object] | None = None,
        end: PromptEnd = "answer",
    ) -> str:
        """The text of a chat. Raises InvalidRequest where the template refuses it, or knows no tools or variable."""
        self._check(turns, tools, variables or {})
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    [dict(turn) for turn in turns],
                    tools=[dict(tool) for tool in tools] or None,
                    add_generation_prompt=end == "answer",
                    continue_final_message=end == "unfinished",
                    tokenize=False,
                    **(variables or {}),
                )
            )
        except Exception as error:  # templates are user-supplied programs: whatever they raise is about the messages
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise InvalidRequest(f"the model's chat template refuses these messages: {reason}", "messages") from error

    def _check(
        self,
        turns: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]],
        variables: Mapping[str, object],
    ) -> None:
        if tools and not self.knows_tools:
            raise InvalidRequest(
                "the model's chat template knows no tools; use another model or leave tools out", "tools"
            )
        if any(turn.get("tool_calls") for turn in turns) and "tool_calls" not in self.source_with_tools:
            raise InvalidRequest("the model's chat template knows no tool_calls of earlier turns", "messages")
        unknown = sorted(variables.keys() - self.variables)
        if unknown:
            raise InvalidRequest(
                f"the model's chat template reads no variable {unknown[0][:100]!r} that a client may set; "
                f"it reads {sorted(self.variables) or 'none'}",
                "chat_template_kwargs",
            )

    def _source(self, tools: list[dict[str, object]] | None) -> str:
        return str(self._tokenizer.get_chat_template(tools=tools))

    def _reads(self, tools: list[dict[str, object]] | None) -> frozenset[str]:
        environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
        return frozenset(find_undeclared_variables(environment.parse(GENERATION_MARK.sub("", self._source(tools)))))


class ControlTokens:
    """The control tokens of one tokenizer. Usable on any thread."""

    def __init__(self, tokenizer: Any, marks: tuple[str, ...]) -> None:
        """`tokenizer` is that of Hugging Face; `marks` begin and end reasoning and tool calls in the model's text.

        Tokenizers do not call all of their control tokens special: signs that the template writes, and those of the
        form <|name|>, count as well.
        """
        self._tokenizer = tokenizer
        written = (*marks, str(getattr(tokenizer, "chat_template", None)))
        added = {str(token): token.special for token in tokenizer.added_tokens_decoder.values()}
        signs = {text for text in added if not text[:1].isalnum() and any(text in source for source in written)}
        named = {text for text, is_special in added.items() if is_special or _is_tag(text)}
        self._texts = {text for text in signs | named if len(text) > 1 and not text.isspace()}
        self._of_marks = {text for text in self._texts if any(text in mark for mark in marks)}
        starts = {text[:2] for text in self._texts}
        self._by_start = {start: tuple(text for text in self._texts if text.startswith(start)) for start in starts}
        # looking ahead: matches may overlap
        self._starts = {
            letter: re.compile(f"{re.escape(letter)}(?={'|'.join(re.escape(s[1]) for s in starts if s[0] == letter)})")
            for letter in sorted({start[0] for start in starts})
        }
        self._mark = str(10**24 + secrets.randbelow(10**24))  # digits come through all that templates do to text
        self._splitter = self._choose_splitter()

    def may_be_in(self, values: Iterable[object]) -> bool:
        """False where no text among `values` has a letter with which a control token begins. It is fast."""
        for value in values:
            for text in (value,) if isinstance(value, str) else _texts_of(value):
                for letter in self._starts:
                    if letter in text:
                        return True
        return False

    def guarded(self, value: Value, *, by_model: bool = False) -> Value:
        """`value`, JSON of a client, with marks in the texts of control tokens; the same object where it has none.

        `by_model`: marks of reasoning and of tool calls are tokens, as the model wrote them. Raises InvalidRequest for
        values that are nested too deeply to be changed.
        """
        if all(next(self._starts_in(text, by_model), None) is None for text in _texts_of(value)):
            return value
        try:
            marked: Value = self._marked(value, by_model)
            return marked
        except RecursionError:
            raise InvalidRequest("a value with the text of a control token is nested too deeply") from None

    def encode(self, text: str, *, add_special: bool) -> tuple[int, ...]:
        """Token ids of a text in which `guarded` may have put marks."""
        if self._mark not in text:
            return tuple(self._tokenizer.encode(text, add_special_tokens=add_special))
        pieces = text.split(self._mark)
        if self._splitter is None:
            return self._encoded_in_pieces(pieces, add_special)
        splitter, token = self._splitter
        is_ours = [False] * pieces[0].count(splitter)
        for piece in pieces[1:]:
            is_ours += [True, *[False] * piece.count(splitter)]
        ids = self._tokenizer.encode(splitter.join(pieces), add_special_tokens=add_special)
        splitters = [index for index, number in enumerate(ids) if number == token]
        if len(splitters) != len(is_ours):
            return self._encoded_in_pieces(pieces, add_special)
        dropped = {index for index, ours in zip(splitters, is_ours, strict=True) if ours}
        return tuple(number for index, number in enumerate(ids) if index not in dropped)

    def _encoded_in_pieces(self, pieces: list[str], add_special: bool) -> tuple[int, ...]:
        """Token ids where no token can stand for the mark; a tokenizer may write a space where a piece begins."""
        first, *others = pieces
        ids = self._tokenizer.encode(first, add_special_tokens=add_special)
        for piece in others:
            ids = [*ids, *self._tokenizer.encode(piece, add_special_tokens=False)]
        return tuple(ids)

    def _starts_in(self, text: str, by_model: bool) -> Iterator[int]:
        """Indices at which texts of control tokens begin."""
        for letter, start in self._starts.items():
            for match in start.finditer(text) if letter in text else ():
                index = match.start()
                tokens = [token for token in self._by_start[text[index : index + 2]] if text.startswith(token, index)]
                if tokens and not (by_model and max(tokens, key=len) in self._of_marks):
                    yield index

    def _marked(self, value: Any, by_model: bool) -> Any:
        if isinstance(value, str):
            ends = [0, *(start + 1 for start in sorted(self._starts_in(value, by_model))), len(value)]
            return self._mark.join(value[begin:end] for begin, end in pairwise(ends))
        if isinstance(value, Mapping):
            return {self._marked(key, by_model): self._marked(item, by_model) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._marked(item, by_model) for item in value]
        return value

    def _choose_splitter(self) -> tuple[str, int] | None:
        """A control token, with its id, that no other one contains and that is not written around every text."""
        around = set(self._tokenizer.encode(""))
        candidates = [
            (token.lstrip or token.rstrip, str(token), int(number))
            for number, token in self._tokenizer.added_tokens_decoder.items()
            if token.special and not token.single_word and number not in around and str(token) in self._texts
        ]
        # the first one alone: a vocabulary may hold thousands of tokens without use
        unique = (one for one in sorted(candidates) if sum(one[1] in text for text in self._texts) == 1)
        return next((one[1:] for one in unique), None)


def _is_tag(text: str) -> bool:
    return text.startswith(("<|", "<\uff5c")) and text.endswith(">")


def _texts_of(value: object) -> Iterator[str]:
    """All texts in JSON, keys included."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, Mapping):
            stack += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple):
            stack += item
