"""What all task routes share: the name's task, texts as rows of token ids, what is cut, usage.

`choose` and `read_rows` lead to an `EncodeRequest`; each dialect writes the answer in its own form.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field, PlainValidator

from parallm.errors import ContextTooLong, InvalidRequest, Unavailable
from parallm.server.catalog import resolved
from parallm.server.interfaces import Encoder
from parallm.server.openai.chat_schemas import ChatMessage
from parallm.server.openai.translate import to_turn
from parallm.server.request_limits import PIECE, check_text, check_texts
from parallm.server.schemas import Wire, is_tokens
from parallm.server.service import Service
from parallm.types import BASE, TASK_ROUTES, EncodeRequest, Task, TaskSpec

MAX_INPUTS = 2048
"""Limit of OpenAI's API."""

Input: TypeAlias = str | list[int]
Side = Literal["left", "right"]


def read_inputs(value: object) -> list[Input]:
    """Return texts or lists of token ids; one alone may stand without its list."""
    inputs: list[Any] = [value] if isinstance(value, str) or (value and is_tokens(value)) else value  # type: ignore[assignment]
    if not isinstance(inputs, list) or not 0 < len(inputs) <= MAX_INPUTS:
        raise ValueError(f"should be a text, a list of token ids, or a list of 1 to {MAX_INPUTS} of these")
    for index, item in enumerate(inputs):
        if not item or not (isinstance(item, str) or is_tokens(item)):
            raise ValueError(f"should hold texts or lists of token ids, none of them empty; number {index} is neither")
    return inputs


Inputs = Annotated[
    list[Input],
    PlainValidator(read_inputs, json_schema_input_type=str | list[int] | list[str] | list[list[int]]),
]


def read_texts(value: object) -> list[str]:
    """Return texts; one alone may stand without its list, and each as `{"text": ...}`."""
    items: list[Any] = value if isinstance(value, list) else [value]
    if not 0 < len(items) <= MAX_INPUTS:
        raise ValueError(f"should be a list of 1 to {MAX_INPUTS} texts")
    texts = [item["text"] if isinstance(item, dict) and item.keys() == {"text"} else item for item in items]
    for index, text in enumerate(texts):
        if not isinstance(text, str) or not text:
            raise ValueError(f"should hold texts that are not empty; number {index} is none")
    return texts


Texts = Annotated[list[str], PlainValidator(read_texts, json_schema_input_type=str | list[str | dict[str, str]])]


def _listed(value: object) -> object:
    """Return a chat as the only one of a list."""
    return [value] if isinstance(value, list) and value and isinstance(value[0], dict) else value


Chat = Annotated[list[ChatMessage], Field(min_length=1)]
Chats = Annotated[list[Chat], BeforeValidator(_listed), Field(min_length=1, max_length=MAX_INPUTS)]


class Usage(Wire):
    prompt_tokens: int
    total_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How much of a text is kept."""

    tokens: int | None = None
    """Tokens that are kept, -1 for the model's context; None: nothing is cut, and what is too long is refused."""
    side: Side = "right"

    def limit(self, context: int) -> int:
        """Return the number of tokens that fit. Raises InvalidRequest for 0."""
        if self.tokens == 0:
            raise InvalidRequest("truncate_prompt_tokens should be -1 or above 0; it is 0", "truncate_prompt_tokens")
        return context if self.tokens in (None, -1) else min(self.tokens, context)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The exact version that a request means, and what it makes of texts."""

    model: str
    spec: TaskSpec
    encoder: Encoder


def choose(service: Service, name: str | None, *tasks: Task) -> Chosen:
    """Return what `name` means if it has one of `tasks`; without a name the base.

    Raises UnknownModel, Unavailable, InvalidRequest naming the route that fits.
    """
    if service.encoder is None:
        raise Unavailable("this process makes no vectors")
    name = name or BASE
    if name in service.splits.all():
        raise InvalidRequest(
            f"{name} is split between versions, whose numbers cannot be compared; name one of them", "model"
        )
    model = resolved(name, service.catalog(), service.policies)
    spec = service.encoder.spec(model)
    if spec.task not in tasks:
        does = {"embed": "makes vectors", "score": "scores texts", "classify": "classifies texts"}[spec.task]
        raise InvalidRequest(f"{name} {does}; ask {TASK_ROUTES[spec.task]}", "model")
    return Chosen(model=model, spec=spec, encoder=service.encoder)


def prompt_of(chosen: Chosen, name: str | None) -> str:
    """Return the prompt of this name, or the usual one. Raises InvalidRequest."""
    prompts = chosen.spec.prompts
    name = chosen.spec.default_prompt if name is None else name
    if name is not None and name not in prompts:
        known = ", ".join(prompts) or "none"
        raise InvalidRequest(f"no prompt {name[:100]!r} of {chosen.model}; there are {known}", "prompt_name")
    return "" if name is None else prompts[name]


def read_rows(
    service: Service, chosen: Chosen, inputs: Sequence[Input], cut: Cut, *, prompt: str = "", field: str = "input"
) -> tuple[tuple[int, ...], ...]:
    """Return the token ids that the model reads of each text. Raises InvalidRequest naming `field`."""
    context = min(service.engine.max_context, chosen.spec.max_tokens or service.engine.max_context)
    limit = cut.limit(context)
    return tuple(_row(service, chosen, prompt, item, cut, limit, field) for item in inputs)


def _row(
    service: Service, chosen: Chosen, prompt: str, item: Input, cut: Cut, limit: int, field: str
) -> tuple[int, ...]:
    if isinstance(item, str):
        text = bounded(service, prompt + item, field, cuts=cut.tokens is not None)
        tokens = chosen.encoder.encode_text(text, chosen.spec)
    else:
        tokens = _checked(chosen, prompt, item, field)
    return _cut(chosen, tokens, cut, limit, field)


def read_chats(
    service: Service, chosen: Chosen, chats: Sequence[Sequence[ChatMessage]], cut: Cut
) -> tuple[tuple[int, ...], ...]:
    """Return the token ids that the chat template writes of each chat, with the end token that vectors are pooled at.

    Raises InvalidRequest naming `messages`.
    """
    context = min(service.engine.max_context, chosen.spec.max_tokens or service.engine.max_context)
    limit, end = cut.limit(context), chosen.encoder.end_token(chosen.spec)
    rows = []
    for chat in chats:
        texts = [part.text for message in chat for part in message.content]
        check_texts(texts, "messages", service.tokenizer, service.engine.max_context)
        tokens = service.tokenizer.encode_prompt([to_turn(message) for message in chat], end="message").tokens
        ended = tokens if end is None or tokens[-1:] == (end,) else (*tokens, end)
        rows.append(_cut(chosen, ended, cut, limit, "messages"))
    return tuple(rows)


def _cut(chosen: Chosen, tokens: tuple[int, ...], cut: Cut, limit: int, field: str) -> tuple[int, ...]:
    """Return what is kept of a row: the tokens around its text, such as [CLS] and [SEP], and one side of the text.

    Raises ContextTooLong where nothing may be cut, InvalidRequest where the tokens around the text do not fit.
    """
    if cut.tokens is None and len(tokens) > limit:
        raise ContextTooLong(
            f"an input has {len(tokens)} tokens and this model's maximum context length is {limit}; shorten it, send "
            "truncate_prompt_tokens=-1",
            field,
            setting="engine.max_context",
        )
    if len(tokens) <= limit:
        return tokens
    before, after = chosen.encoder.frame(chosen.spec)
    # token ids and chats may lack some of them
    start = _num_shared(tokens, before)
    stop = len(tokens) - _num_shared(tokens[::-1], after[::-1])
    room = limit - start - (len(tokens) - stop)
    if room < 0:
        raise InvalidRequest(
            f"truncate_prompt_tokens is {limit}, and there are {limit - room} tokens around a text; send more",
            "truncate_prompt_tokens",
        )
    text = tokens[start : start + room] if cut.side == "right" else tokens[stop - room : stop]
    return (*tokens[:start], *text, *tokens[stop:])


def _num_shared(row: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Return the number of tokens that both begin with."""
    pairs = enumerate(zip(row, other, strict=False))
    return next((index for index, (token, expected) in pairs if token != expected), min(len(row), len(other)))


def bounded(service: Service, text: str, field: str, *, cuts: bool) -> str:
    """Return the text; of one that is cut anyway only what can be kept from either side. Raises ContextTooLong."""
    context = service.engine.max_context
    if not cuts:
        check_text(text, field, service.tokenizer, context)
        return text
    most = service.tokenizer.max_token_length * context + PIECE
    return text if len(text) <= 2 * most else text[:most] + text[-most:]


def _checked(chosen: Chosen, prompt: str, tokens: list[int], field: str) -> tuple[int, ...]:
    """Return given token ids. Raises InvalidRequest for those of another tokenizer, as far as that can be seen."""
    if prompt:
        raise InvalidRequest("a prompt is put before texts, and the input is token ids; send texts", field)
    if max(tokens) >= chosen.encoder.vocabulary_size:
        raise InvalidRequest(
            f"the token id {max(tokens)} is not below this model's {chosen.encoder.vocabulary_size}: the ids are those "
            "of another tokenizer; send texts (in LangChain check_embedding_ctx_length=False)",
            field,
        )
    end = chosen.encoder.end_token(chosen.spec)
    if end is not None and tokens[-1] != end:
        raise InvalidRequest(
            f"token ids should end with {end}, the end token whose state this model pools; send texts, or ids with it",
            field,
        )
    return tuple(tokens)


def labels_of(chosen: Chosen, num_labels: int) -> tuple[str, ...]:
    """Return the names of a head's numbers."""
    return chosen.spec.labels or tuple(f"LABEL_{index}" for index in range(num_labels))


def usage_of(request: EncodeRequest) -> Usage:
    num_tokens = sum(map(len, request.rows))
    return Usage(prompt_tokens=num_tokens, total_tokens=num_tokens)
