"""Evaluators of held-out texts: whether anchors find their documents, and texts their labels.

Axes: P anchors, C documents, N texts, L labels, D numbers of a vector.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from parallm.device.thread import DeviceThread
from parallm.reports import Evaluation, EvaluationReport
from parallm.rollout.confidence_intervals import mean_estimate, share_estimate
from parallm.rollout.evaluation import Progress
from parallm.tasks.encoder import activated, normalized
from parallm.tasks.encoder_learner import EncoderLearner, copies, documents_of, rows_of, targets, text_of
from parallm.types import TrajectoryGroup

DEPTH = 10
"""Documents that an anchor's are looked for among: those with the highest cosines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderEvaluator:
    """Evaluates the newest version on held-out groups."""

    device: DeviceThread
    learner: EncoderLearner
    groups: Sequence[TrajectoryGroup]

    async def evaluate(self, step: int, version: int, model: str, progress: Progress) -> Evaluation:
        """For vectors: the share of anchors whose document is first, MRR@10 (as the reward, too) and nDCG@10.

        For labels: the share of texts that are labeled right, and the macro F1 (as the reward, too). `model` and
        `progress` are unused here.
        """
        rows = rows_of(self.groups)
        numbers_SD = await asyncio.wrap_future(self.device.score(self.learner.units(rows)))
        assert numbers_SD is not None, "encoding ends with the numbers"
        places = {row: index for index, row in enumerate(rows)}
        first_ND = numbers_SD[[places[text_of(group, 0)] for group in self.groups]]
        if self.learner.spec.task == "embed":
            documents_CD = numbers_SD[[places[row] for row in documents_of(self.groups)]]
            ranks_P = own_ranks(first_ND, documents_CD, np.array(copies(self.groups)))
            is_right = ranks_P == 0
            parts = {f"mrr@{DEPTH}": _gains(1 / (1 + ranks_P), ranks_P)}
            parts[f"ndcg@{DEPTH}"] = _gains(1 / np.log2(2 + ranks_P), ranks_P)
        else:
            labels = self.learner.spec.labels
            wanted_NL = targets(self.groups, labels) >= 0.5
            found_NL = _labels(first_ND, is_single=self.learner.spec.activation == "softmax")
            is_right = (wanted_NL == found_NL).all(axis=1)
            parts = {"f1": f1_scores(wanted_NL, found_NL)}
        accuracy = share_estimate(int(is_right.sum()), len(is_right))
        means = {name: mean_estimate(values) for name, values in parts.items()}
        report = EvaluationReport(
            step=step,
            version=version,
            num_problems=len(self.groups),
            accuracy=accuracy.mean,
            low=accuracy.low,
            high=accuracy.high,
            reward=next(iter(means.values())),
            reward_parts=means,
        )
        return Evaluation(report=report)


def own_ranks(anchors_PD: np.ndarray, documents_CD: np.ndarray, copies_PC: np.ndarray) -> np.ndarray:
    """How many documents are at least as near to each anchor as its own, (P,). Copies of a right one do not count."""
    cosines_PC = normalized(anchors_PD) @ normalized(documents_CD).T
    own_P1 = np.diagonal(cosines_PC)[:, None]
    is_before_PC = (cosines_PC >= own_P1) & ~copies_PC  # vectors that are all the same find nothing
    ranks_P: np.ndarray = is_before_PC.sum(axis=1) - 1
    return ranks_P


def f1_scores(wanted_NL: np.ndarray, found_NL: np.ndarray) -> list[float]:
    """F1 of each label that is wanted or found at least once."""
    hits_L = 2 * (wanted_NL & found_NL).sum(axis=0)
    sums_L = wanted_NL.sum(axis=0) + found_NL.sum(axis=0)
    return [float(hits / total) for hits, total in zip(hits_L, sums_L, strict=True) if total] or [1.0]


def _gains(gains_P: np.ndarray, ranks_P: np.ndarray) -> list[float]:
    return [float(gain) for gain in np.where(ranks_P < DEPTH, gains_P, 0.0)]


def _labels(logits_NL: np.ndarray, *, is_single: bool) -> np.ndarray:
    if is_single:
        return np.asarray(logits_NL.argmax(axis=1)[:, None] == np.arange(logits_NL.shape[1]))
    return np.asarray(activated(logits_NL, "sigmoid") >= 0.5)
