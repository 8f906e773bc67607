"""Keys of patterns mean what they mean to PEFT, and no expression is run."""

import re
import time

import pytest

from parallm.errors import AdapterError
from parallm.model.adapters.module_names import MAX_ANYTHING, check_keys, values_by_name

NAMES = [
    "model.layers.0.self_attn.q_proj",
    "model.layers.0.self_attn.v_proj",
    "model.layers.1.self_attn.q_proj",
    "model.layers.1.mlp.up_proj",
    "model.layers.10.mlp.up_proj",
    "q_proj",
]


def as_peft(pattern: dict[str, int]) -> dict[str, int]:
    """PEFT's own rule (`get_pattern_key`), for keys that are known to be harmless."""
    found = {}
    for name in NAMES:
        key = next((key for key in pattern if re.match(rf"(.*\.)?({key})$", name)), None)
        if key is not None:
            found[name] = pattern[key]
    return found


@pytest.mark.parametrize(
    "keys",
    [
        ["q_proj"],
        ["proj"],
        ["_proj"],
        ["self_attn.q_proj", "q_proj"],
        ["q_proj", "self_attn.q_proj"],
        ["layers.1.mlp.up_proj"],
        ["0.mlp.up_proj"],
        ["^q_proj"],
        ["^model.layers.0.self_attn.q_proj$", "q_proj|v_proj"],
        [r"layers\.1\.mlp\.up_proj|v_proj", "up_proj"],
        [".*v_proj"],
        [".*"],
        [".*proj", "q_proj"],
        ["layers.1.*"],
        [r"layers\.1\..*proj"],
        ["model.*attn.*q_proj"],
        ["^layers.*q_proj"],
        ["^model.*q_proj"],
        ["proj.*proj"],
        ["q_proj.*q_proj"],
        ["self_attn.*self_attn.q_proj"],
        ["nothing"],
    ],
)
def test_a_key_fits_the_names_that_it_fits_in_peft(keys: list[str]) -> None:
    pattern = {key: place for place, key in enumerate(keys)}
    assert values_by_name(pattern, NAMES) == as_peft(pattern)


def test_a_dot_is_a_dot() -> None:
    assert values_by_name({"q.proj": 4}, NAMES) == {}


@pytest.mark.parametrize(
    "key",
    [
        "(x?)?" * 50 + "y",
        "(a+)+",
        "q_proj?",
        "[qv]_proj",
        "q{1,9}",
        r"\w+",
        "(q|v)_proj",
        "q_proj\n",
        "",
        "a||b",
        "a+",
        r"q\.*",
        "q\0proj",
    ],
)
def test_expressions_are_refused_with_what_a_key_may_be(key: str) -> None:
    with pytest.raises(AdapterError, match=r"name layers by the ends of their paths, such as q_proj"):
        values_by_name({key: 4}, NAMES)
    with pytest.raises(AdapterError, match="is an expression that is not read here"):
        check_keys([key])


def test_keys_with_anything_in_them_are_bounded() -> None:
    check_keys(f"a{place}.*b" for place in range(MAX_ANYTHING))
    with pytest.raises(AdapterError, match=f"{MAX_ANYTHING + 1} times, the limit is {MAX_ANYTHING}"):
        check_keys(f"a{place}.*b" for place in range(MAX_ANYTHING + 1))


def test_long_patterns_take_a_time_that_grows_with_their_length() -> None:
    names = [f"model.layers.{place}.self_attn.q_proj" for place in range(200)]
    worst = {f"model{'.*e' * 128}{place}": 4 for place in range(2)}
    start = time.process_time()
    assert values_by_name(worst, names) == {}
    assert values_by_name({f"layers.{place}.self_attn.q_proj": place for place in range(10_000)}, names)
    assert time.process_time() - start < 2  # the first of them would take PEFT's rule longer than the universe is old
