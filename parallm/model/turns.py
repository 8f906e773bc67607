"""Tokens of what an environment says between two turns of the model. What the model has said is never re-tokenised."""

from collections.abc import Sequence

from parallm.errors import InvalidRequest
from parallm.model.chat import ChatTokenizer
from parallm.types import Message

ASSISTANT = "assistant"
PLACE = "the-turn-7f3a9c51"
"""Stands for the model's turn while the template is rendered around it; no message of a person holds it."""


def reply_tokens(
    tokenizer: ChatTokenizer, messages: Sequence[Message], sampled: Sequence[int], reply: Sequence[Message]
) -> tuple[int, ...]:
    """Tokens to put behind `sampled`, the model's newest turn, so that the model goes on after `reply`.

    `messages` is the conversation before `reply`, the newest turn included. One reply of the role `assistant` goes on
    with the model's own text; any other reply gets the chat template's marks: those that stand behind an assistant's
    turn in the rendered conversation. Raises InvalidRequest where the template or the tokenizer allows neither.
    """
    if [message.role for message in reply] == [ASSISTANT]:
        return _written_on(tokenizer, sampled, reply[0].content)
    before = list(messages)
    while before and before[-1].role == ASSISTANT:
        before.pop()
    conversation = [*_joined(before), Message(role=ASSISTANT, content=PLACE)]
    text = tokenizer.render_chat([*conversation, *reply])
    other = [Message(role=message.role, content=message.content + "!") for message in reply]
    _, place, behind = text.partition(PLACE)
    if not place or PLACE in behind or text == tokenizer.render_chat([*conversation, *other]):
        roles = sorted({message.role for message in reply})
        raise InvalidRequest(
            f"the model's chat template leaves out the assistant's turn or a reply of the roles {roles}, so the tokens "
            "between two turns cannot be told; reply in the role user or assistant, or use another model's template",
            "messages",
        )
    tokens = tokenizer.encode_more(behind)
    ended_itself = bool(sampled) and sampled[-1] in tokenizer.eos_token_ids and tokens[:1] == (sampled[-1],)
    return tokens[1:] if ended_itself else tokens


def _written_on(tokenizer: ChatTokenizer, sampled: Sequence[int], text: str) -> tuple[int, ...]:
    """Tokens that make exactly `text` where they follow `sampled`."""
    wanted = tokenizer.decode(sampled) + text
    for lead in ("", "\n"):  # some tokenizers put a space before the first word of a text: not so behind a line end
        skipped, whole = tokenizer.encode_more(lead), tokenizer.encode_more(lead + text)
        tokens = whole[len(skipped) :]
        if whole[: len(skipped)] == skipped and tokenizer.decode([*sampled, *tokens]) == wanted:
            return tokens
    raise InvalidRequest(
        f"the model's tokenizer cannot write {text!r} behind {wanted[: len(wanted) - len(text)][-40:]!r}; "
        "reply in the role user instead",
        "messages",
    )


def _joined(messages: Sequence[Message]) -> list[Message]:
    """Neighbouring assistant messages as one: templates expect the roles to take turns."""
    joined: list[Message] = []
    for message in messages:
        if joined and message.role == joined[-1].role == ASSISTANT:
            joined[-1] = Message(role=ASSISTANT, content=joined[-1].content + message.content)
        else:
            joined.append(message)
    return joined
