"""Lines of jsonl and the samples of a run as something to imitate."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from parallm.device.streams import DeviceStreams
from parallm.errors import ConfigError, ProblemError
from parallm.learner.datasets import Dataset, Example, read_dataset, to_group
from parallm.learner.learner import Learner
from parallm.learner.settings import LearnerSettings
from parallm.metrics.record import sample_row
from parallm.model.adapters.adapter import make_adapter
from parallm.model.adapters.initial import initial_arrays
from parallm.model.shared_model import SharedModel
from parallm.reports import UpdateReport
from parallm.types import Message, Problem, Trajectory, TrajectoryGroup

QUESTION = (Message(role="user", content="Tom has 3 pens and gets 4 more. How many pens does Tom have now?"),)
ANSWER = "3 + 4 = 7\n#### 7"


def write_lines(path: Path, *rows: Mapping[str, Any] | str) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def example(name: str, text: str) -> Example:
    return Example(example_id=name, messages=QUESTION, completions=(text,), rewards=(1.0,))


def read(path: Path, **settings: Any) -> list[Example]:
    """All of them, for training."""
    return list(split(path, holds_out=False, **settings).train)


def split(path: Path, *, holds_out: bool = True, **settings: Any) -> Dataset:
    found = read_dataset(LearnerSettings(preset="sft", data=str(path), **settings), holds_out=holds_out)
    assert found is not None
    return found


def sample(messages: tuple[Message, ...] = QUESTION, loss_mask: tuple[bool, ...] = (True, True)) -> dict[str, Any]:
    """A line of samples.jsonl as a run writes it."""
    trajectory = Trajectory(
        problem_id="p",
        prompt_tokens=(1,),
        tokens=(5,) * len(loss_mask),
        loss_mask=loss_mask,
        logprobs=(-0.1,) * len(loss_mask),
        temperature=1.0,
        weight_versions=(),
        reward_parts={},
        reward=1.0,
        text=ANSWER,
        finish_reason="stop",
    )
    problem = Problem(problem_id="p", messages=messages, answer="7")
    return sample_row(1, TrajectoryGroup(problem=problem, trajectories=(trajectory,)), trajectory)


def test_a_prompt_is_what_the_user_says(tmp_path: Path) -> None:
    (one,) = read(write_lines(tmp_path / "data.jsonl", {"prompt": "1 + 1?", "completion": "2"}))
    assert one.example_id == "learner.data: line 1"
    assert (one.messages, one.completions) == ((Message(role="user", content="1 + 1?"),), ("2",))


def test_messages_are_taken_as_they_are(tmp_path: Path) -> None:
    turns = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1 + 1?"}]
    (one,) = read(write_lines(tmp_path / "data.jsonl", "", {"messages": turns, "completion": "2"}))
    assert one.example_id == "learner.data: line 2"
    assert [message.role for message in one.messages] == ["system", "user"]


def test_of_a_run_the_samples_count_that_were_rewarded_and_ended_by_themselves(tmp_path: Path) -> None:
    sample = {"prompt": "1 + 1?", "completion": "2", "reward": 1.0, "finish_reason": "stop"}
    write_lines(
        tmp_path / "samples.jsonl",
        sample,
        sample | {"reward": 0.5},
        sample | {"finish_reason": "length"},
        sample | {"reward": None},
    )
    first, second = (f"learner.data: line {number}" for number in (1, 2))
    assert [one.example_id for one in read(tmp_path)] == [first]
    assert [one.example_id for one in read(tmp_path, data_reward_min=0.5)] == [first, second]


def test_a_sample_is_learned_after_the_very_messages_that_it_answered(tmp_path: Path) -> None:
    messages = (Message(role="system", content="Be brief."), Message(role="user", content="1 + 1?"))
    write_lines(tmp_path / "samples.jsonl", sample(messages))
    assert [one.messages for one in read(tmp_path)] == [messages]


def test_samples_with_replies_or_without_a_prompt_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    replied, unknown = sample(loss_mask=(True, False, True)), sample(())
    path = write_lines(tmp_path / "samples.jsonl", replied, sample(), replied, unknown)
    assert [one.example_id for one in read(tmp_path)] == ["learner.data: line 2"]
    assert f"{path}: 2 of 4 samples are left out, since they hold tokens that the policy did not write" in caplog.text
    assert f"{path}: 1 of 4 samples are left out, since their prompts are not known" in caplog.text
    write_lines(path, replied)
    with pytest.raises(ProblemError, match=r"all 1 samples of .* are left out, since they hold tokens"):
        read(tmp_path)


def test_samples_of_an_older_version_are_read_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    row = {name: value for name, value in sample().items() if name not in ("messages", "num_trained_tokens")}
    path = write_lines(tmp_path / "samples.jsonl", row)
    assert len(read(tmp_path)) == 1
    assert f"{path}: 1 of 1 samples are of an older version" in caplog.text


def test_a_run_without_accepted_samples_says_which_reward_was_the_largest(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "samples.jsonl", {"prompt": "?", "completion": "!", "reward": 0.25})
    with pytest.raises(ProblemError, match=r"the largest reward is 0\.25, learner\.data_reward_min=1"):
        read(path)


def test_a_file_without_lines_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text("\n")
    with pytest.raises(ProblemError, match=r"learner\.data: .*empty\.jsonl has no lines$"):
        read(path)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "line 1 of .* is no JSON"),
        ("[" * 100_000, "line 1 of .* is no JSON"),
        ("[1]", "line 1 of .* is no object"),
        ({"prompt": "?"}, r"has no text under completion; it has \['prompt'\]"),
        ({"completion": "!"}, "has neither a text under prompt nor messages"),
        ({"messages": [{"role": "user"}], "completion": "!"}, "has neither a text under prompt nor messages"),
        ({"messages": [], "completion": "!"}, "has neither a text under prompt nor messages"),
    ],
)
def test_a_broken_line_is_named(line: Mapping[str, Any] | str, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(ProblemError, match=complaint):
        read(write_lines(tmp_path / "data.jsonl", line))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ProblemError, match=r"learner\.data: .*nothing\.jsonl cannot be read"):
        read(tmp_path / "nothing.jsonl")


def test_learner_and_data_must_go_together() -> None:
    assert read_dataset(LearnerSettings(), holds_out=True) is None
    with pytest.raises(ConfigError, match=r"learner\.data: must be given"):
        read_dataset(LearnerSettings(preset="sft"), holds_out=True)
    settings: Any = LearnerSettings
    for key in ("data", "data_held_out"):
        text = rf"learner\.{key}=x is for .* and classifier; learner=dapo samples its own"
        with pytest.raises(ConfigError, match=text):
            read_dataset(settings(**{key: "x"}), holds_out=True)


def test_a_tenth_of_the_prompts_is_held_out_with_all_of_their_completions(tmp_path: Path) -> None:
    rows = [{"prompt": f"{number} + 1?", "completion": text} for number in range(200) for text in ("a", "b")]
    found = split(write_lines(tmp_path / "data.jsonl", *rows))
    trained, held_out = ({one.messages for one in side} for side in (found.train, found.held_out))
    assert not trained & held_out
    assert (len(found.train), len(found.held_out)) == (2 * len(trained), 2 * len(held_out))
    assert 10 <= len(held_out) <= 30


def test_without_evaluations_all_lines_are_trained_on(tmp_path: Path) -> None:
    rows = [{"prompt": f"{number} + 1?", "completion": "a"} for number in range(50)]
    found = split(write_lines(tmp_path / "data.jsonl", *rows), holds_out=False)
    assert (len(found.train), len(found.held_out)) == (50, 0)


def test_a_file_of_held_out_lines_leaves_all_of_the_others_for_training(tmp_path: Path) -> None:
    data = write_lines(tmp_path / "a.jsonl", *({"prompt": str(number), "completion": "!"} for number in range(50)))
    other = write_lines(tmp_path / "b.jsonl", {"prompt": "3", "completion": "?"})
    found = split(data, data_held_out=str(other))
    assert (len(found.train), [one.completions for one in found.held_out]) == (50, [("?",)])
    write_lines(other, "{")
    with pytest.raises(ProblemError, match=r"learner\.data_held_out: line 1 of .*b\.jsonl is no JSON"):
        split(data, data_held_out=str(other))


def test_held_out_lines_are_not_taken_where_nothing_is_evaluated(tmp_path: Path) -> None:
    data = write_lines(tmp_path / "a.jsonl", {"prompt": "?", "completion": "!"})
    with pytest.raises(
        ConfigError, match=r"learner\.data_held_out=.*: trainer\.evaluate_problems=0 turns evaluation off"
    ):
        split(data, holds_out=False, data_held_out=str(data))


def test_lines_of_which_none_or_all_are_held_out_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"prompt": f"{number} + 1?", "completion": "!"} for number in range(100)]
    found = split(write_lines(tmp_path / "many.jsonl", *rows))
    (trained, held_out) = (
        {"prompt": side[0].messages[0].content, "completion": "!"} for side in (found.train, found.held_out)
    )
    with pytest.raises(ProblemError, match=r"all 1 lines of .* are held out; name lines to evaluate on with"):
        split(write_lines(tmp_path / "one.jsonl", held_out))
    assert split(write_lines(tmp_path / "one.jsonl", trained)).held_out == []
    assert "none of the 1 lines" in caplog.text


def test_a_completion_follows_the_prompt_as_the_model_itself_would_write_it(nano: SharedModel) -> None:
    (one,) = to_group(example("a", ANSWER), nano.tokenizer, 512).trajectories
    assert one.prompt_tokens == nano.tokenizer.encode_chat(QUESTION)
    assert nano.tokenizer.decode(one.tokens) == ANSWER
    assert [token for token in one.tokens if token in nano.tokenizer.eos_token_ids] == [one.tokens[-1]]
    assert one.loss_mask == (True,) * len(one.tokens)


def test_a_demonstration_longer_than_the_context_is_named(nano: SharedModel) -> None:
    with pytest.raises(ProblemError, match=r"line 3 has \d+ \+ \d+ tokens, the context of the model is 20"):
        to_group(example("line 3", ANSWER), nano.tokenizer, 20)


def update(learner: Learner, problems: list[Example], model: SharedModel, step: int) -> UpdateReport:
    groups = [to_group(problem, model.tokenizer, 512) for problem in problems]
    (*_, report) = learner.update(groups, step=step, max_tokens=1)
    assert isinstance(report, UpdateReport)
    return report


def test_the_loss_is_the_mean_negative_log_likelihood_and_falls(nano: SharedModel, streams: DeviceStreams) -> None:
    texts = (ANSWER, "#### 9")
    problems = [example(text, text) for text in texts]
    start = make_adapter(initial_arrays(nano.targets, 4, mx.random.key(0)), version=0, rank=4, alpha=8.0)
    settings = LearnerSettings(preset="sft", learning_rate=5e-3, warmup_steps=0)
    learner = Learner(nano, streams, settings, start=start, total_steps=5, seed=0)
    reports = [update(learner, problems, nano, step) for step in range(5)]
    logprobs: list[float] = []
    for problem in problems:
        (one,) = to_group(problem, nano.tokenizer, 512).trajectories
        row = mx.array([*one.prompt_tokens, *one.tokens])
        logits = nano.base(row[None, :-1])[0].astype(mx.float32)
        every = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        first = len(one.prompt_tokens) - 1
        logprobs += [every[first + place, token].item() for place, token in enumerate(one.tokens)]
    expected = -sum(logprobs) / len(logprobs)
    assert reports[0].loss == pytest.approx(expected, abs=1e-5)
    assert reports[-1].loss < 0.7 * reports[0].loss


def test_the_loss_of_held_out_lines_is_that_of_training_before_the_first_update(
    nano: SharedModel, streams: DeviceStreams
) -> None:
    texts = (ANSWER, "#### 9", "#### 12")
    problems = [example(text, text) for text in texts]
    groups = [to_group(problem, nano.tokenizer, 512) for problem in problems]
    start = make_adapter(initial_arrays(nano.targets, 4, mx.random.key(0)), version=0, rank=4, alpha=8.0, dropout=0.5)
    settings = LearnerSettings(preset="sft", learning_rate=5e-3, warmup_steps=0, micro_batch_tokens=64)
    learner = Learner(nano, streams, settings, start=start, total_steps=5, seed=0)
    (*sums, before) = learner.losses(groups)
    assert before.num_completions == 3
    assert before.num_tokens == sum(len(group.trajectories[0].tokens) for group in groups)
    assert before.mean == pytest.approx(
        update(learner, problems, nano, 0).loss, abs=1e-5
    )  # B is 0: dropout changes nothing
    assert [one.num_completions for one in sums] == sorted(one.num_completions for one in sums)
    (*_, after), (*_, again) = learner.losses(groups), learner.losses(groups)
    assert before.mean > after.mean == again.mean


def test_masked_tokens_are_not_in_the_loss(nano: SharedModel, streams: DeviceStreams) -> None:
    group = to_group(example("a", ANSWER), nano.tokenizer, 512)
    (whole,) = group.trajectories
    first = replace(whole, loss_mask=(True,) + (False,) * (len(whole.tokens) - 1))
    start = make_adapter(initial_arrays(nano.targets, 4, mx.random.key(0)), version=0, rank=4, alpha=8.0)
    learner = Learner(nano, streams, LearnerSettings(preset="sft"), start=start, total_steps=1, seed=0)
    (*_, all_tokens), (*_, one_token) = (
        learner.losses([replace(group, trajectories=(one,))]) for one in (whole, first)
    )
    assert (all_tokens.num_tokens, one_token.num_tokens) == (len(whole.tokens), 1)
    assert 0 < one_token.nats < all_tokens.nats


def test_wrong_documents_may_be_numbered(tmp_path: Path) -> None:
    pair = {"anchor": "a", "positive": "b"}
    wrong = {f"negative_{number}": str(number) for number in (10, 2, 1)}
    rows: list[Mapping[str, Any]] = [pair, pair | {"negative": "0"}, pair | wrong, pair | {"negatives": ["4", "5"]}]
    found = read_dataset(
        LearnerSettings(trains="embedding", data=str(write_lines(tmp_path / "data.jsonl", *rows))), holds_out=False
    )
    assert found is not None
    assert [one.completions[1:] for one in found.train] == [(), ("0",), ("1", "2", "10"), ("4", "5")]
    assert [one.rewards for one in found.train[2:]] == [(1.0, 0.0, 0.0, 0.0), (1.0, 0.0, 0.0)]


@pytest.mark.parametrize(
    ("trains", "row", "named"),
    [
        ("embedding", {"anchor": "a", "positive": "b", "negative_0": "c"}, "negative_0"),
        ("embedding", {"anchor": "a", "positive": "b", "score": 0.5}, "score"),
        ("embedding", {"anchor": "a", "positive": "b", "negative": "c", "negatives": ["d"]}, "negatives"),
        ("classifier", {"text": "a", "label": "b", "text_pair": "c"}, "text_pair"),
        ("classifier", {"text": "a", "label": "b", "labels": ["c"]}, "label"),
    ],
)
def test_other_fields_of_texts_are_refused_by_name(
    tmp_path: Path, trains: Any, row: Mapping[str, Any], named: str
) -> None:
    path = write_lines(tmp_path / "data.jsonl", row)
    with pytest.raises(ProblemError, match=f"line 1 of .* has a field '{named}', which is not read"):
        read_dataset(LearnerSettings(trains=trains, data=str(path)), holds_out=False)
    kept = {field: value for field, value in row.items() if field != named}
    path = write_lines(path, kept)
    assert read_dataset(LearnerSettings(trains=trains, data=str(path)), holds_out=False) is not None
