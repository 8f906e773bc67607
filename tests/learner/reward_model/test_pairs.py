"""Lines of jsonl as pairs of completions."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from parallm.errors import ConfigError, ProblemError
from parallm.learner.datasets import Dataset, Example, read_dataset, to_group
from parallm.learner.reward_model import to_scoring_request
from parallm.learner.settings import LearnerSettings
from parallm.model.shared_model import SharedModel
from parallm.types import Message

GOOD = {"prompt": "1 + 1?", "chosen": "2", "rejected": "3"}


def write_lines(path: Path, *rows: Mapping[str, Any] | str) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def read(path: Path, **settings: Any) -> Dataset:
    found = read_dataset(LearnerSettings(trains="reward_model", data=str(path), **settings), holds_out=True)
    assert found is not None
    return found


def test_a_line_is_a_prompt_or_messages_with_two_completions(tmp_path: Path) -> None:
    turns = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1 + 1?"}]
    data = write_lines(tmp_path / "a.jsonl", GOOD, "", {"messages": turns, "chosen": "2", "rejected": "4", "margin": 1})
    first, second = read(data, data_held_out=str(data)).train
    assert (first.messages, first.completions) == ((Message(role="user", content="1 + 1?"),), ("2", "3"))
    assert first.rewards == (0.0, 0.0)
    assert [message.role for message in second.messages] == ["system", "user"]
    assert second.rewards == (1.0, 0.0)
    assert second.example_id == "learner.data: line 3"


def test_a_tenth_of_the_prompts_is_held_out_with_all_of_their_pairs(tmp_path: Path) -> None:
    rows = [GOOD | {"prompt": f"{number} + 1?", "rejected": str(wrong)} for number in range(200) for wrong in (-1, -2)]
    found = read(write_lines(tmp_path / "a.jsonl", *rows))
    trained, held_out = ({pair.messages for pair in pairs} for pairs in (found.train, found.held_out))
    assert not trained & held_out
    assert (len(found.train), len(found.held_out)) == (2 * len(trained), 2 * len(held_out))
    assert 10 <= len(held_out) <= 30


def test_a_file_of_held_out_pairs_leaves_all_of_the_others_for_training(tmp_path: Path) -> None:
    rows = [GOOD | {"prompt": f"{number} + 1?"} for number in range(50)]
    data, other = write_lines(tmp_path / "a.jsonl", *rows), write_lines(tmp_path / "b.jsonl", GOOD)
    found = read(data, data_held_out=str(other))
    assert (len(found.train), len(found.held_out)) == (50, 1)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", r"learner\.data: line 2 of .*a\.jsonl is no JSON"),
        ("[1]", "line 2 of .* is no object"),
        ({"prompt": "?", "chosen": "a"}, r"line 2 of .* has no text under rejected; it has \['chosen', 'prompt'\]"),
        (GOOD | {"chosen": ""}, "line 2 of .* has no text under chosen"),
        ({"chosen": "a", "rejected": "b"}, "line 2 of .* has neither a text under prompt nor messages"),
        (GOOD | {"margin": "1"}, "line 2 of .*: margin is '1', not a number that float32"),
        (GOOD | {"margin": 1e39}, r"line 2 of .*: margin is 1e\+39, not a number that float32"),
        (GOOD | {"margin": True}, "line 2 of .*: margin is True, not a number that float32"),
    ],
)
def test_a_broken_line_is_named(line: Mapping[str, Any] | str, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(ProblemError, match=complaint):
        read(write_lines(tmp_path / "a.jsonl", GOOD, line))


def test_of_the_held_out_file_the_key_is_named(tmp_path: Path) -> None:
    data, broken = write_lines(tmp_path / "a.jsonl", GOOD), write_lines(tmp_path / "b.jsonl", "{")
    with pytest.raises(ProblemError, match=r"learner\.data_held_out: line 1 of .*b\.jsonl is no JSON"):
        read(data, data_held_out=str(broken))
    with pytest.raises(ProblemError, match="has no lines"):
        read(write_lines(tmp_path / "c.jsonl", ""))


def test_settings_must_go_together() -> None:
    with pytest.raises(ConfigError, match=r"learner\.data: must be given"):
        read_dataset(LearnerSettings(trains="reward_model"), holds_out=True)
    with pytest.raises(ConfigError, match=r"learner\.clip_low=0.1 is about the loss of a policy"):
        read_dataset(LearnerSettings(trains="reward_model", data="x", clip_low=0.1), holds_out=True)


def test_without_evaluations_all_pairs_are_trained_on(tmp_path: Path) -> None:
    rows = [GOOD | {"prompt": f"{number} + 1?"} for number in range(50)]
    data = write_lines(tmp_path / "a.jsonl", *rows)
    found = read_dataset(LearnerSettings(trains="reward_model", data=str(data)), holds_out=False)
    assert found is not None
    assert (len(found.train), len(found.held_out)) == (50, 0)


def a_pair(rejected: str = "#### 8") -> Example:
    messages = (Message(role="user", content="Tom has 3 pens and gets 4 more. How many pens does Tom have now?"),)
    return Example(example_id="line 7", messages=messages, completions=("#### 7", rejected), rewards=(0.5, 0.0))


def test_both_completions_follow_one_prompt_and_end_with_the_end_of_the_turn(nano: SharedModel) -> None:
    group = to_group(a_pair(), nano.tokenizer, 512)
    item = to_scoring_request(group)
    assert item.prompt_tokens == nano.tokenizer.encode_chat(a_pair().messages)
    assert [nano.tokenizer.decode(tokens) for tokens in item.completions] == ["#### 7", "#### 8"]
    assert all(tokens[-1] in nano.tokenizer.eos_token_ids for tokens in item.completions)
    assert group.rewards == (0.5, 0.0)


def test_a_pair_that_cannot_be_used_is_named(nano: SharedModel) -> None:
    with pytest.raises(ProblemError, match=r"line 7 has \d+ \+ \d+ tokens, the context of the model is 20"):
        to_group(a_pair(), nano.tokenizer, 20)
    with pytest.raises(ProblemError, match=r"line 7: chosen and rejected are the same \d tokens"):
        to_group(a_pair(rejected="#### 7"), nano.tokenizer, 512)
