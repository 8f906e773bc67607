"""Training of adapters that make vectors of texts, or labels: the next version from texts that belong together.

The trainer drives an `EncoderLearner` on the device thread, like `Learner`. Texts are computed in passes, each text
of a step once. What the loss needs is the numbers of all texts: with several passes they are computed first without a
gradient, and then pass by pass with that of the loss (https://arxiv.org/abs/2101.06983), which is the gradient of one
large pass, dropout included.
Axes: S texts, P pairs, C candidate documents, D numbers of a text, L labels, N numbers of the adapter.
"""

import math
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence

import mlx.core as mx
import numpy as np

from parallm.learner.adapter_learner import AdapterLearner, with_change
from parallm.learner.faults import Faults
from parallm.learner.optimizer import Arrays, learning_rate
from parallm.learner.passes.batch import make_passes
from parallm.learner.passes.recomputation import checkpointed
from parallm.model.adapters.adapter import HEAD
from parallm.model.lora.dora import lora_scaling
from parallm.model.lora.selector import training_lora
from parallm.model.lora.single import LoraScaling, single_lora
from parallm.model.task_head import Head
from parallm.reports import PairsReport, UpdateReport
from parallm.tasks.losses import binary_cross_entropy, cosines, cross_entropy, matryoshka
from parallm.tasks.passes import Passes, Row
from parallm.types import TaskSpec, TrajectoryGroup


class EncoderLearner(AdapterLearner):
    """Turns texts into the next version of an adapter with a task. All methods run on the device thread."""

    @property
    def spec(self) -> TaskSpec:
        spec = self.adapter.task
        assert spec is not None, "it starts from an adapter with a task"
        return spec

    def update(self, groups: Sequence[TrajectoryGroup], *, step: int, max_tokens: int) -> Iterator[UpdateReport | None]:
        """One optimizer step. Yields after each round of passes, the report last.

        The loss is the mean over the groups of the step. A step with a value that is not finite changes nothing.
        `max_tokens` has no meaning here.
        """
        began = time.perf_counter()
        faults, rows = Faults(groups), rows_of(groups)
        scaling = lora_scaling(self.adapter, self._model)
        rounds = list(self._rounds_of(make_passes([len(row) for row in rows], self._budget, self._streams.width), step))
        gradients: list[Arrays] = []
        if len(rounds) == 1:
            indices, key = rounds[0]
            loss, numbers_SD, gradient = self._whole_gradient(groups, rows, indices, scaling, key)
            gradients.append(gradient)
            yield None
        else:
            parts: list[mx.array] = []
            for indices, key in rounds:
                parts += self._numbers(rows, indices, dict(self.adapter.arrays), scaling, key)
                mx.eval(parts)
                yield None
            numbers_SD = in_order(parts, [indices for indices, _ in rounds])
            loss, share_SD = mx.value_and_grad(lambda given_SD: self.losses(groups, rows, given_SD).sum())(numbers_SD)
            mx.eval(loss, share_SD)
            for indices, key in rounds:
                gradients.append(self._partial_gradient(rows, indices, share_SD, scaling, key))
                yield None
        weight = 1 / len(groups)  # only now: a float16 base would round the gradients of a small share of the loss
        joined = [self.layout.join(gradient) for gradient in gradients]
        optimizer_step = self.compute_step(weight * sum(joined[1:], joined[0]), step)
        norm, mean_loss = float(optimizer_step.norm.item()), weight * float(loss.item())
        if not math.isfinite(mean_loss):
            faults.add("loss")
        elif not math.isfinite(norm):
            faults.add("gradient")
        else:
            self._advance(optimizer_step, step, faults)
        margins = np.array(self.margins(groups, rows, numbers_SD))
        report = UpdateReport(
            step=step,
            version=self.adapter.version,
            loss=mean_loss,
            gradient_norm=norm,
            learning_rate=learning_rate(self._settings, step, self._total_steps),
            num_tokens=sum(map(len, rows)),
            seconds=time.perf_counter() - began,
            skipped=faults.message,
            fault=faults.kind,
            pairs=PairsReport(accuracy=float((margins > 0).mean()), margin=float(margins.mean())),
        )
        yield with_change(report, optimizer_step)

    def units(self, rows: Sequence[Row]) -> Iterator[np.ndarray | None]:
        """Numbers (S, D) by the newest version: vectors of any length, or logits. Yields None before them."""
        scaling = lora_scaling(self.adapter, self._model)
        passes = self._passes(dict(self.adapter.arrays), scaling, None)
        yield from passes.units(rows, ())

    @abstractmethod
    def losses(self, groups: Sequence[TrajectoryGroup], rows: Sequence[Row], numbers_SD: mx.array) -> mx.array:
        """The loss of each group, where `numbers_SD` are those of `rows`."""

    @abstractmethod
    def margins(self, groups: Sequence[TrajectoryGroup], rows: Sequence[Row], numbers_SD: mx.array) -> mx.array:
        """The score of what is right minus that of the best of what is wrong, for each group."""

    def _whole_gradient(
        self,
        groups: Sequence[TrajectoryGroup],
        rows: Sequence[Row],
        passes: Sequence[Sequence[int]],
        scaling: LoraScaling,
        key: mx.array,
    ) -> tuple[mx.array, mx.array, Arrays]:
        """Summed loss, numbers (S, D) and gradient of texts that fit one round. Evaluated."""

        def loss_of(traced: Arrays) -> tuple[mx.array, mx.array]:
            parts = self._numbers(rows, passes, traced, scaling, key)
            numbers_SD = in_order(parts, [passes])
            return self.losses(groups, rows, numbers_SD).sum(), numbers_SD

        (loss, numbers_SD), gradient = mx.value_and_grad(loss_of)(dict(self.adapter.arrays))
        mx.eval(loss, numbers_SD, gradient)
        return loss, numbers_SD, gradient

    def _partial_gradient(
        self,
        rows: Sequence[Row],
        passes: Sequence[Sequence[int]],
        share_SD: mx.array,
        scaling: LoraScaling,
        key: mx.array,
    ) -> Arrays:
        """Gradient of the summed loss through the texts of one round, whose own gradient is in `share_SD`."""

        def surrogate(traced: Arrays) -> mx.array:
            parts = self._numbers(rows, passes, traced, scaling, key)
            sums = [
                (part_SD * share_SD[mx.array(indices)]).sum()
                for part_SD, indices in zip(parts, filter(None, passes), strict=True)
            ]
            return sum(sums[1:], sums[0])

        gradient: Arrays = mx.grad(surrogate)(dict(self.adapter.arrays))
        mx.eval(gradient)
        return gradient

    def _numbers(
        self, rows: Sequence[Row], passes: Sequence[Sequence[int]], arrays: Arrays, scaling: LoraScaling, key: mx.array
    ) -> list[mx.array]:
        """Numbers (S, D) of the texts of each pass. The same key drops the same numbers again."""
        computed = self._passes(arrays, scaling, key)
        with checkpointed(self._model, self._checkpoints):
            return self._streams.run(lambda indices: computed.numbers(rows, indices), list(filter(None, passes)))

    def _passes(self, arrays: Arrays, scaling: LoraScaling, key: mx.array | None) -> Passes:
        lora = single_lora(arrays, scaling)
        return Passes(
            model=self._model,
            streams=self._streams,
            spec=self.spec,
            lora=lora if key is None else training_lora(lora, self.adapter.dropout, key),
            head=Head(weight_LH=arrays[HEAD]) if HEAD in arrays else None,
            packs=self._packs,
            budget=self._budget,
        )


class EmbeddingLearner(EncoderLearner):
    """A group's first text is the anchor, the second its document, and all others are documents that are not.

    The documents of all other groups are wrong ones, too, unless they are copies of a right one.
    """

    def losses(self, groups: Sequence[TrajectoryGroup], rows: Sequence[Row], numbers_SD: mx.array) -> mx.array:
        anchors_PD, documents_CD = _chosen(groups, rows, numbers_SD)
        scale, dimensions = self._settings.scale, self.spec.dimensions or ()
        return matryoshka(anchors_PD, documents_CD, copies(groups), scale=scale, dimensions=dimensions)

    def margins(self, groups: Sequence[TrajectoryGroup], rows: Sequence[Row], numbers_SD: mx.array) -> mx.array:
        cosines_PC = cosines(*_chosen(groups, rows, numbers_SD))
        wrong_PC = mx.where(copies(groups) | mx.eye(*cosines_PC.shape).astype(mx.bool_), -1.0, cosines_PC)
        return mx.diagonal(cosines_PC) - wrong_PC.max(axis=1)


class ClassifierLearner(EncoderLearner):
    """A group is one text; the parts of its reward are its labels with their targets from 0 to 1."""

    def losses(self, groups: Sequence[TrajectoryGroup], rows: Sequence[Row], numbers_SD: mx.array) -> mx.array:
        logits_NL = numbers_SD[_indices(rows, [text_of(group, 0) for group in groups])]
        targets_NL = mx.array(targets(groups, self.spec.labels))
        if self.spec.activation == "softmax":
            return cross_entropy(logits_NL, targets_NL.argmax(axis=1))
        return binary_cross_entropy(logits_NL, targets_NL)

    def margins(self, groups: Sequence[TrajectoryGroup], rows: Sequence[Row], numbers_SD: mx.array) -> mx.array:
        logits_NL = numbers_SD[_indices(rows, [text_of(group, 0) for group in groups])]
        is_right_NL = mx.array(targets(groups, self.spec.labels) >= 0.5)
        if self.spec.activation == "softmax":
            right_N = mx.where(is_right_NL, logits_NL, -mx.inf).max(axis=1)
            return right_N - mx.where(is_right_NL, -mx.inf, logits_NL).max(axis=1)
        return mx.where(is_right_NL, logits_NL, -logits_NL).min(axis=1)


def rows_of(groups: Sequence[TrajectoryGroup]) -> list[Row]:
    """Every text of the groups once."""
    return list(dict.fromkeys(tuple(one.tokens) for group in groups for one in group.trajectories))


def text_of(group: TrajectoryGroup, index: int) -> Row:
    """The token ids of a text of a group."""
    return tuple(group.trajectories[index].tokens)


def targets(groups: Sequence[TrajectoryGroup], labels: Sequence[str]) -> np.ndarray:
    """Targets (N, L), float32."""
    return np.array(
        [[group.trajectories[0].reward_parts.get(label, 0.0) for label in labels] for group in groups], "f4"
    )


def documents_of(groups: Sequence[TrajectoryGroup]) -> list[Row]:
    """Documents in the order of the columns: each group's own, then its negatives."""
    own = [text_of(group, 1) for group in groups]
    return own + [tuple(negative.tokens) for group in groups for negative in group.trajectories[2:]]


def copies(groups: Sequence[TrajectoryGroup]) -> mx.array:
    """Documents (P, C) that are right for an anchor and stand in another column than its own, bool."""
    right: dict[Row, set[Row]] = {}
    for group in groups:
        right.setdefault(text_of(group, 0), set()).add(text_of(group, 1))
    documents = documents_of(groups)
    rights = [right[text_of(group, 0)] for group in groups]
    is_right_PC = [[document in own for document in documents] for own in rights]
    is_right_PC = [
        [is_right and row != column for column, is_right in enumerate(line)] for row, line in enumerate(is_right_PC)
    ]
    return mx.array(is_right_PC)


def _chosen(groups: Sequence[TrajectoryGroup], rows: Sequence[Row], numbers_SD: mx.array) -> tuple[mx.array, mx.array]:
    """Vectors of the anchors (P, D) and of the documents (C, D)."""
    anchors = [text_of(group, 0) for group in groups]
    return numbers_SD[_indices(rows, anchors)], numbers_SD[_indices(rows, documents_of(groups))]


def _indices(rows: Sequence[Row], chosen: Sequence[Row]) -> mx.array:
    places = {row: index for index, row in enumerate(rows)}
    return mx.array([places[row] for row in chosen])


def in_order(parts: Sequence[mx.array], rounds: Sequence[Sequence[Sequence[int]]]) -> mx.array:
    """Numbers (S, D) in the order of the rows, of parts in the order of their passes."""
    order = [index for passes in rounds for indices in passes for index in indices]
    return mx.concatenate(list(parts))[mx.array(np.argsort(order))]
