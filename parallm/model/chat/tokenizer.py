"""Text to tokens and back: chats, text that grows token by token, and tokens between two turns of the model.

Token ids that the model sampled are never re-tokenised: `reply_tokens` gives the ids that follow them.
"""

import hashlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from parallm.conversation import ChatPrompt, GrammarSource, PromptEnd
from parallm.errors import InvalidRequest
from parallm.model.chat.grammar import GrammarCompiler
from parallm.model.chat.output import OutputFormat
from parallm.model.chat.template import ChatTemplate, ControlTokens
from parallm.types import Grammar, Message

TEXTS_BY_MODEL = frozenset({"content", "reasoning_content"})
"""Keys of an assistant's turn with texts that the model wrote."""
ASSISTANT = "assistant"
OF_TRANSFORMERS = "transformers.tokenization_utils"
"""The beginning of the modules in which transformers decodes for all tokenizers."""
TIDIES_BYTE_PAIRS = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
"""Without it transformers leaves the spaces of byte-pair encodings as they are."""
PLACEHOLDER = "the-turn-7f3a9c51"
"""Stands for the model's turn while the template is rendered around it; no user's message holds it."""


class ChatTokenizer:
    """One model's tokenizer, chat template and notation of answers. Pure Python: usable on any thread."""

    def __init__(self, wrapper: TokenizerWrapper) -> None:
        self._tokenizer: Any = wrapper._tokenizer  # the Hugging Face tokenizer inside mlx-lm's wrapper
        # it would print a warning about each longer text; the engine refuses what is too long
        self._tokenizer.model_max_length = sys.maxsize
        self._backend = _backend_of(self._tokenizer)
        self.eos_token_ids = frozenset(int(token) for token in wrapper.eos_token_ids)
        self.has_chat_template = bool(getattr(self._tokenizer, "chat_template", None))
        self.template = ChatTemplate(self._tokenizer)
        self.output = OutputFormat(wrapper)
        self._hidden = self._hidden_tokens()
        self._controls = ControlTokens(self._tokenizer, self.output.marks)
        self._texts: dict[int, str] = {}  # by token: an answer with log-probs asks for the same ones again
        self._shown_texts: dict[int, str] = {}  # by token: text that grows asks for the one before each token
        self._grammars = GrammarCompiler(
            self._tokenizer,
            self.eos_token_ids,
            reasoning_marks=self.output.reasoning_marks,
            call_marks=self.output.json_call_marks,
        )

    @property
    def template_variables(self) -> frozenset[str]:
        """Names that the chat template reads and a client may set."""
        return self.template.variables if self.has_chat_template else frozenset()

    @property
    def template_source(self) -> str:
        """The chat template, that for calls of tools if there are several; empty without one."""
        return self.template.source_with_tools if self.has_chat_template else ""

    @property
    def end_token(self) -> int:
        """Token that ends a plain text. A chat template may end an answer with another token."""
        own = self._tokenizer.eos_token_id
        return int(own) if own in self.eos_token_ids else min(self.eos_token_ids)

    @cached_property
    def max_token_length(self) -> int:
        """Most characters that a token stands for; an upper bound where the vocabulary is one of bytes."""
        return max(map(len, self._tokenizer.get_vocab()))

    @cached_property
    def sha256(self) -> str:
        """Digest of what token ids mean: the vocabulary and the tokens that end a completion."""
        meaning = [sorted(self._tokenizer.get_vocab().items()), sorted(self.eos_token_ids)]
        return hashlib.sha256(json.dumps(meaning).encode()).hexdigest()

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> tuple[int, ...]:
        """Token ids of plain text. `add_special`: with the special tokens that the tokenizer adds by itself.
        `parse_special`: texts of control tokens become the tokens."""
        return self._controls.encode(text if parse_special else self._controls.guarded(text), add_special=add_special)

    def encode_more(self, text: str) -> tuple[int, ...]:
        """Token ids of text that follows other text: nothing is added to it."""
        return self.encode(text, add_special=False)

    def encode_filled(self, template: str, **texts: str) -> tuple[int, ...]:
        """Token ids of `template` with `{name}` replaced by each text. Control tokens in the texts are text."""
        # in one pass: a text may hold the name of another field
        fields = "|".join(map(re.escape, texts))
        filled = re.sub(rf"\{{({fields})\}}", lambda match: self._controls.guarded(texts[match[1]]), template)
        return self.encode_more(filled)

    @cached_property
    def text_frame(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Token ids that the tokenizer puts before and after a text, such as those of [CLS] and [SEP]."""
        text, whole = self.encode_more("a"), self.encode("a")
        starts = (start for start in range(len(whole)) if whole[start : start + len(text)] == text)
        start = next(starts, 0)
        return whole[:start], whole[start + len(text) :]

    @cached_property
    def pair_frame(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Token ids before, between and after two texts that the model reads as a pair."""
        encoded = self._tokenizer("a", "b")
        sides = encoded.sequence_ids(0)
        first, second = (tuple(index for index, side in enumerate(sides) if side == which) for which in (0, 1))
        tokens = tuple(encoded["input_ids"])
        return tokens[: first[0]], tokens[first[-1] + 1 : second[0]], tokens[second[-1] + 1 :]

    def encode_chat(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Token ids of the chat template with the generation prompt. Control tokens in the messages are text.

        A model without a template gets the contents joined by newlines. Raises InvalidRequest where it refuses them.
        """
        return self.encode_prompt(_turns(messages)).tokens

    def render_chat(self, messages: Sequence[Message]) -> str:
        """The text that `encode_chat` encodes; it may hold marks of `ControlTokens`. Raises as it does."""
        turns = self._guarded(_turns(messages))
        return self.template.render(turns) if self.has_chat_template else _joined(turns, (), None, "answer")

    def encode_prompt(
        self,
        turns: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] = (),
        variables: Mapping[str, object] | None = None,
        end: PromptEnd = "answer",
    ) -> ChatPrompt:
        """A chat in the template's own terms: each turn has `role`, `content` and other keys that the template reads.

        Control tokens in the arguments are text. Raises InvalidRequest where the template refuses them or does not know
        tools or a variable.
        """
        guarded = self._guarded(turns)
        if not self.has_chat_template:
            return ChatPrompt(tokens=self.encode(_joined(guarded, tools, variables, end)))
        tools = self._controls.guarded(tools)
        if variables:
            variables = {name: self._controls.guarded(value) for name, value in variables.items()}
        text = self.template.render(guarded, tools=tools, variables=variables, end=end)
        if end == "unfinished":
            in_reasoning = self.output.opens_reasoning(str(turns[-1]["content"]))
        else:
            in_reasoning = self.output.ends_with_reasoning_mark(text)
        return ChatPrompt(tokens=self.encode_more(text), begins_in_reasoning=in_reasoning)

    def compile_grammar(self, source: GrammarSource, *, reasoning: bool | None = None) -> Grammar:
        """See `GrammarCompiler.compile`. Takes up to a second."""
        return self._grammars.compile(source, reasoning=reasoning)

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Text of `tokens`. Of special tokens only marks of reasoning and tool calls are shown, or all if `special`."""
        if special or len(tokens) != 1:
            return self._decode(tokens, special=special)
        text = self._shown_texts.get(tokens[0])
        if text is None:
            text = self._shown_texts[tokens[0]] = self._decode(tokens)
        return text

    def _decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        decoder = self._tokenizer if self._backend is None else self._backend
        if special or self._hidden is None:
            return str(decoder.decode(list(tokens), skip_special_tokens=not special))
        return str(decoder.decode([token for token in tokens if token not in self._hidden], skip_special_tokens=False))

    def decode_rows(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Text of each row of tokens, special ones shown; without the interpreter's lock where the tokenizer can."""
        if self._backend is None:
            return [self.decode(tokens, special=True) for tokens in rows]
        return list(self._backend.decode_batch(rows, skip_special_tokens=False))

    def encode_answer(self, messages: Sequence[Message], answer: str) -> tuple[int, ...]:
        """Token ids of `answer` as the template writes it after the generation prompt, with the token that ends it.

        Without a template, or where it changes the text before the answer, these are the text itself and the end token.
        Raises InvalidRequest where the template refuses the messages.
        """
        prompt, whole = (self._rendered(messages, answer=text) for text in (None, answer))
        text = whole[len(prompt) :] if whole.startswith(prompt) else answer
        tokens = self._tokenizer.encode(text, add_special_tokens=False)
        ends = [index for index, token in enumerate(tokens) if token in self.eos_token_ids]
        return tuple(tokens[: ends[0] + 1]) if ends else (*tokens, self._tokenizer.eos_token_id)

    def _guarded(self, turns: Sequence[Mapping[str, object]]) -> Sequence[Mapping[str, object]]:
        """`turns` with guarded texts; texts of the model may hold the marks of its reasoning and its calls."""
        if not self._controls.may_be_in([value for turn in turns for value in turn.values()]):
            return turns
        by_model = [TEXTS_BY_MODEL if turn.get("role") == "assistant" else frozenset() for turn in turns]
        return [
            {key: self._controls.guarded(value, by_model=key in keys) for key, value in turn.items()}
            for turn, keys in zip(turns, by_model, strict=True)
        ]

    def _rendered(self, messages: Sequence[Message], answer: str | None) -> str:
        if not self.has_chat_template:
            return "" if answer is None else answer
        if answer is None:
            return self.template.render(_turns(messages))
        return self.template.render(_turns([*messages, Message(role=ASSISTANT, content=answer)]), end="message")

    def token_text(self, token: int) -> str:
        """Text of one token, special tokens shown."""
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = str(self._tokenizer.decode([token]))
        return text

    def _hidden_tokens(self) -> frozenset[int] | None:
        """Tokens without text, for a model with special tokens among its marks; None where all special ones are hidden.

        Between such marks other special tokens are part of the notation, so only those around a turn stay hidden.
        """
        special = {str(token) for token in self._tokenizer.all_special_tokens}
        special |= {str(token) for token in self._tokenizer.added_tokens_decoder.values() if token.special}
        if not any(token in mark for mark in self.output.marks for token in special):
            return None
        ends = (self._tokenizer.bos_token_id, self._tokenizer.pad_token_id)
        return self.eos_token_ids | {int(token) for token in ends if token is not None}


def _backend_of(tokenizer: Any) -> Any:
    """The Rust tokenizer, if it alone makes the text; else None. It takes a fifth of the time of transformers around
    it, and decodes rows without the interpreter's lock."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    # by names: the process may hold transformers twice (`device/own_transformers.py`)
    modules = [getattr(type(tokenizer), name).__module__ for name in ("decode", "_decode")]
    if not all(module.startswith(OF_TRANSFORMERS) for module in modules):
        return None
    is_byte_pair = type(backend.model).__name__ == "BPE" and not getattr(tokenizer, TIDIES_BYTE_PAIRS, False)
    return None if tokenizer.clean_up_tokenization_spaces and not is_byte_pair else backend


def _turns(messages: Sequence[Message]) -> list[dict[str, object]]:
    return [{"role": message.role, "content": message.content} for message in messages]


def _joined(
    turns: Sequence[Mapping[str, object]],
    tools: Sequence[Mapping[str, object]],
    variables: Mapping[str, object] | None,
    end: PromptEnd,
) -> str:
    """The contents, one to a line, of a model without a template."""
    if tools or variables or any(turn.get("tool_calls") for turn in turns):
        name = "tools" if tools else "chat_template_kwargs" if variables else "messages"
        raise InvalidRequest(f"the model has no chat template, so {name} cannot reach it", name)
    return "\n".join(str(turn["content"]) for turn in turns) + ("" if end == "unfinished" else "\n")


def reply_tokens(
    tokenizer: ChatTokenizer, messages: Sequence[Message], sampled: Sequence[int], reply: Sequence[Message]
) -> tuple[int, ...]:
    """Tokens to append to `sampled`, the model's newest turn, so that the model goes on after `reply`.

    `messages` is the conversation before `reply`, the newest turn included. One reply of the role `assistant` goes on
    with the model's own text; any other reply gets the chat template's marks: those after an assistant's turn in
    the rendered conversation. Raises InvalidRequest where the template or the tokenizer allows neither.
    """
    if [message.role for message in reply] == [ASSISTANT]:
        return _continuation(tokenizer, sampled, reply[0].content)
    before = list(messages)
    while before and before[-1].role == ASSISTANT:
        before.pop()
    conversation = [*_joined_turns(before), Message(role=ASSISTANT, content=PLACEHOLDER)]
    text = tokenizer.render_chat([*conversation, *reply])
    other = [Message(role=message.role, content=message.content + "!") for message in reply]
    _, placeholder, after = text.partition(PLACEHOLDER)
    if not placeholder or PLACEHOLDER in after or text == tokenizer.render_chat([*conversation, *other]):
        roles = sorted({message.role for message in reply})
        raise InvalidRequest(
            f"the model's chat template leaves out the assistant's turn or a reply of the roles {roles}, so the tokens "
            "between two turns are unknown; reply in the role user or assistant, or use another model's template",
            "messages",
        )
    tokens = tokenizer.encode_more(after)
    ended_itself = bool(sampled) and sampled[-1] in tokenizer.eos_token_ids and tokens[:1] == (sampled[-1],)
    return tokens[1:] if ended_itself else tokens


def _continuation(tokenizer: ChatTokenizer, sampled: Sequence[int], text: str) -> tuple[int, ...]:
    """Tokens that make exactly `text` where they follow `sampled`."""
    before = tokenizer.decode(sampled)
    for lead in ("", "\n"):  # some tokenizers put a space before the first word of a text, but not after a line end
        skipped, whole = tokenizer.encode_more(lead), tokenizer.encode_more(lead + text)
        tokens = whole[len(skipped) :]
        if whole[: len(skipped)] == skipped and tokenizer.decode([*sampled, *tokens]) == before + text:
            return tokens
    raise InvalidRequest(
        f"the model's tokenizer cannot write {text!r} after {before[-40:]!r}; reply in the role user instead",
        "messages",
    )


def _joined_turns(messages: Sequence[Message]) -> list[Message]:
    """Neighbouring assistant messages as one: templates expect the roles to take turns."""
    joined: list[Message] = []
    for message in messages:
        if joined and message.role == joined[-1].role == ASSISTANT:
            joined[-1] = Message(role=ASSISTANT, content=joined[-1].content + message.content)
        else:
            joined.append(message)
    return joined
