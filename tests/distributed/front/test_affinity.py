"""Which worker gets a prompt."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from parallm.distributed.front.affinity import MAX_RATIO, SLACK, Affinity, Prompt, read_prompt
from parallm.distributed.front.connection import Address
from parallm.distributed.front.workers import Worker

SYSTEM = {"role": "system", "content": "You are a patient teacher of arithmetic. " * 10}


def workers(*loads: int) -> list[Worker]:
    made = [Worker(rank, Address("127.0.0.1", 1)) for rank in range(len(loads))]
    for worker, load in zip(made, loads, strict=True):
        worker.load = load
    return made


def prompt(*messages: Mapping[str, Any], session: str | None = None, **fields: Any) -> Prompt:
    return read_prompt(json.dumps({"model": "policy", "messages": messages} | fields).encode(), session)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def conversation(name: str, turns: int) -> Sequence[dict[str, str]]:
    return [user(f"{name} asks question number {turn}: " + "what is it? " * 8) for turn in range(turns)]


def test_a_conversation_stays_with_its_worker() -> None:
    affinity, both = Affinity(), workers(0, 0)
    for name in "abcdef":
        first = affinity.choose(prompt(*conversation(name, 1)), both)
        first.num_requests += 1
        assert all(affinity.choose(prompt(*conversation(name, turns)), both) is first for turns in range(2, 6))
    assert [worker.num_requests for worker in both] == [3, 3]


def test_other_models_and_salts_share_nothing() -> None:
    turns = conversation("a", 4)
    keys = {prompt(*turns).keys[0], prompt(*turns, model="base").keys[0], prompt(*turns, cache_salt="x").keys[0]}
    assert len(keys) == 3


def test_less_than_a_third_of_a_prompt_draws_no_request() -> None:
    affinity, both = Affinity(), workers(0, 0)
    first = affinity.choose(prompt(*conversation("a", 1)), both)
    first.load = 1
    assert affinity.choose(prompt(*conversation("a", 1), user("something else " * 100)), both) is not first


def test_a_busy_worker_loses_its_conversations() -> None:
    affinity, both = Affinity(), workers(0, 4)
    assert affinity.choose(prompt(*conversation("a", 2)), both) is both[0]
    both[0].load = int(MAX_RATIO * 4 + SLACK)
    assert affinity.choose(prompt(*conversation("a", 3)), both) is both[0]
    both[0].load += 1
    assert affinity.choose(prompt(*conversation("a", 4)), both) is both[1]


def test_a_shared_beginning_does_not_gather_all_requests() -> None:
    affinity, four, counts = Affinity(), workers(0, 0, 0, 0), Counter[int]()
    for number in range(128):
        chosen = affinity.choose(prompt(SYSTEM, user(f"{number}?")), four)
        chosen.load += 1
        counts[chosen.rank] += 1
    assert max(counts.values()) <= MAX_RATIO * min(counts.values()) + SLACK


def test_rows_count_and_not_requests() -> None:
    affinity, both = Affinity(), workers(0, 0)
    for number in range(4):
        one = prompt(user(f"{number}"), n=8 if number == 0 else 1)
        affinity.choose(one, both).load += one.rows
    assert [worker.load for worker in both] == [8, 3]


@pytest.mark.parametrize("fields", [{"session": "s"}, {"user": "u"}])
def test_a_session_stays_with_its_worker(fields: Mapping[str, Any]) -> None:
    affinity, both = Affinity(), workers(0, 0)
    first = affinity.choose(prompt(user("a"), **fields), both)
    first.load = 3
    assert affinity.choose(prompt(user("b" * 500), **fields), both) is first
    assert affinity.choose(prompt(user("c" * 500), session="another"), both) is not first


def test_a_worker_that_is_gone_is_not_chosen() -> None:
    affinity, both = Affinity(), workers(0, 0)
    first = affinity.choose(prompt(*conversation("a", 2)), both)
    (other,) = [worker for worker in both if worker is not first]
    assert affinity.choose(prompt(*conversation("a", 3)), [other]) is other
    assert affinity.choose(prompt(*conversation("a", 4)), both) in both


@pytest.mark.parametrize(
    ("body", "rows"),
    [
        ({"prompt": "a"}, 1),
        ({"prompt": ["a", "b"], "n": 3}, 6),
        ({"prompt": [[1, 2], [3]]}, 2),
        ({"prompt": [1, 2, 3]}, 1),
        ({"messages": [{"content": "a"}, {"content": "b"}], "n": 2}, 2),
        ({"text": "a", "sampling_params": {"n": 4}}, 4),
        ({"input_ids": [[1], [2], [3]]}, 3),
        ({"prompt": "a", "n": "many"}, 1),
        ({"prompt": "a", "n": 10**9}, 1),
    ],
)
def test_rows(body: Mapping[str, Any], rows: int) -> None:
    assert read_prompt(json.dumps(body).encode(), None).rows == rows


@pytest.mark.parametrize("body", [b"", b"[1]", b"\xff\xfe", b'{"messages": 3', b'{"prompt": null}', b"{" * 5000])
def test_any_body_is_a_prompt(body: bytes) -> None:
    read_prompt(body, None)


def test_the_beginning_of_a_long_body_is_enough() -> None:
    long = read_prompt(json.dumps({"model": "policy", "messages": [user("word " * 100_000)]}).encode(), None)
    other = read_prompt(json.dumps({"model": "policy", "messages": [user("word " * 200_000)]}).encode(), None)
    assert long.keys == other.keys
    assert len(long.keys) == 256
