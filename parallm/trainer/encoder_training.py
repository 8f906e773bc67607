"""Parts of a run that trains an adapter to make vectors or labels of texts. `run/build_trainer.py` calls it."""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx

from parallm.device.streams import DeviceStreams
from parallm.errors import AdapterError, ProblemError
from parallm.learner.datasets import Dataset, Example
from parallm.learner.settings import LearnerSettings
from parallm.model.adapters.adapter import HEAD, Adapter, with_arrays
from parallm.model.shared_model import SharedModel
from parallm.seeds import mix
from parallm.tasks.encoder import Encoder
from parallm.tasks.encoder_learner import ClassifierLearner, EmbeddingLearner, EncoderLearner
from parallm.trainer.context import TrainerContext
from parallm.trainer.encoder_evaluators import EncoderEvaluator
from parallm.trainer.settings import TrainerSettings
from parallm.types import Problem, TaskSpec, Trajectory, TrajectoryGroup


class Settings(Protocol):
    """Parts of a run's configuration that are read here."""

    @property
    def learner(self) -> LearnerSettings: ...

    @property
    def trainer(self) -> TrainerSettings: ...

    @property
    def seed(self) -> int: ...


def encoder_context(
    context: TrainerContext,
    data: Dataset,
    settings: Settings,
    *,
    encoder: Encoder,
    model: SharedModel,
    streams: DeviceStreams,
    start: Adapter,
) -> tuple[TrainerContext, list[TrajectoryGroup]]:
    """`context` for training an adapter with a task that starts from `start`, and the groups to train on.

    Its versions are in the engine's table, so requests find them by name. Runs on the device thread. Raises
    AdapterError, ProblemError.
    """
    is_embedding = settings.learner.trains == "embedding"
    if is_embedding:
        start = _for_vectors(start, settings.learner, model, encoder)
    else:
        start = _for_labels(start, [*data.train, *data.held_out], model, settings.seed)
    kind: type[EncoderLearner] = EmbeddingLearner if is_embedding else ClassifierLearner
    steps = settings.trainer.steps
    learner = kind(model, streams, settings.learner, start=start, total_steps=steps, seed=settings.seed)
    if start.version > 0 and context.adapters.resolve(start.name) is None:
        context.adapters.publish(start)
    spec = learner.spec
    encoder.begin(start.name, spec)
    train = [_group(example, spec, encoder, model) for example in data.train]
    held_out = [
        _group(example, spec, encoder, model) for example in data.held_out[: settings.trainer.evaluate_problems]
    ]
    evaluator = EncoderEvaluator(device=context.device, learner=learner, groups=held_out) if held_out else None
    return dataclasses.replace(context, learner=learner, evaluator=evaluator), train


def _for_vectors(start: Adapter, settings: LearnerSettings, model: SharedModel, encoder: Encoder) -> Adapter:
    _refuse(start, "embed")
    size, too_large = _hidden_size(model), [size for size in settings.dimensions if size > _hidden_size(model)]
    if too_large:
        raise ProblemError(f"learner.dimensions: {too_large[0]} is more than the {size} numbers of a hidden state")
    dimensions = tuple(sorted({*settings.dimensions, size})) if settings.dimensions else None
    spec = TaskSpec(
        pooling=(settings.pooling,),
        dimensions=dimensions,
        end_token=encoder.appended_token,
        source="learner=embedding",
    )
    return dataclasses.replace(start, task=spec)


def _for_labels(start: Adapter, examples: Sequence[Example], model: SharedModel, seed: int) -> Adapter:
    _refuse(start, "score", "classify")
    kinds = {(example.is_multi_label, example.is_score) for example in examples}
    if len(kinds) > 1:
        raise ProblemError(
            "learner.data: some lines have a name under label, others a number or labels; give all lines the same form"
        )
    [(is_multi_label, is_score)] = kinds
    labels = tuple(sorted({label for example in examples for label in example.completions}))
    if start.task is not None:
        given, trained = _form_of_data(is_multi_label=is_multi_label, is_score=is_score), _form_of(start.task)
        if given != trained:
            raise ProblemError(
                f"learner.data: lines have {given}, and model.adapter was trained for {trained}; give all lines that "
                "form, or start without model.adapter"
            )
        if unknown := [label for label in labels if label not in start.task.labels]:
            raise ProblemError(
                f"learner.data: the label {unknown[0][:100]!r} is none of model.adapter, which has "
                f"{', '.join(start.task.labels)[:200]}; start without model.adapter for other labels"
            )
        return start
    if len(labels) < 2 and not is_score:
        raise ProblemError(f"learner.data: all lines have the label {labels[:1]}; a classifier needs two or more")
    spec = TaskSpec(
        task="score" if is_score else "classify",
        pooling=("cls" if model.is_encoder else "last",),
        activation="sigmoid" if is_multi_label or is_score else "softmax",
        labels=labels,
        normalizes=False,
        source="learner=classifier",
    )
    # small, so that training starts from chance, and not zero, so that LoRA has a gradient
    deviation = 1 / (_hidden_size(model) + 1) ** 0.5
    head_LH = deviation * mx.random.normal((len(labels), _hidden_size(model)), key=mx.random.key(mix(seed, 1)))
    return dataclasses.replace(with_arrays(start, {**start.arrays, HEAD: head_LH}, version=start.version), task=spec)


def _form_of_data(*, is_multi_label: bool, is_score: bool) -> str:
    if is_score:
        return "a number under label"
    return "any number of names under labels" if is_multi_label else "one name under label"


def _form_of(spec: TaskSpec) -> str:
    """The form of lines that the loss of a classifier fits."""
    if spec.activation == "none" and spec.task != "score":
        return "several numbers, for which there is no loss here"
    return _form_of_data(is_multi_label=spec.activation == "sigmoid", is_score=spec.task == "score")


def _refuse(start: Adapter, *tasks: str) -> None:
    if start.spec is not None and start.task is None:
        raise AdapterError("model.adapter is a reward model; train it further with learner=reward_model")
    if start.task is not None and start.task.task not in tasks:
        raise AdapterError(
            f"model.adapter is for the task {start.task.task}, and this run trains for {' or '.join(tasks)}; leave "
            "model.adapter out"
        )


def _hidden_size(model: SharedModel) -> int:
    if model.trunk_owner is None and not model.is_encoder:
        raise AdapterError(f"{model.name} cannot be split into trunk and head, so no hidden states can be pooled")
    return int(model.hidden(mx.zeros((1, 1), mx.int32), model.make_cache(), None).shape[-1])


def _group(example: Example, spec: TaskSpec, encoder: Encoder, model: SharedModel) -> TrajectoryGroup:
    """Raises ProblemError for a text without tokens, or longer than the context."""
    texts = [str(example.messages[0].content)]
    if spec.task == "embed":
        texts += example.completions
    parts = dict(zip(example.completions, example.rewards, strict=True)) if spec.task != "embed" else {}
    trajectories = []
    for text in texts:
        tokens = encoder.encode_text(text, spec)
        if not 0 < len(tokens) <= model.max_context:
            raise ProblemError(
                f"{example.example_id} has a text of {len(tokens)} tokens, the context of the model is "
                f"{model.max_context}; shorten it or leave it out"
            )
        trajectories.append(
            Trajectory(
                problem_id=example.example_id,
                prompt_tokens=(),
                tokens=tokens,
                loss_mask=(True,) * len(tokens),
                logprobs=(0.0,) * len(tokens),
                temperature=1.0,
                weight_versions=(),  # no version sampled it
                reward_parts=parts,
                reward=0.0,
                text=text,
                finish_reason="stop",
            )
        )
    answer = example.completions[0] if example.completions else ""
    problem = Problem(problem_id=example.example_id, messages=example.messages, answer=answer)
    return TrajectoryGroup(problem=problem, trajectories=tuple(trajectories))
