"""The completions of one step as a safetensors file: numbers of tokens as arrays, what people read as JSON beside them.

`encode` takes what a step has made: several processes may each `encode_rows` of it, and one `join_rows`. `decode` reads
a file that anybody may have written or damaged. NumPy only.
Axes: N tokens of all completions of the file, S completions, T tokens of one.
"""

import json
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pydantic_core
from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic needs it before Python 3.12

from parallm.array_row import as_array
from parallm.errors import RolloutsDamaged
from parallm.metrics.json_lines import finite
from parallm.metrics.token_texts import CutText
from parallm.types import CompletionIndex, Trajectory, TrajectoryGroup

TRAINED, CLIPPED, LEARNED = 1, 2, 4
"""Bits of `flags`: the policy learned from this token; its gradient was bounded; the learner has computed it."""
KINDS: Mapping[str, tuple[str, np.dtype[Any]]] = {
    "tokens": ("I32", np.dtype("<i4")),
    "logprobs": ("F32", np.dtype("<f4")),
    "learner_logprobs": ("F32", np.dtype("<f4")),
    "entropies": ("F16", np.dtype("<f2")),
    "advantages": ("F32", np.dtype("<f4")),
    "flags": ("U8", np.dtype("u1")),
    "text_lengths": ("U16", np.dtype("<u2")),
    "offsets": ("I64", np.dtype("<i8")),
}
OPTIONAL = frozenset({"learner_logprobs", "advantages"})
MAX_BYTES = 1 << 30
"""A larger file is not read."""
MAX_HEADER_BYTES = 1 << 28
MAX_TEXT_LENGTH = (1 << 16) - 1
SURROGATES = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LearnedCompletion:
    """The learner's numbers of one completion of an update, computed before the weights changed."""

    group: int
    """Index among the groups of the update."""
    index: int
    """Index in its group."""
    advantages_T: np.ndarray
    """float32."""
    logprobs_T: np.ndarray
    """float32, after temperature."""
    entropies_T: np.ndarray
    """float32, nats."""
    clipped_T: np.ndarray
    """bool: tokens whose gradient the policy term bounds or removes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRollouts:
    """The completions of one step, as they are written."""

    step: int
    time: float
    """Unix seconds when the step ended."""
    groups: Sequence[TrajectoryGroup]
    trained: Collection[CompletionIndex] = frozenset()
    """The completions that were trained on."""
    learned: Mapping[CompletionIndex, LearnedCompletion] = field(default_factory=dict)
    """The learner's numbers that this process has computed."""
    is_kept: bool = False
    """Whether its file stays when others make room."""

    @property
    def indices(self) -> list[CompletionIndex]:
        """All completions, in the order of the file."""
        return [(group, index) for group, one in enumerate(self.groups) for index in range(len(one.trajectories))]


class EncodedRow(NamedTuple):
    """One completion as its file holds it."""

    text: str
    """JSON of its `CompletionRow`."""
    arrays: Mapping[str, np.ndarray]
    """One value for each token, by the names of `KINDS`."""


EncodedRows = dict[CompletionIndex, EncodedRow]


class FaultyRow(TypedDict):
    kind: str
    detail: str
    text: str


class CompletionRow(TypedDict):
    reward: float | None
    parts: dict[str, float | None]
    advantage: float | None
    finish_reason: str
    temperature: float
    versions: list[tuple[int, int, int]]
    """Version, first token, token after the last."""
    text: str
    """The text that was scored."""
    shown: str
    """Text of all tokens, special ones shown."""


class GroupHead(TypedDict):
    problem_id: str
    environment: str
    messages: list[tuple[str, str]]
    """Role and content."""
    answer: str
    faulty: list[FaultyRow]


class GroupRow(GroupHead):
    completions: list[CompletionRow]


class StepSummary(TypedDict):
    """The summary that lists of steps show. It stands apart in the file, so that they need not read the texts."""

    step: int
    time: float
    groups: int
    completions: int
    reward_mean: float | None
    with_signal: int
    is_kept: bool
    problems: list[tuple[str, float | None]]
    """Id and mean reward of each group."""


_GROUPS: TypeAdapter[list[GroupRow]] = TypeAdapter(list[GroupRow])
_SUMMARY: TypeAdapter[StepSummary] = TypeAdapter(StepSummary)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenArrays:
    """The tokens of one completion."""

    ids_T: np.ndarray
    texts: list[str]
    logprobs_T: np.ndarray
    learner_logprobs_T: np.ndarray | None
    """None: equal to `logprobs_T` bit for bit, or not computed. NaN where not computed."""
    entropies_T: np.ndarray | None
    """None: not computed."""
    flags_T: np.ndarray
    advantages_T: np.ndarray | None
    """None: each token has the completion's."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RolloutFile:
    """A file that was read and checked."""

    summary: StepSummary
    groups: list[GroupRow]
    arrays: Mapping[str, np.ndarray]
    num_bytes: int

    def tokens(self, group: int, index: int) -> TokenArrays:
        """The tokens of one completion of `groups`."""
        number = sum(len(row["completions"]) for row in self.groups[:group]) + index
        begin, end = (int(self.arrays["offsets"][place]) for place in (number, number + 1))
        own = {name: array[begin:end] for name, array in self.arrays.items() if name != "offsets"}
        is_learned = bool((own["flags"] & LEARNED).any())
        return TokenArrays(
            ids_T=own["tokens"],
            texts=CutText(self.groups[group]["completions"][index]["shown"], own["text_lengths"]).pieces(),
            logprobs_T=own["logprobs"],
            learner_logprobs_T=own.get("learner_logprobs") if is_learned else None,
            entropies_T=own["entropies"] if is_learned else None,
            flags_T=own["flags"],
            advantages_T=own.get("advantages") if is_learned else None,
        )


Cut = Callable[[Sequence[np.ndarray], Callable[[], object]], Sequence[CutText]]
"""Returns the text of each row of token ids. Calls its second argument after each small part of the work."""


def encode(rollouts: StepRollouts, cut: Cut, throttle: Callable[[], object] = lambda: None) -> bytes:
    """Return the file's content. `throttle` is called after each completion, group and array, and given to `cut`."""
    return join_rows(rollouts, encode_rows(rollouts, rollouts.indices, cut, throttle), throttle)


def encode_rows(
    rollouts: StepRollouts, indices: Sequence[CompletionIndex], cut: Cut, throttle: Callable[[], object]
) -> EncodedRows:
    """Encode some of the completions. For `throttle` see `encode`."""
    chosen = [rollouts.groups[group].trajectories[index] for group, index in indices]
    ids = [as_array(trajectory.tokens, np.int32) for trajectory in chosen]
    rows: EncodedRows = {}
    for index, trajectory, ids_T, whole in zip(indices, chosen, ids, cut(ids, throttle), strict=True):
        shown, learned = _bounded(whole), rollouts.learned.get(index)
        text = _to_json(_completion_row(trajectory, shown.text, learned))
        rows[index] = EncodedRow(text, _token_arrays(trajectory, ids_T, shown, learned))
        throttle()
    return rows


def join_rows(rollouts: StepRollouts, rows: EncodedRows, throttle: Callable[[], object]) -> bytes:
    """Return the file's content, from the rows of all completions. For `throttle` see `encode`."""
    ordered = [rows[index] for index in rollouts.indices]
    texts = iter(ordered)
    groups: list[str] = []  # escaped one by one: a thread that escapes a whole step would stop all others for it
    for group in rollouts.groups:
        completions = ",".join(next(texts).text for _ in group.trajectories)
        groups.append(_escaped(f'{_to_json(_group_head(group))[:-1]},"completions":[{completions}]}}'))
        throttle()
    arrays = joined_arrays(ordered, throttle)
    lengths_S = [len(row.arrays["tokens"]) for row in ordered]
    arrays["offsets"] = np.concatenate([[0], np.cumsum(lengths_S)]).astype(np.int64)
    if _agree(arrays):
        del arrays["learner_logprobs"]
    if not _varies(arrays["advantages"], [length for length in lengths_S if length]):
        del arrays["advantages"]
    throttle()
    return _packed(arrays, {"summary": _escaped(_to_json(_summary(rollouts))), "groups": f"[{','.join(groups)}]"})


def joined_arrays(rows: Sequence[EncodedRow], throttle: Callable[[], object] = lambda: None) -> dict[str, np.ndarray]:
    """The arrays of all rows, one row after the other. `throttle` is called after each array."""
    arrays: dict[str, np.ndarray] = {}
    for name in KINDS:
        if name == "offsets":
            continue
        arrays[name] = _joined([row.arrays[name] for row in rows], name)
        throttle()
    return arrays


def decode(content: bytes) -> RolloutFile:
    """Read and check the content of a file. Raises RolloutsDamaged, whatever it holds."""
    header, begin = _header(content)
    metadata = header.pop("__metadata__", None)
    if not isinstance(metadata, dict) or not {"summary", "groups"} <= metadata.keys():
        raise RolloutsDamaged("it has no description of its completions")
    summary = _validated(_SUMMARY, metadata["summary"], "summary")
    groups = _validated(_GROUPS, metadata["groups"], "groups")
    arrays = {name: _array(content, begin, name, header[name]) for name in KINDS if name in header}
    if missing := KINDS.keys() - OPTIONAL - arrays.keys():
        raise RolloutsDamaged(f"it has no {', '.join(sorted(missing))}")
    _check_lengths(arrays, groups)
    return RolloutFile(summary=summary, groups=groups, arrays=arrays, num_bytes=len(content))


def decode_summary(content: bytes) -> StepSummary:
    """Read what lists show, from a file's beginning as far as its header. Raises RolloutsDamaged."""
    metadata = _header(content, is_whole=False)[0].get("__metadata__")
    if not isinstance(metadata, dict) or "summary" not in metadata:
        raise RolloutsDamaged("it has no summary")
    return _validated(_SUMMARY, metadata["summary"], "summary")


def header_bytes(beginning: bytes) -> int:
    """Bytes of the file as far as its header, from its first eight. Raises RolloutsDamaged."""
    length = int.from_bytes(beginning[:8], "little")
    if len(beginning) < 8 or length > MAX_HEADER_BYTES:
        raise RolloutsDamaged("it is no whole safetensors file")
    return 8 + length


def _token_arrays(
    trajectory: Trajectory, ids_T: np.ndarray, shown: CutText, learned: LearnedCompletion | None
) -> dict[str, np.ndarray]:
    """One value of each array for each token; NaN for what the learner has not computed."""
    unknown_T = np.full(len(ids_T), np.nan, np.float32)
    flags_T = as_array(trajectory.loss_mask, np.bool_) * np.uint8(TRAINED)
    if learned is not None:
        flags_T |= learned.clipped_T * np.uint8(CLIPPED) | np.uint8(LEARNED)
    return {
        "tokens": ids_T,
        "logprobs": as_array(trajectory.logprobs, np.float32),
        "learner_logprobs": unknown_T if learned is None else learned.logprobs_T,
        "entropies": unknown_T if learned is None else learned.entropies_T,
        "advantages": unknown_T if learned is None else learned.advantages_T,
        "flags": flags_T,
        "text_lengths": shown.lengths_T,
    }


def _completion_row(trajectory: Trajectory, shown: str, learned: LearnedCompletion | None) -> CompletionRow:
    return {
        "reward": trajectory.reward,
        "parts": dict(trajectory.reward_parts),
        "advantage": None if learned is None else float(learned.advantages_T[0]),
        "finish_reason": trajectory.finish_reason,
        "temperature": trajectory.temperature,
        "versions": [(span.version, span.start, span.end) for span in trajectory.weight_versions],
        "text": trajectory.text,
        "shown": shown,
    }


def _group_head(group: TrajectoryGroup) -> GroupHead:
    problem = group.problem
    return {
        "problem_id": problem.problem_id,
        "environment": problem.environment,
        "messages": [(message.role, message.content) for message in problem.messages],
        "answer": problem.answer,
        "faulty": [{"kind": one.kind, "detail": one.detail, "text": one.text} for one in group.faulty],
    }


def _summary(rollouts: StepRollouts) -> StepSummary:
    rewards = [reward for group in rollouts.groups for reward in group.rewards]
    return {
        "step": rollouts.step,
        "time": rollouts.time,
        "groups": len(rollouts.groups),
        "completions": len(rewards),
        "reward_mean": _mean(rewards),
        "with_signal": sum(group.has_signal for group in rollouts.groups),
        "is_kept": rollouts.is_kept,
        "problems": [(group.problem.problem_id, _mean(group.rewards)) for group in rollouts.groups],
    }


def _mean(rewards: Sequence[float]) -> float | None:
    return math.fsum(rewards) / len(rewards) if rewards and all(map(math.isfinite, rewards)) else None


def _agree(arrays: Mapping[str, np.ndarray]) -> bool:
    """Whether engine and learner agree bit for bit on every token that both have computed and that is learned from."""
    both_N = (arrays["flags"] & (LEARNED | TRAINED)) == (LEARNED | TRAINED)
    return bool((arrays["logprobs"][both_N].view(np.int32) == arrays["learner_logprobs"][both_N].view(np.int32)).all())


def _varies(values_N: np.ndarray, lengths_S: Sequence[int]) -> bool:
    """Whether numbers differ within a completion; those that were not computed do not."""
    firsts_S = values_N[np.cumsum([0, *lengths_S])[:-1]]
    firsts_N = np.repeat(firsts_S, lengths_S)
    return bool(((values_N != firsts_N) & ~np.isnan(values_N) & ~np.isnan(firsts_N)).any())


def _joined(parts: Sequence[np.ndarray], name: str) -> np.ndarray:
    with np.errstate(over="ignore"):
        return np.concatenate([*parts, np.zeros(0, KINDS[name][1])]).astype(KINDS[name][1], copy=False)


def _bounded(whole: CutText) -> CutText:
    """The text that the file can hold."""
    if len(whole.text) <= MAX_TEXT_LENGTH and _well_formed(whole.text) is whole.text:
        return whole
    return CutText.of([_well_formed(piece)[:MAX_TEXT_LENGTH] for piece in whole.pieces()])


def _well_formed(text: str) -> str:
    """`text` without halves of characters, which neither UTF-8 nor JSON can hold."""
    return text if text.isascii() or not SURROGATES.search(text) else SURROGATES.sub("\ufffd", text)


def _to_json(value: object) -> str:
    try:
        return pydantic_core.to_json(value, inf_nan_mode="null", fallback=finite).decode()
    except ValueError:  # a lone surrogate, in what an environment may have written
        return _well_formed(json.dumps(finite(value), allow_nan=False, ensure_ascii=False, separators=(",", ":")))


def _escaped(text: str) -> str:
    """The JSON string of `text`, without its quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _packed(arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> bytes:
    """A safetensors file; `metadata` are escaped. Format: https://github.com/huggingface/safetensors"""
    entries: dict[str, Any] = {}
    end = 0
    for name, array in arrays.items():
        entries[name] = {"dtype": KINDS[name][0], "shape": [len(array)], "data_offsets": [end, end + array.nbytes]}
        end += array.nbytes
    described = ",".join(f'"{name}":"{text}"' for name, text in metadata.items())
    header = f'{{"__metadata__":{{{described}}},{json.dumps(entries, separators=(",", ":"))[1:]}'.encode()
    header += b" " * (-len(header) % 8)
    return b"".join([len(header).to_bytes(8, "little"), header, *(array.tobytes() for array in arrays.values())])


def _header(content: bytes, *, is_whole: bool = True) -> tuple[dict[str, Any], int]:
    """The header's object, and where the arrays begin."""
    begin = header_bytes(content)
    if begin > len(content):
        raise RolloutsDamaged("it ends before its arrays begin")
    try:
        header = json.loads(content[8:begin])
    except (ValueError, RecursionError) as error:
        raise RolloutsDamaged("its header is no JSON") from error
    if not isinstance(header, dict):
        raise RolloutsDamaged("its header is no object")
    if is_whole:
        _check_layout({name: entry for name, entry in header.items() if name != "__metadata__"}, len(content) - begin)
    return header, begin


def _check_layout(entries: Mapping[str, Any], num_bytes: int) -> None:
    """Raise RolloutsDamaged unless the arrays are known ones that fill the file one after the other."""
    end = 0
    for name, entry in entries.items():
        if name not in KINDS:
            raise RolloutsDamaged(f"it holds an unknown array {name[:100]!r}")
        kind, dtype = KINDS[name]
        match entry:
            case {"dtype": str(found), "shape": [int(count)], "data_offsets": [int(begin), int(stop)]}:
                fits = found == kind and begin == end and count >= 0 and stop - begin == count * dtype.itemsize
            case _:
                fits = False
        if not fits:
            raise RolloutsDamaged(f"its array {name!r} is not what the header says")
        end = entry["data_offsets"][1]
    if end != num_bytes:
        raise RolloutsDamaged(f"it holds {num_bytes} bytes of arrays, and its header speaks of {end}")


def _array(content: bytes, begin: int, name: str, entry: Mapping[str, Any]) -> np.ndarray:
    return np.frombuffer(content, KINDS[name][1], entry["shape"][0], begin + entry["data_offsets"][0])


def _validated(adapter: TypeAdapter[Any], text: object, name: str) -> Any:
    try:
        return adapter.validate_python(json.loads(text) if isinstance(text, str) else text)
    except (ValueError, ValidationError, RecursionError) as error:
        raise RolloutsDamaged(f"its {name} cannot be read") from error


def _check_lengths(arrays: Mapping[str, np.ndarray], groups: Sequence[GroupRow]) -> None:
    """Raise RolloutsDamaged unless arrays, offsets and texts fit together."""
    completions = [row for group in groups for row in group["completions"]]
    offsets, count = arrays["offsets"], len(arrays["tokens"])
    if any(len(array) != count for name, array in arrays.items() if name != "offsets"):
        raise RolloutsDamaged("its arrays differ in length")
    if len(offsets) != len(completions) + 1 or offsets[0] != 0 or offsets[-1] != count or (np.diff(offsets) < 0).any():
        raise RolloutsDamaged("its offsets do not fit its completions")
    ends = np.concatenate([[0], np.cumsum(arrays["text_lengths"], dtype=np.int64)])[offsets]
    if np.diff(ends).tolist() != [len(row["shown"]) for row in completions]:
        raise RolloutsDamaged("the texts of its tokens do not fit those of its completions")
