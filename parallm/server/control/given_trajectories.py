"""Trajectories of a body as the trainer needs them: texts become tokens."""

from parallm.errors import ContextTooLong, InvalidRequest
from parallm.server.control.training_bodies import TrajectoryBody
from parallm.server.service import Tokenizer
from parallm.server.text_bounds import check_items, check_text
from parallm.types import WeightSpan
from parallm.updates import GivenTrajectory


def given_trajectory(body: TrajectoryBody, index: int, tokenizer: Tokenizer, max_context: int) -> GivenTrajectory:
    """Return the trajectory. Raises InvalidRequest that names it by its `index`."""
    name = f"trajectories.{index}"
    for sent in (body.prompt, body.prompt_ids, body.completion, body.completion_ids, body.text):
        if isinstance(sent, str):
            check_text(sent, name, tokenizer, max_context)
        check_items(sent, "tokens", name, max_context)
    prompt = _tokens(body, name, tokenizer)
    tokens, text = _completion(body, name, tokenizer)
    if len(prompt) + len(tokens) > max_context:
        raise ContextTooLong(
            f"{name} has {len(prompt) + len(tokens)} tokens, this model's maximum context length is {max_context}; "
            "shorten it",
            name,
            setting="engine.max_context",
        )
    for field in ("logprobs", "loss_mask"):
        values = getattr(body, field)
        if values is not None and len(values) != len(tokens):
            raise InvalidRequest(
                f"{name}.{field} has {len(values)} items for {len(tokens)} tokens of the completion", f"{name}.{field}"
            )
    return GivenTrajectory(
        prompt_tokens=prompt,
        tokens=tokens,
        reward=body.reward,
        group=None if body.group is None else str(body.group),
        logprobs=None if body.logprobs is None else tuple(body.logprobs),
        weight_versions=_spans(body, name, len(tokens)),
        loss_mask=(True,) * len(tokens) if body.loss_mask is None else tuple(body.loss_mask),
        temperature=body.temperature,
        text=text,
        finish_reason=body.finish_reason,
    )


def _tokens(body: TrajectoryBody, name: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    if (body.prompt is None) == (body.prompt_ids is None):
        raise InvalidRequest(f"{name} needs either prompt or prompt_ids", f"{name}.prompt")
    prompt = body.prompt if body.prompt_ids is None else body.prompt_ids
    assert prompt is not None, "exactly one of the two is sent"
    return tokenizer.encode(prompt) if isinstance(prompt, str) else tuple(prompt)


def _completion(body: TrajectoryBody, name: str, tokenizer: Tokenizer) -> tuple[tuple[int, ...], str]:
    """Return tokens and text."""
    sent = body.completion if body.completion_ids is None else body.completion_ids
    if body.completion is not None and body.completion_ids is not None:
        raise InvalidRequest(f"{name} needs either completion or completion_ids", f"{name}.completion")
    if isinstance(sent, list):
        return tuple(sent), tokenizer.decode(sent) if body.text is None else body.text
    if sent is not None and body.text is not None and sent != body.text:
        raise InvalidRequest(f"completion and text of {name} differ; leave one of them out", f"{name}.text")
    text = body.text if sent is None else sent
    if not text:
        raise InvalidRequest(f"{name} needs a completion: completion, completion_ids or text", f"{name}.completion")
    if body.logprobs is not None or body.loss_mask is not None:
        field = "logprobs" if body.logprobs is not None else "loss_mask"
        raise InvalidRequest(f"{name}.{field} is about tokens; send completion_ids with it", f"{name}.{field}")
    end = () if body.finish_reason == "length" else (tokenizer.end_token,)
    return (*tokenizer.encode_more(text), *end), text


def _spans(body: TrajectoryBody, name: str, num_tokens: int) -> tuple[WeightSpan, ...]:
    """Return the versions of the tokens; none if they are not known."""
    if body.weight_versions:
        return tuple(_checked_spans(body, name, num_tokens))
    if body.policy_version is not None:
        return (WeightSpan(version=body.policy_version, start=0, end=num_tokens),)
    if body.logprobs is not None:
        raise InvalidRequest(
            f"{name}.logprobs are those of a version of the policy; send its policy_version, or leave them out",
            f"{name}.policy_version",
        )
    return ()


def _checked_spans(body: TrajectoryBody, name: str, num_tokens: int) -> list[WeightSpan]:
    spans: list[WeightSpan] = []
    for span in body.weight_versions or ():
        start = spans[-1].end if spans else 0
        if not span.version.isdecimal() or len(span.version) > 9 or span.start != start or span.end <= span.start:
            break
        spans.append(WeightSpan(version=int(span.version), start=span.start, end=span.end))
    if len(spans) != len(body.weight_versions or ()) or spans[-1].end != num_tokens:
        raise InvalidRequest(
            f"{name}.weight_versions should cover its {num_tokens} tokens without gaps, each with a version's number",
            f"{name}.weight_versions",
        )
    return spans
