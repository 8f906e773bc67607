"""Files of completions: what comes back, and what damaged and hostile ones do."""

import json
import math
import random
import struct
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load

from parallm.errors import RolloutsDamaged
from parallm.metrics.rollout_format import (
    CLIPPED,
    LEARNED,
    TRAINED,
    LearnedCompletion,
    StepRollouts,
    decode,
    decode_summary,
    encode,
    header_bytes,
)
from parallm.metrics.token_texts import CutText, TokenTexts
from parallm.types import FaultyEpisode, Message, Problem, Trajectory, TrajectoryGroup, WeightSpan


def cut(rows: Any, _: object = None) -> list[CutText]:
    return [CutText.of([chr(97 + token % 26) for token in tokens]) for tokens in rows]


def trajectory(tokens: tuple[int, ...], reward: float, **changes: Any) -> Trajectory:
    one = Trajectory(
        problem_id="p",
        prompt_tokens=(1, 2),
        tokens=tokens,
        loss_mask=tuple(place != 1 for place in range(len(tokens))),
        logprobs=tuple(-0.5 * place for place in range(len(tokens))),
        temperature=1.0,
        weight_versions=(WeightSpan(version=3, start=0, end=len(tokens)),),
        reward_parts={"correct": reward},
        reward=reward,
        text=cut([tokens])[0].text,
        finish_reason="stop",
    )
    return replace(one, **changes)


def group(*trajectories: Trajectory, number: int = 0) -> TrajectoryGroup:
    problem = Problem(problem_id=f"p{number}", messages=(Message(role="user", content="12 + 3?"),), answer="15")
    return TrajectoryGroup(problem=problem, trajectories=trajectories)


def learned(one: Trajectory, index: int, *, logprobs: Any = None, advantage: float = 0.5) -> LearnedCompletion:
    count = len(one.tokens)
    return LearnedCompletion(
        group=0,
        index=index,
        advantages_T=np.full(count, advantage, np.float32),
        logprobs_T=np.asarray(one.logprobs if logprobs is None else logprobs, np.float32),
        entropies_T=np.arange(count, dtype=np.float32) / 4,
        clipped_T=np.arange(count) == 2,
    )


FIRST, SECOND = trajectory((1, 2, 3), 1.0), trajectory((4, 5), 0.0)
STEP = StepRollouts(
    step=7, time=5.0, groups=[group(FIRST, SECOND), group(SECOND, number=1)], learned={(0, 0): learned(FIRST, 0)}
)


def test_what_is_written_comes_back() -> None:
    file = decode(encode(STEP, cut))
    tokens = file.tokens(0, 0)
    assert (tokens.ids_T.tolist(), tokens.texts) == ([1, 2, 3], ["b", "c", "d"])
    assert tokens.logprobs_T.tolist() == [0.0, -0.5, -1.0]
    assert tokens.entropies_T is not None
    assert tokens.entropies_T.tolist() == [0.0, 0.25, 0.5]
    assert tokens.flags_T.tolist() == [TRAINED | LEARNED, LEARNED, TRAINED | CLIPPED | LEARNED]
    assert tokens.learner_logprobs_T is None
    assert tokens.advantages_T is None
    row = file.groups[0]["completions"][0]
    assert (row["reward"], row["advantage"], row["versions"], row["shown"]) == (1.0, 0.5, [(3, 0, 3)], "bcd")
    assert file.groups[1]["messages"] == [("user", "12 + 3?")]


def test_texts_come_back_whatever_they_hold() -> None:
    hard = 'a "quote" \\ and\n\t\x00 \u2028 \U0001f600</script>'
    one = trajectory((1, 2), 1.0, text=hard)
    problem = Problem(problem_id=hard, messages=(Message(role="user", content=hard),), answer=hard)
    content = encode(StepRollouts(step=1, time=0.0, groups=[replace(group(one), problem=problem)]), cut)
    (found,) = decode(content).groups
    assert (found["problem_id"], found["messages"], found["answer"]) == (hard, [("user", hard)], hard)
    assert found["completions"][0]["text"] == hard
    assert decode_summary(content)["problems"] == [(hard, 1.0)]


def test_other_threads_get_their_turn_after_each_completion_group_and_array() -> None:
    calls = list[None]()
    encode(STEP, cut, lambda: calls.append(None))
    completions, groups, arrays = 3, 2, 7
    assert len(calls) >= completions + groups + arrays


def test_a_completion_that_nothing_was_learned_from_has_no_numbers_of_the_learner() -> None:
    tokens = decode(encode(STEP, cut)).tokens(1, 0)
    assert (tokens.texts, tokens.entropies_T, tokens.flags_T.tolist()) == (["e", "f"], None, [TRAINED, 0])


def test_log_probs_of_the_learner_are_kept_where_one_bit_differs() -> None:
    differs = np.asarray(FIRST.logprobs, np.float32)
    differs[2] = np.nextafter(differs[2], np.float32(0))
    step = replace(STEP, learned={(0, 0): learned(FIRST, 0, logprobs=differs)})
    tokens = decode(encode(step, cut)).tokens(0, 0)
    assert tokens.learner_logprobs_T is not None
    assert tokens.learner_logprobs_T.tolist() == differs.tolist()


def test_advantages_of_tokens_are_kept_where_they_differ_within_a_completion() -> None:
    one = replace(learned(FIRST, 0), advantages_T=np.array([1, 1, 2], np.float32))
    tokens = decode(encode(replace(STEP, learned={(0, 0): one}), cut)).tokens(0, 0)
    assert tokens.advantages_T is not None
    assert tokens.advantages_T.tolist() == [1, 1, 2]


def test_the_summary_is_read_from_the_header_alone() -> None:
    content = encode(STEP, cut)
    summary = decode_summary(content[: header_bytes(content[:8])])
    assert (summary["step"], summary["groups"], summary["completions"], summary["with_signal"]) == (7, 2, 3, 1)
    assert summary["reward_mean"] == pytest.approx(1 / 3)
    assert summary["problems"] == [("p0", 0.5), ("p1", 0.0)]


def test_other_programs_read_the_arrays() -> None:
    arrays = load(encode(STEP, cut))
    assert arrays["tokens"].tolist() == [1, 2, 3, 4, 5, 4, 5]
    assert {name: array.dtype.name for name, array in arrays.items()} == {
        "tokens": "int32",
        "logprobs": "float32",
        "entropies": "float16",
        "flags": "uint8",
        "text_lengths": "uint16",
        "offsets": "int64",
    }
    # 13 bytes a token, and 8 for each completion
    assert sum(array.nbytes for array in arrays.values()) == 13 * 7 + 8 * 4


def test_rewards_and_texts_that_json_cannot_hold_are_written_all_the_same() -> None:
    one = trajectory((1, 2, 3), math.nan, text="half \ud83d", reward_parts={"\ud800": math.inf})
    faulty = FaultyEpisode(kind="score_raised", detail="KeyError: '\udfff'", text="", tokens=())
    file = decode(
        encode(
            replace(STEP, groups=[replace(group(one), faulty=(faulty,))], learned={}),
            lambda *_: [CutText.of(["\ud83d"] * 3)],
        )
    )
    row = file.groups[0]["completions"][0]
    assert (row["reward"], row["text"], row["parts"], row["shown"]) == (
        None,
        "half \ufffd",
        {"\ufffd": None},
        "\ufffd" * 3,
    )
    assert file.groups[0]["faulty"][0]["detail"] == "KeyError: '\ufffd'"
    assert file.summary["reward_mean"] is None


def test_a_step_without_completions_can_be_written() -> None:
    assert decode(encode(replace(STEP, groups=[], learned={}), cut)).groups == []


def packed(header: object, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def changed(change: Mapping[str, Any]) -> bytes:
    """A good file with other values in its header."""
    content = encode(STEP, cut)
    begin = header_bytes(content[:8])
    header = json.loads(content[8:begin])
    for name, values in change.items():
        header[name] = values if not isinstance(values, dict) else {**header.get(name, {}), **values}
    return packed(header, content[begin:])


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00" * 7,
        b"\xff" * 8,
        struct.pack("<Q", 1 << 60),
        struct.pack("<Q", 50) + b"{}",
        packed([]),
        packed(None),
        packed({}),
        struct.pack("<Q", 200_000) + b"[" * 200_000,
        b"\x80\x04\x95pickled",
        packed({"__metadata__": {"summary": "[" * 99_999, "groups": "[]"}}),
        changed({"tokens": {"shape": [2]}}),
        changed({"tokens": {"shape": [-7]}}),
        changed({"tokens": {"shape": [1 << 70]}}),
        changed({"tokens": {"shape": [True]}}),
        changed({"tokens": {"dtype": "F64"}}),
        changed({"tokens": {"data_offsets": [4, 32]}}),
        changed({"tokens": {"data_offsets": ["0", "28"]}}),
        changed({"other": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}),
        changed({"__metadata__": {"groups": "[]"}}),
        changed({"__metadata__": {"groups": '[{"problem_id": 1}]'}}),
        changed({"__metadata__": {"summary": "7"}}),
        changed({"__metadata__": {"summary": "NaN"}}),
        changed({"__metadata__": "text"}),
        encode(STEP, cut)[:-1],
        encode(STEP, cut) + b"\x00",
    ],
)
def test_a_hostile_file_is_refused(content: bytes) -> None:
    with pytest.raises(RolloutsDamaged):
        decode(content)


def test_a_file_with_any_damage_is_read_or_refused() -> None:
    content, chance = encode(STEP, cut), random.Random(1)
    begin = header_bytes(content[:8])
    num_refused = 0
    for _ in range(3000):
        damaged = bytearray(content)
        for _ in range(chance.randint(1, 3)):
            damaged[chance.randrange(len(damaged) if chance.random() < 0.5 else begin)] = chance.randrange(256)
        if chance.random() < 0.1:
            del damaged[chance.randrange(len(damaged)) :]
        try:
            file = decode(bytes(damaged))
        except RolloutsDamaged:
            num_refused += 1
        else:
            for place, row in enumerate(file.groups):
                for index, completion in enumerate(row["completions"]):
                    assert "".join(file.tokens(place, index).texts) == completion["shown"]
    assert num_refused > 1000


def test_a_file_is_made_without_a_line_of_python_for_each_token() -> None:
    """Others sample while it is made, and have to wait for each line of Python."""

    def num_lines(num_tokens: int) -> int:
        one = trajectory((7,) * num_tokens, 1.0)
        step = replace(STEP, groups=[group(one)], learned={(0, 0): learned(one, 0)})
        texts = TokenTexts(lambda rows: ["ab" * len(tokens) for tokens in rows])
        encode(step, texts.cut)  # learns the texts of tokens
        events = 0

        def count(*_: object) -> Any:
            nonlocal events
            events += 1
            return count

        tracer = sys.gettrace()
        sys.settrace(count)  # also where a comprehension turns
        try:
            encode(step, texts.cut)
        finally:
            sys.settrace(tracer)
        return events

    assert num_lines(1000) == num_lines(10)
