"""What a reward model's scores say about held-out pairs."""

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from parallm.trainer.evaluators import PairEvaluator


class ScoringDevice:
    """Has scored already."""

    def __init__(self, scores: list[float]) -> None:
        self._scores = scores

    def score(self, _units: object) -> "Future[list[float]]":
        done: Future[list[float]] = Future()
        done.set_result(self._scores)
        return done


def test_few_small_margins_do_not_say_on_which_side_of_0_the_mean_is() -> None:
    scores = [0.03, 0.01, 0.02, 0.01, 0.03, 0.02, 0.02, 0.01]
    pairs: Any = [SimpleNamespace(rewards=(0.0, 0.0))] * 4
    device: Any = ScoringDevice(scores)
    learner: Any = SimpleNamespace()
    evaluator = PairEvaluator(device=device, learner=learner, pairs=pairs, center=0.0)
    margin = asyncio.run(evaluator.evaluate(0, 0, "policy", lambda *_: None)).report.margin
    assert margin is not None
    assert margin.low < 0 < margin.mean < margin.high
