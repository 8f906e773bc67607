"""Limits of what requests may cost together: memory of bodies, time on the event loop, length of texts.

The event loop serves every stream, so nothing on it may take longer than `SECONDS_ON_LOOP`. An estimate decides what
runs on a thread, since the hop costs a usual request more than its own work. A text that cannot fit into the context is
refused before it is encoded whole: a tokenizer needs seconds and a gigabyte for 4 MB.
"""

import asyncio
import contextvars
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from parallm.errors import ContextTooLong, EngineFull
from parallm.server.interfaces import Tokenizer
from parallm.server.operation.request_context import current_request

MAX_UNCOUNTED_BYTES = 65_536
"""Bodies up to this size are never refused because of others."""
MAX_BODIES = 64
"""Bodies of the largest size that may be read at once."""
MAX_UPLOADS = 4
"""Uploads of the largest size that may be under way at once: adapters, which memory takes, and blobs, which a disk
takes."""

SECONDS_ON_LOOP = 0.01
SECONDS_PER_BYTE = 1.5e-6
"""Time to read a byte of a body: its JSON, the checks of its fields, the chat template, the tokens of its texts."""
SECONDS_PER_LOGPROB = 5e-6
"""Time to write a token of an answer, or one of its alternatives."""
THREADS = 2  # a client uses one at a time, so that another client finds one

MAX_USUAL_CHARACTERS = 8
"""A usual token has fewer characters. A text with more for each token of the context is encoded in pieces first."""
PIECE = 4096
PIECES_FACTOR = 2
"""Pieces may have a few tokens more than the whole text, so a text is refused from twice the context on."""

Result = TypeVar("Result")


class BodyBudget:
    """Limits the bytes of large bodies together, from their first byte until they are read. Used on the event loop."""

    def __init__(self, max_bytes: int, what: str = "request bodies") -> None:
        """`max_bytes` of all bodies; `what` names them in messages."""
        self._max_bytes = max_bytes
        self._what = what
        self.num_bytes = 0

    @contextmanager
    def reserve(self, stored: int = 0) -> Iterator[Callable[[int], None]]:
        """Yield a function that one body calls with its size so far. It raises EngineFull beyond the limit, of which
        `stored` bytes are taken already."""
        reserved = 0

        def grow(num_bytes: int) -> None:
            nonlocal reserved
            more = num_bytes - reserved
            if num_bytes <= MAX_UNCOUNTED_BYTES:
                return
            if self.num_bytes + more > self._max_bytes - stored:
                raise EngineFull(
                    f"{self._what} of {self.num_bytes} bytes are being read, the limit is {self._max_bytes - stored}; "
                    "send this one again later"
                )
            self.num_bytes += more
            reserved = num_bytes

        try:
            yield grow
        finally:
            self.num_bytes -= reserved


class WorkerPool:
    """Threads for large bodies, long texts, grammars and large answers. Used on the event loop.

    A function that has begun runs to its end, even after its caller is cancelled.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="request")
        self._free = asyncio.Semaphore(THREADS)
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def run_if_long(self, function: Callable[[], Result], *, seconds: float) -> Result:
        """Return `function()`, from a thread if the event loop cannot wait for it. Raises what it raises."""
        return function() if seconds <= SECONDS_ON_LOOP else await self.run(function)

    async def run(self, function: Callable[[], Result], *, max_seconds: float | None = None) -> Result:
        """Return `function()` from a thread, after the earlier calls of the same client. Raises what it raises.

        Raises TimeoutError if it takes more than `max_seconds` from its beginning.
        """
        turn = self._turns.setdefault(_client(), asyncio.Lock())
        await turn.acquire()
        try:
            await self._free.acquire()
        except BaseException:
            turn.release()
            raise
        work = self._threads.submit(contextvars.copy_context().run, function)
        loop = asyncio.get_running_loop()

        def end(_: Future[Any]) -> None:
            with suppress(RuntimeError):  # the event loop has ended, and nothing waits
                loop.call_soon_threadsafe(self._free.release)
                loop.call_soon_threadsafe(turn.release)

        work.add_done_callback(end)
        return await asyncio.wait_for(asyncio.wrap_future(work), max_seconds)


def check_text(text: str, name: str, tokenizer: Tokenizer, max_context: int) -> None:
    """Raise ContextTooLong for a text that has more tokens than the context, at no cost for one of usual length."""
    check_texts([text], name, tokenizer, max_context)


def check_texts(texts: Sequence[str], name: str, tokenizer: Tokenizer, max_context: int) -> None:
    """Do what `check_text` does for texts that become one prompt."""
    num_characters = sum(map(len, texts))
    if num_characters <= MAX_USUAL_CHARACTERS * max_context:
        return
    limit = tokenizer.max_token_length * max_context
    if num_characters > limit:
        raise too_long(name, f"{num_characters} characters", f"{max_context} tokens, which have at most {limit}")
    num_tokens = 0
    for text in texts:
        for start in range(0, len(text), PIECE):
            num_tokens += len(tokenizer.encode_more(text[start : start + PIECE]))
            if num_tokens > PIECES_FACTOR * max_context:
                raise too_long(name, f"more than {num_tokens} tokens", str(max_context))


def check_items(items: object, what: str, name: str, max_context: int) -> None:
    """Raise ContextTooLong for a list of more token ids, or more messages, than the context has tokens."""
    if isinstance(items, list) and (number := len(items)) > max_context:
        raise too_long(name, f"{number} {what}", f"{max_context} tokens")


def too_long(name: str, size: str, limit: str) -> ContextTooLong:
    """Return the error of a field with `size`, such as `9 tokens`, where the context has `limit`."""
    message = f"{name} has {size} and this model's maximum context length is {limit}; shorten it"
    return ContextTooLong(message, name, setting="engine.max_context")


def _client() -> str:
    context = current_request.get()
    return "" if context is None else context.client
