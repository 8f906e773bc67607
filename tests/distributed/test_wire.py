"""What goes over the wire comes back bit for bit."""

import math
from dataclasses import replace

import numpy as np

from parallm.distributed.wire import (
    pack,
    pack_episodes,
    pack_figures,
    pack_groups,
    unpack,
    unpack_episodes,
    unpack_figures,
    unpack_groups,
)
from parallm.learner.faults import Blame
from parallm.learner.totals import Spread, UpdateTotals
from parallm.rollout.episode import Episode
from parallm.rollout.scoring import Score, ScoredEpisode
from parallm.types import FaultyEpisode, GenerationRequest, SamplingParams, TrajectoryGroup
from tests.learner.conftest import build_group


def test_arrays_come_back_with_their_types_and_shapes() -> None:
    blocks = [np.arange(6, dtype=np.float32).reshape(2, 3), np.zeros(0, np.int32), np.array(True)]
    head, back = unpack(pack({"a": [1, math.inf]}, blocks))
    assert head == {"a": [1, math.inf]}
    assert [(block.dtype, block.shape, block.tolist()) for block in back] == [
        (block.dtype, block.shape, block.tolist()) for block in blocks
    ]


def test_groups_come_back_equal() -> None:
    group = build_group(1, (12, 3, 1), (1.0, 0.1, 1 / 3))
    first, *others = group.trajectories
    first = replace(first, token_advantages=(0.5,) * 12, reward_parts={"correct": 1.0, "é": -0.1}, text="a\ud800")
    fault = FaultyEpisode(kind="score_raised", detail="x", text="y", tokens=(1, 2), traceback="z")
    groups = [replace(group, trajectories=(first, *others), faulty=(fault,), solve_rate=0.5), build_group(2, (), ())]
    assert unpack_groups(pack_groups(groups), [group.problem for group in groups]) == groups
    assert not unpack_groups(pack_groups([]), [])


def test_a_reward_that_is_not_finite_comes_back() -> None:
    group = build_group(1, (2, 2), (math.nan, -math.inf))
    (back,) = unpack_groups(pack_groups([group]), [group.problem])
    assert math.isnan(back.rewards[0])
    assert back.rewards[1] == -math.inf


def test_episodes_come_back_with_all_that_reports_read() -> None:
    problem = build_group(1, (), ()).problem
    request = GenerationRequest(request_id="r", prompt_tokens=(1,), sampling=SamplingParams(max_tokens=4))
    fault = FaultyEpisode(kind="no_tokens", detail="d", text="", tokens=())
    episodes = [
        ScoredEpisode(
            episode=Episode(problem=problem, request=request, index=index, tokens=[3, 4], text="hi"), score=score
        )
        for index, score in enumerate(
            (Score(parts={"correct": 1.0}, reward=1.0), Score(parts={}, reward=math.nan, fault=fault))
        )
    ]
    ((first, second),) = unpack_episodes(pack_episodes([episodes]), [problem], [request])
    assert (first.episode.text, first.episode.tokens, first.episode.index, first.score) == (
        "hi",
        [3, 4],
        0,
        episodes[0].score,
    )
    assert first.score.is_correct
    assert (second.episode.index, second.score.fault) == (1, fault)


def test_figures_come_back_bit_for_bit() -> None:
    totals = UpdateTotals(loss=1 / 3, kl=math.nan, tokens=7, differences=Spread(2, 0.1, 0.0, math.inf))
    blames = [Blame("logprob", 3, "the learner's log-prob of token 0 is nan")]
    back = unpack_figures(pack_figures({5: (totals, blames), 1: (UpdateTotals(), [])}))
    assert list(back) == [5, 1]
    assert repr(back[5]) == repr((totals, blames))
    assert back[1] == (UpdateTotals(), [])


def test_an_empty_group_list_is_not_none() -> None:
    groups: list[TrajectoryGroup] = []
    assert unpack_groups(pack_groups(groups), []) == groups
