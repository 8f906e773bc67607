"""`Answer`: a completion for Python, and the request bodies that ask for it."""

from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, TypeAlias

from parallm.errors import InvalidRequest

Messages: TypeAlias = Sequence[Mapping[str, Any]]
"""Turns of a chat, `{"role": "user", "content": "..."}`, in OpenAI's form."""
Prompt: TypeAlias = str | Sequence[int] | Messages
"""A text to continue, token ids to continue, or a chat to answer."""

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MAX_PROMPTS, MAX_COMPLETIONS = 8, 256
MAX_CHARACTERS = 200_000
"""Limits of one request; servers take 256 completions and 4 MiB of JSON."""
SET_HERE = {
    "model": "it is an argument of its own",
    "messages": "the first argument holds them",
    "prompt": "the first argument holds it",
    "logprobs": "each answer has the log-probs of its tokens; top_logprobs in a chat adds others",
    "return_token_ids": "each answer has them",
    "stream": "answers come whole; stream from `serve` with a client of OpenAI's",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One completion."""

    text: str
    """Text without the end token; for a chat without reasoning and tool calls."""
    tokens: tuple[int, ...] = field(repr=False)
    """Sampled token ids, the end token included."""
    logprobs: tuple[float, ...] = field(repr=False)
    """Log-prob of each token after temperature."""
    prompt_tokens: tuple[int, ...] = field(repr=False)
    finish_reason: str
    """`stop`, `length`, `tool_calls` or `abort`."""
    version: int
    """The adapter version that sampled the last token; 0 is the base."""
    temperature: float
    """Temperature of the request."""
    model: str
    """Name with the exact version, such as `policy@12`."""
    trajectory_id: str | None
    """Id for its reward, if it was sampled with `collect_trajectory=True`."""
    choice: Mapping[str, Any] = field(repr=False)
    """The choice in the HTTP response: `message` with reasoning and tool calls, `weight_versions` and more."""

    def rewarded(self, reward: float, *, group: str | int | None = None) -> dict[str, Any]:
        """Return a trajectory for `Training.train_on`; rewards are compared within `group`, or within the prompt."""
        return {
            "prompt_ids": list(self.prompt_tokens),
            "completion_ids": list(self.tokens),
            "text": self.text,
            "logprobs": list(self.logprobs),
            "weight_versions": self.choice["weight_versions"],
            "temperature": self.temperature,
            "finish_reason": self.finish_reason,
            "reward": reward,
            "group": group,
        }


def requests_of(prompts: Sequence[Prompt], model: str, fields: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return path and body of each request for completions of `prompts`, in their order.

    Each chat is a request; texts and token ids share requests. Raises InvalidRequest.
    """
    for name in fields.keys() & SET_HERE.keys():
        raise InvalidRequest(f"{name} cannot be given: {SET_HERE[name]}", name)
    for prompt in prompts:
        if not _is_list(prompt):
            raise InvalidRequest(f"{prompt!r} is no prompt; give a text, token ids, or a list of turns", "prompts")
    body = {**fields, "model": model, "return_token_ids": True}
    requests: list[tuple[str, dict[str, Any]]] = []
    for chats, several in groupby(prompts, is_chat):
        if chats:
            requests += [(CHAT, {**body, "messages": list(chat), "logprobs": True}) for chat in several]
        else:
            given = [prompt if isinstance(prompt, str) else list(prompt) for prompt in several]
            requests += [(TEXT, {**body, "prompt": part, "logprobs": 0}) for part in _parts(given, body.get("n"))]
    return requests


def is_chat(prompt: Prompt) -> bool:
    return not isinstance(prompt, str) and _is_list(prompt) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _is_list(prompt: object) -> bool:
    """Whether a prompt has items; arrays of token ids have."""
    return isinstance(prompt, Sized) and not isinstance(prompt, Mapping)


def answers_of(path: str, body: Mapping[str, Any], response: Mapping[str, Any]) -> list[Answer]:
    """Return the completions of one request, prompt by prompt."""
    temperature = float(body.get("temperature", 1.0))
    return [_answer(path, response, choice, temperature) for choice in response["choices"]]


def _parts(prompts: Sequence[Any], n: object) -> Iterator[list[Any]]:
    """Yield parts that fit one request; the server refuses a prompt that is too large alone."""
    max_prompts = min(MAX_PROMPTS, MAX_COMPLETIONS // n) if isinstance(n, int) and n > 0 else MAX_PROMPTS
    part: list[Any] = []
    size = 0
    for prompt in prompts:
        if part and (len(part) >= max_prompts or size + len(prompt) > MAX_CHARACTERS):
            yield part
            part, size = [], 0
        part.append(prompt)
        size += len(prompt)
    if part:
        yield part


def _answer(path: str, response: Mapping[str, Any], choice: Mapping[str, Any], temperature: float) -> Answer:
    if path == CHAT:
        text = choice["message"].get("content") or ""
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        prompt_tokens = response["prompt_token_ids"]
    else:
        text, logprobs = choice["text"], choice["logprobs"]["token_logprobs"]
        prompt_tokens = choice["prompt_token_ids"]
    return Answer(
        text=text,
        tokens=tuple(choice["token_ids"]),
        logprobs=tuple(logprobs),
        prompt_tokens=tuple(prompt_tokens),
        finish_reason=choice["finish_reason"],
        version=choice["policy_version"],
        temperature=temperature,
        model=response["model"],
        trajectory_id=choice.get("trajectory_id"),
        choice=choice,
    )
