"""Tokens that the policy did not sample are context and nothing else."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import get_args

import pytest

from parallm.device.streams import DeviceStreams
from parallm.learner.learner import Learner
from parallm.learner.settings import LearnerSettings
from parallm.model.adapters.adapter import Adapter
from parallm.model.shared_model import SharedModel
from parallm.reports import UpdateReport
from parallm.types import Trajectory, TrajectoryGroup

PRESETS = get_args(LearnerSettings.__annotations__["preset"])
REPLY = slice(4, 9)


@pytest.fixture
def update(
    load_tiny: Callable[[str], SharedModel], streams: DeviceStreams, make_start: Callable[..., Adapter]
) -> Callable[..., tuple[Adapter, UpdateReport]]:
    """One update from the same start: the new adapter and the report."""

    def run(groups: Sequence[TrajectoryGroup], preset: str = "dapo") -> tuple[Adapter, UpdateReport]:
        model = load_tiny("qwen3")
        settings = LearnerSettings(preset=preset, warmup_steps=0, learning_rate=1e-3)  # type: ignore[arg-type]
        learner = Learner(model, streams, settings, start=make_start(model), total_steps=10, seed=0)
        report = list(learner.update(groups, step=0, max_tokens=40))[-1]
        assert isinstance(report, UpdateReport)
        return learner.adapter, report

    return run


def with_reply(group: TrajectoryGroup, **values: Sequence[float]) -> TrajectoryGroup:
    """The group with tokens 4 to 8 of its first trajectory marked as a reply, and some values replaced there."""

    def put(old: Sequence[float], new: Sequence[float]) -> tuple[float, ...]:
        return (*old[: REPLY.start], *new, *old[REPLY.stop :])

    first: Trajectory = group.trajectories[0]
    changed = {name: put(getattr(first, name), new) for name, new in values.items()}
    mask = put(first.loss_mask, (False,) * 5)
    return replace(group, trajectories=(replace(first, loss_mask=mask, **changed), *group.trajectories[1:]))  # type: ignore[arg-type]


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("logprob", [-1.0, -30.0, 5.0])
def test_log_probs_of_reply_tokens_change_nothing(
    make_group: Callable[..., TrajectoryGroup],
    update: Callable[..., tuple[Adapter, UpdateReport]],
    preset: str,
    logprob: float,
) -> None:
    group = make_group(1, (14, 3, 6), (1.0, 0.0, 0.25))
    zero, zero_report = update([with_reply(group, logprobs=(0.0,) * 5)], preset)
    other, other_report = update([with_reply(group, logprobs=(logprob,) * 5)], preset)
    assert zero_report.skipped is None
    assert zero.digest == other.digest
    assert replace(zero_report, seconds=0) == replace(other_report, seconds=0)
    assert zero_report.num_tokens == 14 - 6 + 2 + 5  # five of the reply, and one more masked in each row


def test_tokens_of_a_reply_are_still_read(
    make_group: Callable[..., TrajectoryGroup], update: Callable[..., tuple[Adapter, UpdateReport]]
) -> None:
    group = make_group(1, (14, 3, 6), (1.0, 0.0, 0.25))
    one, other = (update([with_reply(group, tokens=tokens)])[0] for tokens in ((9,) * 5, (11,) * 5))
    assert one.digest != other.digest


@pytest.mark.parametrize("preset", PRESETS)
def test_a_trajectory_without_a_trained_token_moves_nothing_but_the_mean(
    make_group: Callable[..., TrajectoryGroup], update: Callable[..., tuple[Adapter, UpdateReport]], preset: str
) -> None:
    group = make_group(1, (12, 3, 6), (1.0, 0.0, 0.5))
    masked = replace(group.trajectories[0], loss_mask=(False,) * 12)
    group = replace(group, trajectories=(masked, *group.trajectories[1:]))
    adapter, report = update([group], preset)
    other = replace(masked, tokens=tuple(reversed(masked.tokens)), logprobs=(0.0,) * 12)
    assert update([replace(group, trajectories=(other, *group.trajectories[1:]))], preset)[0].digest == adapter.digest
    assert (report.skipped, report.num_tokens) == (None, 2 + 5)


def test_parity_counts_only_what_the_policy_sampled(
    make_group: Callable[..., TrajectoryGroup], update: Callable[..., tuple[Adapter, UpdateReport]]
) -> None:
    group = with_reply(make_group(1, (14, 3), (1.0, 0.0), logprob=-6.0), logprobs=(1000.0,) * 5)
    _, report = update([group])
    assert report.parity.num_tokens == 14 - 6 + 2
    assert report.parity.max_abs < 100
