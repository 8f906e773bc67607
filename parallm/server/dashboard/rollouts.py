"""A step's completions as the page reads them: lists of steps and groups, and the tokens of one group."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from parallm.errors import UnknownObject
from parallm.metrics.rollout_folder import RolloutFolder
from parallm.metrics.rollout_format import CLIPPED, LEARNED, TRAINED, GroupRow, RolloutFile

Order = Literal["index", "spread", "reward", "length"]
MAX_GROUPS = 200
MAX_PROMPT = 200
"""Characters of a prompt in lists."""
LOGPROB_DIGITS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFilter:
    """The groups of a step that are asked for."""

    sort: Order = "index"
    environment: str = ""
    search: str = ""
    """Text in a problem or a completion, small or large letters alike."""
    signal: bool = False
    """Only groups whose rewards differ."""


def steps_answer(folder: RolloutFolder, problem: str = "") -> dict[str, Any]:
    """Return the steps whose completions are kept; with `problem` those that hold it, and its group in each."""
    listing, steps = folder.listing(), []
    for row in listing.steps:
        shown = {key: row[key] for key in ("step", "time", "groups", "completions", "reward_mean", "with_signal")}
        shown["kept"] = row["is_kept"]
        if not problem:
            steps.append(shown)
        for place, (name, reward) in enumerate(row["problems"]):
            if problem and name == problem:
                steps.append({**shown, "group": place, "problem_reward": reward})
    damaged = [{"step": step, "reason": reason} for step, reason in listing.damaged.items()]
    return {"steps": steps, "damaged": damaged, "dropped": listing.num_dropped}


def groups_answer(folder: RolloutFolder, step: int, chosen: GroupFilter) -> dict[str, Any]:
    """Return the groups of a step, without their texts. Raises UnknownObject, RolloutsDamaged."""
    file = folder.read(step)
    groups = [(place, group) for place, group in enumerate(file.groups) if _is_chosen(group, chosen)]
    groups.sort(key=lambda pair: _sort_key(file, pair[0], pair[1], chosen.sort))
    return {
        "step": step,
        "time": file.summary["time"],
        "groups": [_group_line(file, place, group) for place, group in groups[:MAX_GROUPS]],
        "more": max(0, len(groups) - MAX_GROUPS),
        "environments": sorted({group["environment"] for group in file.groups} - {""}),
    }


def group_answer(folder: RolloutFolder, step: int, place: int) -> dict[str, Any]:
    """Return one group with its tokens. Raises UnknownObject, RolloutsDamaged."""
    file = folder.read(step)
    if not 0 <= place < len(file.groups):
        raise UnknownObject(f"step {step} has no group {place}: its groups are 0 to {len(file.groups) - 1}")
    group = file.groups[place]
    return {
        "step": step,
        "group": place,
        "groups": len(file.groups),
        "problem_id": group["problem_id"],
        "environment": group["environment"],
        "messages": [{"role": role, "content": content} for role, content in group["messages"]],
        "answer": group["answer"],
        "faulty": group["faulty"],
        "completions": [_completion(file, place, index) for index in range(len(group["completions"]))],
    }


def _is_chosen(group: GroupRow, chosen: GroupFilter) -> bool:
    if chosen.environment and group["environment"] != chosen.environment:
        return False
    if chosen.signal and len({row["reward"] for row in group["completions"]}) < 2:
        return False
    needle = chosen.search.casefold()
    texts = (group["problem_id"], group["answer"], *(content for _, content in group["messages"]))
    return not needle or any(
        needle in text.casefold() for text in (*texts, *(row["text"] for row in group["completions"]))
    )


def _sort_key(file: RolloutFile, place: int, group: GroupRow, order: Order) -> tuple[float, int]:
    rewards = [row["reward"] for row in group["completions"] if row["reward"] is not None] or [0.0]
    match order:
        case "index":
            return 0, place
        case "spread":
            return min(rewards) - max(rewards), place
        case "reward":
            return -math.fsum(rewards) / len(rewards), place
        case "length":
            return -max(_lengths(file, place), default=0), place


def _lengths(file: RolloutFile, place: int) -> list[int]:
    first = sum(len(row["completions"]) for row in file.groups[:place])
    ends = file.arrays["offsets"][first : first + len(file.groups[place]["completions"]) + 1]
    return [int(length) for length in np.diff(ends)]


def _group_line(file: RolloutFile, place: int, group: GroupRow) -> dict[str, Any]:
    completions = group["completions"]
    return {
        "group": place,
        "problem_id": group["problem_id"],
        "environment": group["environment"],
        "prompt": "\n".join(content for _, content in group["messages"])[:MAX_PROMPT],
        "answer": group["answer"][:MAX_PROMPT],
        "rewards": [row["reward"] for row in completions],
        "advantages": [row["advantage"] for row in completions],
        "lengths": _lengths(file, place),
        "finish_reasons": [row["finish_reason"] for row in completions],
        "versions": sorted({version for row in completions for version, _, _ in row["versions"]}),
        "faulty": [{"kind": row["kind"], "detail": row["detail"][:MAX_PROMPT]} for row in group["faulty"]],
    }


def _completion(file: RolloutFile, place: int, index: int) -> dict[str, Any]:
    row, tokens = file.groups[place]["completions"][index], file.tokens(place, index)
    return {
        "index": index,
        "reward": row["reward"],
        "parts": row["parts"],
        "advantage": row["advantage"],
        "finish_reason": row["finish_reason"],
        "temperature": row["temperature"],
        "versions": [{"version": version, "start": start, "end": end} for version, start, end in row["versions"]],
        "text": row["text"],
        "tokens": {
            "ids": tokens.ids_T.tolist(),
            "texts": tokens.texts,
            "logprobs": _rounded(tokens.logprobs_T),
            "learner_logprobs": None if tokens.learner_logprobs_T is None else _rounded(tokens.learner_logprobs_T),
            "entropies": None if tokens.entropies_T is None else _rounded(tokens.entropies_T, 3),
            "trained": _runs(tokens.flags_T & TRAINED > 0),
            "clipped": np.flatnonzero(tokens.flags_T & CLIPPED).tolist(),
            "advantages": None if tokens.advantages_T is None else _rounded(tokens.advantages_T),
            "learned": bool((tokens.flags_T & LEARNED).any()),
        },
    }


def _rounded(values_T: np.ndarray, digits: int = LOGPROB_DIGITS) -> list[float | None]:
    values = np.round(values_T.astype(np.float64), digits).tolist()
    return [value if math.isfinite(value) else None for value in values]


def _runs(is_set_T: np.ndarray) -> list[list[int]]:
    """Half-open ranges of the places that are set."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], is_set_T.astype(np.int8), [0]])))
    return [[int(begin), int(end)] for begin, end in edges.reshape(-1, 2)]
