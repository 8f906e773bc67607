"""Scores of the loaded reward models, on the shared base: wire types and the route `POST /v1/rewards/score`."""

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Annotated, Literal

from fastapi import APIRouter
from pydantic import BeforeValidator, Field
from starlette.requests import Request
from starlette.responses import Response

from parallm.errors import InvalidRequest, Unavailable, UnknownModel
from parallm.server.connection import json_response, received, while_connected
from parallm.server.interfaces import Rate
from parallm.server.openai.chat_schemas import ChatMessage
from parallm.server.openai.translate import to_turn
from parallm.server.request_limits import check_items, check_text, check_texts, too_long
from parallm.server.schemas import FIRST_FAULT, Wire, parse_body
from parallm.server.service import Service
from parallm.server.tasks.texts import Chosen, Usage, choose
from parallm.types import BASE, EncodeRequest, Message, ScoringRequest

Text = Annotated[str, Field(min_length=1)]


def read_texts(value: object) -> object:
    return [value] if isinstance(value, str) else value


Texts = Annotated[
    list[Text], Field(min_length=1), FIRST_FAULT, BeforeValidator(read_texts, json_schema_input_type=str | list[str])
]


class RewardScoreBody(Wire):
    """Whole texts as `input`, or completions of a `prompt` or of `messages`; without completions the messages end with
    the assistant's, which is scored."""

    model: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    """Name of a reward model; without one the only model."""
    input: Texts | None = None
    prompt: Text | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)] | None = None
    completions: Texts | None = None


class RewardScoreEntry(Wire):
    index: int
    object: Literal["score"]
    score: float


class RewardScoreAnswer(Wire):
    object: Literal["list"]
    model: str
    data: list[RewardScoreEntry]
    usage: Usage


def reward_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/rewards/score")
    async def score(http: Request) -> Response:
        """Rate texts, or completions of a prompt or of a chat, by a reward model."""
        name, rate, items = await received(service, http, partial(_parse, service))
        scores = await while_connected(http.receive, _rated(rate, items))
        num_tokens = sum(len(item.prompt_tokens) + len(tokens) for item in items for tokens in item.completions)
        return json_response(
            RewardScoreAnswer(
                object="list",
                model=name,
                data=[
                    RewardScoreEntry(index=index, object="score", score=number) for index, number in enumerate(scores)
                ],
                usage=Usage(prompt_tokens=num_tokens, total_tokens=num_tokens),
            )
        )

    return router


def _parse(service: Service, text: bytes) -> tuple[str, Rate, list[ScoringRequest]]:
    """Return name, model and the tokens to score. Raises InvalidRequest, UnknownModel, Unavailable."""
    body = parse_body(text, RewardScoreBody)
    name, rate = _chosen(service, body.model)
    return name, rate, _items(service, body)


def _chosen(service: Service, name: str | None) -> tuple[str, Rate]:
    """Return a reward model of rollouts, or an adapter or base with a head for scores."""
    models, adapters = service.reward_models(), _scoring_adapters(service)
    if name is None:
        names = [*models, *adapters] or _scoring_base(service)
        if not names:
            raise Unavailable(
                "no reward model is loaded; load one with server.reward_model=FOLDER, or for rollouts with "
                "rollout.reward_model.adapter=FOLDER"
            )
        if len(names) > 1:
            raise UnknownModel(f"name a reward model; there are {', '.join(names)}")
        name = names[0]
    if name in models:
        return name, models[name]
    try:
        chosen = choose(service, name, "score")
    except (UnknownModel, Unavailable) as error:
        there = ", ".join([*models, *adapters]) or "none"
        raise UnknownModel(f"no reward model {name[:100]!r}; there are {there}") from error
    if chosen.spec.template:
        raise InvalidRequest(f"{name} scores a query with a document; ask /rerank or /score", "model")
    return chosen.model, partial(_encoded, chosen)


def _scoring_adapters(service: Service) -> list[str]:
    return sorted({card.name for card in service.catalog() if card.task is not None and card.task.task == "score"})


def _scoring_base(service: Service) -> list[str]:
    """Return the base if it scores texts."""
    with suppress(Unavailable):
        if service.encoder is not None and service.encoder.spec(BASE).task == "score":
            return [BASE]
    return []


async def _encoded(chosen: Chosen, items: Sequence[ScoringRequest]) -> list[float]:
    """Return logits: prompts that completions share are computed once."""
    rows = tuple((*item.prompt_tokens, *tokens) for item in items for tokens in item.completions)
    numbers_N1 = await chosen.encoder.encode(EncodeRequest(model=chosen.model, rows=rows, activates=False))
    scores: list[float] = numbers_N1[:, 0].tolist()
    return scores


async def _rated(rate: Rate, items: Sequence[ScoringRequest]) -> list[float]:
    return await rate(items)


def _items(service: Service, body: RewardScoreBody) -> list[ScoringRequest]:
    """Return the texts as tokens. Raises InvalidRequest."""
    fields = [field for field in ("input", "prompt", "messages") if getattr(body, field) is not None]
    if len(fields) != 1:
        raise InvalidRequest("send one of input, prompt and messages", fields[1] if fields else "input")
    _check_texts(service, body, fields[0])
    tokenizer = service.tokenizer
    if body.input is not None:
        if body.completions is not None:
            raise InvalidRequest("completions belong to a prompt or to messages; leave them out", "completions")
        end = ((tokenizer.end_token,),)
        items = [ScoringRequest(prompt_tokens=tokenizer.encode(text), completions=end) for text in body.input]
    elif body.prompt is not None:
        if body.completions is None:
            raise InvalidRequest("a prompt needs completions; a whole text is input", "completions")
        completions = tuple((*tokenizer.encode_more(text), tokenizer.end_token) for text in body.completions)
        items = [ScoringRequest(prompt_tokens=tokenizer.encode(body.prompt), completions=completions)]
    else:
        items = [_chat_item(service, body.messages or [], body.completions)]
    _check_lengths(service, items, fields[0])
    return items


def _chat_item(service: Service, chat: Sequence[ChatMessage], completions: Sequence[str] | None) -> ScoringRequest:
    tokenizer, max_context = service.tokenizer, service.engine.max_context
    messages = [_plain(message, index) for index, message in enumerate(chat)]
    check_items(messages, "messages", "messages", max_context)
    check_texts([message.content for message in messages], "messages", tokenizer, max_context)
    if completions is None:
        if messages[-1].role != "assistant" or len(messages) < 2:
            raise InvalidRequest(
                "without completions the last message should be the assistant's, which is scored", "messages"
            )
        completions = [messages.pop().content]
    return ScoringRequest(
        prompt_tokens=tokenizer.encode_chat(messages),
        completions=tuple(tokenizer.encode_answer(messages, text) for text in completions),
    )


def _plain(message: ChatMessage, index: int) -> Message:
    turn = to_turn(message)
    if turn.keys() - {"role", "content"}:
        raise InvalidRequest("a reward model reads plain text: no tool calls and no reasoning", f"messages.{index}")
    return Message(role=str(turn["role"]), content=str(turn["content"]))


def _check_texts(service: Service, body: RewardScoreBody, name: str) -> None:
    """Raise InvalidRequest for too many texts, or for one that cannot fit into the context."""
    texts = body.input or body.completions or ()
    if len(texts) > service.settings.max_completions:
        raise InvalidRequest(
            f"{len(texts)} texts are more than {service.settings.max_completions}; send several requests or raise "
            "server.max_completions",
            name,
        )
    for text in (*texts, body.prompt or ""):
        check_text(text, name, service.tokenizer, service.engine.max_context)


def _check_lengths(service: Service, items: Sequence[ScoringRequest], name: str) -> None:
    longest = max(len(item.prompt_tokens) + max(map(len, item.completions)) for item in items)
    if longest > service.engine.max_context:
        raise too_long(name, f"{longest} tokens", str(service.engine.max_context))
