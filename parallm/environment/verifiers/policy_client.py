"""The model, as the interception server of `verifiers` calls it: every call is a question of one episode."""

from collections.abc import Mapping
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.dialects import Dialect
from verifiers.v1.graph import PendingTurn
from verifiers.v1.types import content_text

from parallm.environment.verifiers.exchange import Exchange, NoMoreTurns, Unfit
from parallm.types import Message

MODEL = "policy"


class PolicyClient(vf.Client):
    """Knows the episodes that are under way by the ids of their traces."""

    def __init__(self) -> None:
        self._episodes: dict[str, tuple[vf.Trace, Exchange]] = {}

    def add(self, trace: vf.Trace, exchange: Exchange) -> None:
        self._episodes[trace.id] = (trace, exchange)

    def remove(self, trace: vf.Trace) -> None:
        self._episodes.pop(trace.id, None)

    async def get_response(
        self,
        dialect: Dialect[Any],
        body: dict[str, Any],
        sampling: vf.SamplingConfig,
        session_id: str | None = None,
        turn: PendingTurn | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> vf.Response:
        """Raises ProviderError where the episode has no turn left, which counts as cut off."""
        trace, exchange = self._episodes[session_id or ""]
        try:
            messages = turn.prompt if turn is not None else dialect.parse_request(body).messages
            answer = await exchange.ask([to_message(message) for message in messages])
        except NoMoreTurns as error:
            trace.stop("max_output_tokens")
            raise vf.ProviderError("the episode has no turns or tokens left", status_code=400) from error
        except Unfit as error:
            raise vf.ProviderError(str(error), status_code=400) from error
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": answer.text},
            "finish_reason": "length" if answer.is_cut_off else "stop",
        }
        raw = {"id": trace.id, "object": "chat.completion", "created": 0, "model": MODEL, "choices": [choice]}
        response = dialect.parse_response(dialect.validate_response(raw))
        response.raw = raw
        return response


def to_message(message: vf.Message) -> Message:
    """Raises Unfit for what is not text."""
    content = message.content
    if isinstance(content, list) and any(part.type != "text" for part in content):
        raise Unfit("a message holds an image, and only text can be trained on")
    return Message(role=message.role, content=content_text(content))
