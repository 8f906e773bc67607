"""`load` and `Model`: chat, generate, adapters, versions and a server, all from Python."""

import asyncio
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from parallm.config.compose import compose
from parallm.config.schema import ServeConfig
from parallm.device.blas import load_blas
from parallm.device.load_mlx import load_mlx
from parallm.errors import ConfigError, InvalidRequest, UnknownModel
from parallm.library.answer import Answer, Messages, Prompt, answers_of, is_chat, requests_of
from parallm.library.loop_thread import LoopThread
from parallm.library.session import LocalClient, Session
from parallm.server.operation.http_server import HttpServer
from parallm.types import POLICY, AdapterCard

MAX_CONCURRENT_REQUESTS = 256
"""Concurrent requests of `generate`; the others wait, so that the engine's queue is not full."""


class Server:
    """An HTTP server of a `Model`, open until `close` or the model's end. A context manager."""

    def __init__(self, thread: LoopThread[Session], server: HttpServer) -> None:
        self._thread = thread
        self._server = weakref.ref(server)  # a reference would keep the model in memory
        self.url = server.url
        """Address such as `http://127.0.0.1:8000`; clients of OpenAI need `/v1` after it."""

    def close(self) -> None:
        """Let running answers end for `server.drain_seconds` and free the port. The model stays."""
        server = self._server()
        if server is not None and self._thread.is_open:
            self._thread.call(self._thread.session.stop_listening(server))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<parallm server at {self.url}>"


def load(
    model: str | Path | None = None, *, adapter: str | Path | None = None, overrides: Sequence[str] = ()
) -> "Model":
    """Load a model to chat with and generate from; use it in a `with`, or call its `close`.

    `model` is a folder or an id of the Hugging Face hub; None is the small embedded model. `adapter` is an adapter, run
    or checkpoint, which requests call `policy`. `overrides` are those of `parallm.serve`, such as
    `["engine.max_context=4096"]`. Downloads a model of the hub if need be. Raises ParallmError; ConfigError if another
    model is open.
    """
    named = {"model.path": model, "model.adapter": adapter}
    given = {key: str(value) for key, value in named.items() if value is not None}
    config = compose("serve", ServeConfig, overrides, given).config
    if config.metrics.display not in ("auto", "off"):
        raise ConfigError(f"metrics.display={config.metrics.display}: a model in a program shows nothing; leave it out")
    blas = load_blas(config.device)
    load_mlx()
    # not at the top: it imports MLX, and the BLAS must be loaded first
    from parallm.library.background import release_memory, serving  # noqa: PLC0415

    return Model(LoopThread(serving(config, blas), f"the model {config.model.path}", release_memory))


class Model:
    """A base model with adapters in this process. Any thread may call its methods, also in notebooks.

    Methods that begin with `a` are awaited. `model=` in a request is `policy` (the adapter of `load`, or the base
    without one), `base`, the name of an adapter, or a version such as `policy@3`. Methods raise ParallmError:
    InvalidRequest, UnknownModel, AdapterError, and Unavailable after `close`.
    """

    def __init__(self, thread: LoopThread[Session]) -> None:
        self._thread = thread
        weakref.finalize(self, thread.request_end).atexit = False

    def chat(self, messages: str | Messages, *, model: str = POLICY, **fields: Any) -> Answer:
        """Answer a chat, or a single user message.

        `fields` are those of `/v1/chat/completions`, such as `max_tokens`, `temperature`, `seed`, `stop`, `tools` and
        `response_format`.
        """
        return self._thread.call(self._chat(messages, model, fields))

    async def achat(self, messages: str | Messages, *, model: str = POLICY, **fields: Any) -> Answer:
        return await self._thread.await_(self._chat(messages, model, fields))

    def generate(self, prompts: Sequence[Prompt], *, model: str = POLICY, **fields: Any) -> list[Answer]:
        """Return `n` (1) completions of each prompt, prompt by prompt, computed in batches.

        A prompt is a text or a list of token ids to continue, or a chat. `fields` are those of `/v1/completions`, or
        of `/v1/chat/completions` for chats. With `seed`, completions of one prompt differ, and those of equal prompts
        are equal.
        """
        return self._thread.call(self._generate(prompts, model, fields))

    async def agenerate(self, prompts: Sequence[Prompt], *, model: str = POLICY, **fields: Any) -> list[Answer]:
        return await self._thread.await_(self._generate(prompts, model, fields))

    def load_adapter(self, name: str, path: str | Path) -> AdapterCard:
        """Serve an adapter as the next version of `name`.

        `path` is a folder in the format of mlx-lm or PEFT, a checkpoint, or a run: `RUN`, `RUN@12`, `RUN@newest`.
        """
        return self._thread.call(self._thread.session.give(name, str(path)))

    def unload_adapter(self, model: str) -> None:
        """Unload `poet`, or one version `poet@3`. Running requests finish first."""
        self._thread.call(self._client.unload_adapter(model))

    def adapters(self) -> tuple[AdapterCard, ...]:
        """Return every version in memory."""
        return self._thread.call(self._client.adapters())

    def versions(self, name: str = POLICY) -> list[int]:
        """Return the versions of `name` in memory, the oldest first; none for a policy without an update.

        Raises UnknownModel.
        """
        cards = self.adapters()
        if name != POLICY and name not in {card.name for card in cards}:
            names = ", ".join(sorted({card.name for card in cards})) or "none"
            raise UnknownModel(f"no adapter {name!r}; loaded are: {names}")
        return sorted(card.version for card in cards if card.name == name)

    def promote(self, version: int, name: str = POLICY) -> None:
        """Serve this version as the bare name from the next request on."""
        self._thread.call(self._client.promote(version, name))

    def roll_back(self, name: str = POLICY) -> int:
        """Serve the previous version as the bare name, and return it."""
        return self._thread.call(self._client.roll_back(name))

    def set_alias(self, alias: str, version: int, name: str = POLICY) -> None:
        """Set the version that `name@alias` means."""
        self._thread.call(self._client.set_alias(alias, version, name))

    def serve(self, *, host: str | None = None, port: int | None = None) -> Server:
        """Answer HTTP in the background, beside calls from Python; port 0 takes a free one.

        Arguments that are None, and `server.api_keys`, are those of `overrides`. Raises ConfigError, ListenError, and
        Unavailable if a server is open already.
        """
        return Server(self._thread, self._thread.call(self._thread.session.listen(host, port)))

    def close(self) -> None:
        """End the server and all requests, and free the memory. Does nothing the second time."""
        self._thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{self._thread.name}{'' if self._thread.is_open else ', closed'}>"

    @property
    def _client(self) -> LocalClient:
        return self._thread.session.client

    async def _chat(self, messages: str | Messages, model: str, fields: dict[str, Any]) -> Answer:
        chat = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        if not is_chat(chat):
            raise InvalidRequest(
                "messages must be a text or a list of turns, {'role': ..., 'content': ...}", "messages"
            )
        if fields.get("n", 1) != 1:
            raise InvalidRequest(f"n is {fields['n']}; several answers are for generate([messages], n=...)", "n")
        return (await self._generate([chat], model, fields))[0]

    async def _generate(self, prompts: Sequence[Prompt], model: str, fields: dict[str, Any]) -> list[Answer]:
        if isinstance(prompts, str):
            raise InvalidRequest("prompts is one text and must be a list of prompts", "prompts")
        turns = asyncio.Semaphore(MAX_CONCURRENT_REQUESTS)

        async def answers(path: str, body: dict[str, Any]) -> list[Answer]:
            async with turns:
                return answers_of(path, body, await self._client.post(path, body))

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(answers(path, body)) for path, body in requests_of(prompts, model, fields)]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [answer for task in tasks for answer in task.result()]
