"""An engine that answers from the request alone, and a client that talks to the application without a socket."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from mlx_lm.utils import load_tokenizer

from parallm.conversation import ChatPrompt, Section, ToolCall
from parallm.errors import ContextTooLong, EngineStopped, InvalidRequest, UnknownModel
from parallm.model.chat.tokenizer import ChatTokenizer
from parallm.model.load import NANO
from parallm.registry.records import Model
from parallm.reports import TrainingStatus
from parallm.server.app import create_app
from parallm.server.service import OwnBase, Service
from parallm.server.settings import ServerSettings
from parallm.types import (
    AdapterCard,
    Completion,
    EngineStats,
    GenerationRequest,
    Message,
    PromptLogprob,
    TokenEvent,
    TopLogprob,
    WeightSpan,
)

VERSIONS = {"base": 0, "policy": 3, "policy@2": 2, "policy@3": 3, "best": 2, "latest": 3}
END = 0
VOCABULARY_SIZE = 1000
STATUS = TrainingStatus(state="updating", step=4, total_steps=9, version=3, metrics={"loss": float("nan")})

HERMES = (
    "{% if tools %}<|system|>{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|' + message.role + '|>' + message.content }}"
    "{% for tool_call in message.tool_calls %}"
    "{{ '<tool_call>' + tool_call.function | tojson + '</tool_call>' }}"
    "{% endfor %}"
    "{% if message.role == 'assistant' %}<|end|>{% endif %}"
    "{% endfor %}"
    "{# tool_call.name #}"
    "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking %}{{ '<think>\\n' }}{% endif %}{% endif %}"
)
"""A chat template of the kind that many models with reasoning and tool calls have."""


class PlainReader:
    def read(self, text: str) -> list[tuple[Section, str]]:
        return [("text", text)]

    def finish(self) -> list[tuple[Section, str]]:
        return []


class PlainOutput:
    """Of a model that marks nothing."""

    tool_marks = None
    reasoning_marks = None
    marks = ()

    def reader(self, *, begins_in_reasoning: bool, has_tools: bool) -> PlainReader:
        return PlainReader()

    def parse_calls(self, text: str, tools: Sequence[Mapping[str, object]]) -> list[ToolCall]:
        return []


class CharacterTokenizer:
    """Token ids are code points. Its chat template knows neither tools nor variables."""

    output = PlainOutput()
    template_variables: frozenset[str] = frozenset()
    template_source = ""
    end_token = END
    max_token_length = 5

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> tuple[int, ...]:
        return tuple(ord(character) for character in text)

    def encode_chat(self, messages: Sequence[Message]) -> tuple[int, ...]:
        return self.encode("".join(f"<{message.role}>{message.content}" for message in messages))

    def encode_answer(self, messages: Sequence[Message], answer: str) -> tuple[int, ...]:
        return (*self.encode(answer), END)

    def encode_prompt(self, turns: Sequence[Mapping[str, object]], **asked: Any) -> ChatPrompt:
        for name in ("tools", "variables"):
            if asked.get(name):
                parameter = "chat_template_kwargs" if name == "variables" else name
                raise InvalidRequest(f"the template knows no {parameter}", parameter)
        return ChatPrompt(tokens=self.encode("".join(f"<{turn['role']}>{turn['content']}" for turn in turns)))

    def encode_more(self, text: str) -> tuple[int, ...]:
        return self.encode(text)

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        return "".join(self.token_text(token) for token in tokens if special or token != END)

    def token_text(self, token: int) -> str:
        return "<end>" if token == END else chr(token)


STATS = EngineStats(
    num_running=0,
    num_waiting=0,
    tokens_total={"serving": 7, "rollout": 11},
    max_rows=128,
    kv_bytes=30,
    kv_bytes_limit=120,
    num_preemptions=2,
    prefix_bytes=0,
    num_prefix_lookups=0,
    num_prefix_hits=0,
    prompt_tokens_total=70,
    cached_prompt_tokens_total=16,
    num_drafts=3,
    draft_tokens_total=9,
    accepted_draft_tokens_total=5,
)


@dataclass
class EchoEngine:
    """Completion `index` is the prompt's text and the index; `refusal` comes before, `crash` after the first token."""

    max_context: int = 200
    is_alive: bool = True
    refusal: Exception | None = None
    crash: Exception | None = None
    is_endless: bool = False
    says: str | None = None
    """Instead of the prompt's text."""
    is_stuck: bool = False
    requests: list[GenerationRequest] = field(default_factory=list)
    num_aborted: int = 0
    cancelled: set[str] = field(default_factory=set)
    """Ids of endless requests that end with what they have."""
    is_paused: bool = False
    num_resets: int = 0
    intervals: list[float] = field(default_factory=list)
    """Seconds that `coalesce` got."""

    def stats(self) -> EngineStats:
        return STATS

    async def ping(self) -> None:
        while self.is_stuck:
            await asyncio.sleep(0.01)

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        events = [event async for event in self.stream(request)]
        return [event.completion for event in events if event.completion is not None]

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        self._check(request)
        self.requests.append(request)
        is_finished = False
        try:
            await self.ping()
            for index in range(request.n):
                for event in self._events(request, index):
                    await asyncio.sleep(0)
                    yield event
                    if self.crash is not None:
                        raise self.crash
            while self.is_endless:
                await asyncio.sleep(0.001)
                if request.request_id in self.cancelled:
                    made = replace(self._completion(request, 0), finish_reason="abort")
                    yield replace(self._events(request, 0)[0], tokens=(), logprobs=(), text="", completion=made)
                    break
                yield self._events(request, 0)[0]
            is_finished = True
        finally:
            self.num_aborted += not is_finished

    def coalesce(self, seconds: float) -> None:
        self.intervals.append(seconds)

    async def completions(self, requests: Sequence[GenerationRequest]) -> AsyncGenerator[tuple[int, Completion], None]:
        for index, request in enumerate(requests):
            async for event in self.stream(request):
                if event.completion is not None:
                    yield index, event.completion

    async def cancel(self, request_ids: Collection[str]) -> int:
        self.cancelled |= set(request_ids)
        return len(request_ids)

    async def pause(self) -> None:
        self.is_paused = True

    async def resume(self) -> None:
        self.is_paused = False

    async def reset_caches(self) -> None:
        self.num_resets += 1

    def _check(self, request: GenerationRequest) -> None:
        if not self.is_alive:
            raise EngineStopped("the engine has stopped")
        if self.refusal is not None:
            raise self.refusal
        if request.model not in VERSIONS:
            raise UnknownModel(f"no model {request.model!r}; there are {sorted(VERSIONS)}")
        if any(token >= VOCABULARY_SIZE for token in request.prompt_tokens):
            raise InvalidRequest("token ids must be from 0 to 999", "prompt")
        if len(request.prompt_tokens) + request.sampling.max_tokens > self.max_context:
            raise ContextTooLong(f"the limit is {self.max_context}", "max_tokens", setting="engine.max_context")

    def _events(self, request: GenerationRequest, index: int) -> list[TokenEvent]:
        completion = self._completion(request, index)
        texts = [*completion.text, *[""] * (len(completion.tokens) - len(completion.text))]
        last = len(completion.tokens) - 1
        if not completion.tokens:
            return [
                TokenEvent(
                    request_id=request.request_id,
                    index=index,
                    tokens=(),
                    logprobs=(),
                    top_logprobs=(),
                    text="",
                    completion=completion,
                )
            ]
        return [
            TokenEvent(
                request_id=request.request_id,
                index=index,
                tokens=(token,),
                logprobs=(completion.logprobs[position],),
                top_logprobs=completion.top_logprobs[position : position + 1],
                text=texts[position],
                completion=completion if position == last and not self.is_endless else None,
            )
            for position, token in enumerate(completion.tokens)
        ]

    def _completion(self, request: GenerationRequest, index: int) -> Completion:
        sampling = request.sampling
        whole = self.says or "".join(map(chr, request.prompt_tokens)) + f" {index}"
        cuts = [position for position in map(whole.find, sampling.stop) if position >= 0]
        tokens = (*map(ord, whole), END)[: min(sampling.max_tokens, *cuts) if cuts else sampling.max_tokens]
        is_stopped = bool(cuts) or END in tokens
        tops = tuple(TopLogprob(token, -0.5 - rank) for rank, token in enumerate((120, 121)[: sampling.top_logprobs]))
        return Completion(
            request_id=request.request_id,
            index=index,
            tokens=tokens,
            logprobs=tuple(-0.25 for _ in tokens),
            top_logprobs=tuple(tops for _ in tokens),
            text="".join(chr(token) for token in tokens if token != END),
            finish_reason="stop" if is_stopped else "length",
            weight_versions=(WeightSpan(version=VERSIONS[request.model], start=0, end=len(tokens)),),
            prompt_logprobs=prompt_logprobs(request),
            num_cached_prompt_tokens=2,
        )


def prompt_logprobs(request: GenerationRequest) -> tuple[PromptLogprob | None, ...] | None:
    """Every token has rank 3 behind "x" and "y"."""
    if request.sampling.prompt_logprobs is None:
        return None
    tops = tuple(TopLogprob(token, -0.5 - place) for place, token in enumerate((120, 121)))
    top = tops[: request.sampling.prompt_logprobs]
    return (None, *(PromptLogprob(token=one, logprob=-2.0, rank=3, top=top) for one in request.prompt_tokens[1:]))


def card(version: int, *aliases: str) -> AdapterCard:
    return AdapterCard(
        name="policy",
        version=version,
        parent=version - 1,
        step=version,
        rank=8,
        alpha=16.0,
        aliases=aliases,
        digest="00",
        num_running=0,
        is_served="best" not in aliases,
        num_bytes=1000,
    )


@pytest.fixture
def engine() -> EchoEngine:
    return EchoEngine()


@pytest.fixture(scope="session")
def tokenizer() -> CharacterTokenizer:
    return CharacterTokenizer()


@pytest.fixture(scope="session")
def hermes() -> ChatTokenizer:
    """The tokenizer of a model that reasons and calls functions."""
    tokenizer = load_tokenizer(NANO, {"chat_template": HERMES})._tokenizer
    tokenizer.add_tokens(["<think>", "</think>"])
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return ChatTokenizer(load_tokenizer(Path(folder)))


BASE_MODEL = OwnBase(
    model=Model(
        id=0,
        source="nano",
        folder="nano",
        format="safetensors",
        architecture="llama",
        parameters=2_500_000,
        quantization="F32",
        context=512,
        hidden=192,
        vocabulary=128,
        num_bytes=10_000_000,
        digest="ab" * 32,
        capabilities=("completion",),
        license=None,
        modified_at=1_700_000_000.0,
    ),
    num_bytes=11_000_000,
    is_on_accelerator=False,
)


def make_app(engine: Any, tokenizer: Any, **fields: Any) -> FastAPI:
    """Return the application over a service with these fields, and with plain ones in place of the others."""
    plain: dict[str, Any] = {
        "catalog": tuple,
        "status": lambda: TrainingStatus(state="serving"),
        "settings": ServerSettings(),
        "base_name": "nano",
        "base": BASE_MODEL,
    }
    return create_app(Service(engine=engine, tokenizer=tokenizer, **(plain | fields)))


def application(engine: Any, tokenizer: Any) -> FastAPI:
    return make_app(
        engine,
        tokenizer,
        catalog=lambda: (card(3), card(2, "best")),
        status=lambda: TrainingStatus(
            state="updating", step=4, total_steps=9, version=3, metrics={"loss": float("nan")}
        ),
        settings=ServerSettings(
            ollama=True,
            max_n=8,
            max_completions=16,
            max_stop=4,
            max_top_logprobs=5,
            max_body_bytes=20_000,
            max_grammar_bytes=8_000,
        ),
    )


class EngineOfTest:
    """Is the engine of the running test: an application takes longer to make than most tests."""

    engine: EchoEngine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


@pytest.fixture(scope="session")
def shared_app() -> Callable[[EchoEngine, Any], FastAPI]:
    """`application` that is made once for each tokenizer."""
    made: dict[int, tuple[FastAPI, EngineOfTest]] = {}

    def share(engine: EchoEngine, tokenizer: Any) -> FastAPI:
        if id(tokenizer) not in made:
            one = EngineOfTest()
            made[id(tokenizer)] = application(one, tokenizer), one
        app, current = made[id(tokenizer)]
        current.engine = engine
        return app

    return share


@pytest.fixture
def app(engine: EchoEngine, tokenizer: CharacterTokenizer) -> FastAPI:
    return application(engine, tokenizer)


@pytest.fixture
def ask(engine: EchoEngine, hermes: ChatTokenizer, shared_app: Callable[..., FastAPI]) -> Callable[..., httpx.Response]:
    """Post a chat of one user message "hello" to the model that calls functions; it `says` this, or its prompt."""
    body = {"model": "policy", "messages": [{"role": "user", "content": "hello"}]}
    engine.max_context = 2000
    app = shared_app(engine, hermes)

    def send(says: str | None = None, **fields: Any) -> httpx.Response:
        engine.says = says
        return send_to(app, "POST", "/v1/chat/completions", json=body | fields)

    return send


@pytest.fixture
def respond(
    engine: EchoEngine, hermes: ChatTokenizer, shared_app: Callable[..., FastAPI]
) -> Callable[..., httpx.Response]:
    """Post the input "hello" to `/v1/responses` of the model that calls functions; it `says` this, or its prompt."""
    engine.max_context = 2000
    app = shared_app(engine, hermes)

    def send(says: str | None = None, **fields: Any) -> httpx.Response:
        engine.says = says
        body = {"model": "policy", "input": "hello"} | fields
        return send_to(app, "POST", "/v1/responses", json=body)

    return send


@pytest.fixture
def call_hermes(
    engine: EchoEngine, hermes: ChatTokenizer, shared_app: Callable[..., FastAPI]
) -> Callable[..., httpx.Response]:
    """As `call`, of the model that calls functions."""
    engine.max_context = 2000
    app = shared_app(engine, hermes)
    return lambda method, path, **options: send_to(app, method, path, **options)


@pytest.fixture
def call(
    engine: EchoEngine, tokenizer: CharacterTokenizer, shared_app: Callable[..., FastAPI]
) -> Callable[..., httpx.Response]:
    """Send one request to an application that other tests have called: `call("POST", path, json=...)`."""
    app = shared_app(engine, tokenizer)
    return lambda method, path, **options: send_to(app, method, path, **options)


def send_to(app: FastAPI, method: str, path: str, **options: Any) -> httpx.Response:
    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, timeout=10, **options)

    return asyncio.run(send())


@pytest.fixture
def complete(call: Callable[..., httpx.Response]) -> Callable[..., httpx.Response]:
    """Post a completion of "hello" with these fields."""
    return lambda **fields: call("POST", "/v1/completions", json={"model": "policy", "prompt": "hello"} | fields)


@pytest.fixture
def chat(call: Callable[..., httpx.Response]) -> Callable[..., httpx.Response]:
    """Post a chat of one user message "hello" with these fields."""
    body = {"model": "policy", "messages": [{"role": "user", "content": "hello"}]}
    return lambda **fields: call("POST", "/v1/chat/completions", json=body | fields)


@pytest.fixture
def chunks_of() -> Callable[[httpx.Response], list[Any]]:
    """The JSON of each event of a stream that ended well."""

    def read(response: httpx.Response) -> list[Any]:
        lines = response.text.split("\n\n")
        assert response.headers["content-type"].startswith("text/event-stream")
        assert lines[-2:] == ["data: [DONE]", ""]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]

    return read
