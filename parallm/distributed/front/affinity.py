"""Which worker gets a request: one that has computed the beginning of its prompt, unless it has too much to do.

The prompt is cut into blocks, each known by the hash of itself and all before it (vLLM's prefix caching and the routers
of vLLM and SGLang do so). A worker that has been sent most of a prompt is preferred while it has at most `MAX_RATIO`
times the rows of the least busy one, and `SLACK` more; otherwise the least busy one is taken. Nothing is ever chosen
by a hash alone: consistent hashing has sent a whole run's load to one engine.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json, to_json

from parallm.distributed.front.workers import Worker

BLOCK_BYTES = 64
MAX_BYTES = 16_384
"""Bytes of a prompt that count."""
MAX_PARSED_BYTES = 65_536
"""Bytes of a body that are read; the rest of a longer one is handed on unread."""
MAX_BLOCKS = 1 << 18
MIN_SHARE = 0.3
"""Share of a prompt that must be known for its worker to be preferred."""
MAX_RATIO, SLACK = 1.5, 8
PROMPTS = ("messages", "prompt", "input", "text", "input_ids", "prompt_token_ids", "token_ids")
IDS = ("request_id", "rid")
NOBODY: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The properties of a request by which its worker is chosen."""

    keys: Sequence[int] = ()
    """Hashes of the prompt's beginnings, the longest last."""
    session: int | None = None
    rows: int = 1
    model: str = ""
    request_id: str | None = None
    """The id that the client gave."""


def read_prompt(body: bytes, session: str | None) -> Prompt:
    """Read the beginning of a body; one that is not JSON gives a prompt without keys. `session`: x-session-id."""
    try:
        value = from_json(body[:MAX_PARSED_BYTES], allow_partial="trailing-strings")
    except ValueError:
        return Prompt()
    if not isinstance(value, dict):
        return Prompt()
    prompts = next((value[name] for name in PROMPTS if value.get(name)), "")
    model, salt = str(value.get("model", "")), str(value.get("cache_salt", ""))
    name = session or value.get("user")
    return Prompt(
        keys=_keys((model, salt), to_json(prompts)[:MAX_BYTES]),
        session=hash(("session", str(name))) if name else None,
        rows=_rows(value, prompts),
        model=model,
        request_id=next((str(value[name]) for name in IDS if value.get(name)), None),
    )


def _keys(start: tuple[str, str], text: bytes) -> list[int]:
    key, keys = hash(start), []
    for end in range(BLOCK_BYTES, len(text) + 1, BLOCK_BYTES):
        key = hash((key, text[end - BLOCK_BYTES : end]))
        keys.append(key)
    return keys


def _rows(value: Mapping[str, Any], prompts: Any) -> int:
    """Return the number of completions: prompts times `n`. Sizes that no worker would accept count as 1."""
    own = value.get("sampling_params")
    number = value.get("n") or (own.get("n") if isinstance(own, dict) else None)
    completions = number if isinstance(number, int) and 0 < number < 10_000 else 1
    is_several = (
        isinstance(prompts, list) and not value.get("messages") and prompts and isinstance(prompts[0], str | list)
    )
    return completions * (len(prompts) if is_several else 1)


class Affinity:
    """Remembers which workers were sent which beginnings of prompts."""

    def __init__(self) -> None:
        self._ranks: OrderedDict[int, frozenset[int]] = OrderedDict()
        """Ranks of workers by hash, the latest used last."""

    def choose(self, prompt: Prompt, workers: Sequence[Worker]) -> Worker:
        """Return one of `workers`, which is not empty, and remember it for this prompt."""
        least = min(workers, key=_order)
        holders = self._holders(prompt, {worker.rank for worker in workers})
        known = min((worker for worker in workers if worker.rank in holders), key=_order, default=least)
        chosen = known if known.load <= MAX_RATIO * least.load + SLACK else least
        self._remember(prompt, chosen.rank)
        return chosen

    def _holders(self, prompt: Prompt, ranks: set[int]) -> frozenset[int]:
        """Return the ranks with the longest known beginning, if that is most of the prompt, or with its session."""
        if prompt.session is not None and (own := self._ranks.get(prompt.session, NOBODY) & ranks):
            return own
        for number in range(len(prompt.keys), int(MIN_SHARE * len(prompt.keys)), -1):
            if own := self._ranks.get(prompt.keys[number - 1], NOBODY) & ranks:
                return own
        return NOBODY

    def _remember(self, prompt: Prompt, rank: int) -> None:
        for key in prompt.keys:
            ranks = self._ranks.get(key, NOBODY)
            if rank not in ranks:
                self._ranks[key] = ranks | {rank}
            self._ranks.move_to_end(key)
        if prompt.session is not None:  # the worker that had it before need not be asked again
            self._ranks[prompt.session] = frozenset({rank})
            self._ranks.move_to_end(prompt.session)
        while len(self._ranks) > MAX_BLOCKS:
            self._ranks.popitem(last=False)


def _order(worker: Worker) -> tuple[int, int, int]:
    """The least busy first; of equals the one that has had the fewest requests."""
    return worker.load, worker.num_requests, worker.rank
