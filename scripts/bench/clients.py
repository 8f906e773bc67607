"""Streaming HTTP clients that note when each piece of text arrives."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx

TIMEOUT = 60.0
SECONDS_BEFORE_RETRY = 0.1


@dataclass(slots=True)
class Traffic:
    """What all clients together have seen."""

    gaps: list[float] = field(default_factory=list)
    """Seconds between two tokens of one stream."""
    first: list[float] = field(default_factory=list)
    """Seconds from a request to its first token."""
    finished: int = 0
    tokens: int = 0
    """Tokens of finished requests, as the server counts them."""
    seconds: float = 0.0
    """From the first request to the end of the last one."""
    errors: list[str] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def add(self, later: "Traffic") -> None:
        """Count what clients have seen in another turn."""
        self.gaps += later.gaps
        self.first += later.first
        self.errors += later.errors
        self.finished += later.finished
        self.tokens += later.tokens
        self.seconds += later.seconds


async def stream_for(
    url: str, questions: Sequence[str], *, clients: int, seconds: float, max_tokens: int, model: str = "policy"
) -> Traffic:
    """Keep `clients` streams open for `seconds`, one request after the other in each."""
    traffic = Traffic()
    began = time.perf_counter()
    ends = began + seconds
    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)
    body: dict[str, object] = {"model": model, "max_tokens": max_tokens, "temperature": 1.0, "stream": True}
    body |= {"stream_options": {"include_usage": True}}
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT, limits=limits, trust_env=False) as client:

        async def one_client(turn: int) -> None:
            while time.perf_counter() < ends:
                messages = [{"role": "user", "content": questions[turn % len(questions)]}]
                turn += clients
                try:
                    await read_stream(client, body | {"messages": messages}, traffic)
                except (httpx.HTTPError, ValueError) as error:
                    traffic.errors.append(f"{type(error).__name__}: {error}")
                    await asyncio.sleep(SECONDS_BEFORE_RETRY)

        await asyncio.gather(*map(one_client, range(clients)))
    traffic.seconds = time.perf_counter() - began
    return traffic


async def read_stream(client: httpx.AsyncClient, body: dict[str, object], traffic: Traffic) -> None:
    """One request. Raises httpx.HTTPError or ValueError if the answer is refused, broken or cut off."""
    last, is_first, is_done = time.perf_counter(), True, False
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            raise ValueError(f"HTTP {response.status_code}: {(await response.aread())[:200]!r}")
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                is_done = True
            elif line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise ValueError(f"error in the stream: {event['error']}")
                traffic.tokens += (event.get("usage") or {}).get("completion_tokens", 0)
                if any(choice["delta"].get("content") for choice in event["choices"]):
                    now = time.perf_counter()
                    (traffic.first if is_first else traffic.gaps).append(now - last)
                    last, is_first = now, False
    if not is_done:
        raise ValueError("the stream ended without [DONE]")
    traffic.finished += 1
