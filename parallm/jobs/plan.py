"""What a job was asked for, and what it comes to: hyperparameters that are `auto` get their numbers here."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Auto = Literal["auto"]
Count = Annotated[int, Field(ge=1, le=100_000)]
Factor = Annotated[float, Field(gt=0, le=1e6)]
SUPERVISED_EPOCHS = 3
"""Epochs of a supervised job that names none."""
MAX_BASE = 40
MIN_GROUP = 2


class Hyperparameters(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    batch_size: Auto | Count = "auto"
    """Examples, or problems, of a step."""
    learning_rate_multiplier: Auto | Factor = "auto"
    """Factor of the learning rate that jobs have here."""
    n_epochs: Auto | Count = "auto"


class ReinforcementHyperparameters(Hyperparameters):
    compute_multiplier: Auto | Factor = "auto"
    """Factor of the number of completions of each problem."""
    eval_interval: Auto | Count = "auto"
    """Steps between two evaluations on the validation file."""
    eval_samples: Auto | Count = "auto"
    """Samples of each held-out problem beside the greedy completion."""
    reasoning_effort: Literal["default"] | None = None
    """This server has one effort."""


class TuningRequest(BaseModel):
    """A checked request for a job."""

    model_config = ConfigDict(frozen=True)

    model: str
    training_file: str = ""
    validation_file: str | None = None
    kind: Literal["supervised", "reinforcement"]
    grader: dict[str, Any] | None = None
    hyperparameters: ReinforcementHyperparameters
    suffix: str = ""
    seed: int
    metadata: dict[str, str] | None = None


class Usual(BaseModel):
    """What jobs have here where a request says nothing."""

    problems_per_step: int
    group_size: int
    learning_rate: float
    steps: int
    evaluate_every: int
    evaluate_samples: int


class Plan(BaseModel):
    """The numbers of a job."""

    steps: int
    batch_size: int
    group_size: int
    learning_rate: float
    evaluate_every: int
    evaluate_samples: int
    hyperparameters: dict[str, Any]
    """Those of the request, with numbers for `auto`."""


def make_plan(request: TuningRequest, usual: Usual, num_examples: int) -> Plan:
    """Return the numbers for a training file of `num_examples` examples or problems.

    An `auto` batch is the usual one, at most all examples; `auto` epochs are 3, of a reinforcement job as many as the
    usual number of steps needs.
    """
    given, is_supervised = request.hyperparameters, request.kind == "supervised"
    batch_size = _or(given.batch_size, min(usual.problems_per_step, num_examples))
    needed = SUPERVISED_EPOCHS if is_supervised else max(1, round(usual.steps * batch_size / num_examples))
    epochs = _or(given.n_epochs, needed)
    factor = 1.0 if given.learning_rate_multiplier == "auto" else given.learning_rate_multiplier
    compute = 1.0 if given.compute_multiplier == "auto" else given.compute_multiplier
    resolved: dict[str, Any] = {
        "batch_size": batch_size,
        "learning_rate_multiplier": factor,
        "n_epochs": epochs,
    }
    evaluate_every = _or(given.eval_interval, usual.evaluate_every)
    samples = _or(given.eval_samples, usual.evaluate_samples)
    if not is_supervised:
        resolved |= {"compute_multiplier": compute, "eval_interval": evaluate_every, "eval_samples": samples}
    return Plan(
        steps=math.ceil(num_examples * epochs / batch_size),
        batch_size=batch_size,
        group_size=max(MIN_GROUP, round(usual.group_size * compute)),
        learning_rate=usual.learning_rate * factor,
        evaluate_every=evaluate_every,
        evaluate_samples=samples,
        hyperparameters=resolved,
    )


def tuned_name(base: str, suffix: str, job_id: str) -> str:
    """Return the name of a job's model in OpenAI's form, such as `ft:nano:sums:5f0c1a2b`."""
    slug = re.sub(r"[^A-Za-z0-9_.-]+", "-", Path(base).name)[:MAX_BASE].strip("-.") or "model"
    return f"ft:{slug}:{suffix}:{job_id.partition('-')[2][:12]}"


def method_of(request: TuningRequest, hyperparameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return `method` as OpenAI's API shows it."""
    own = {"hyperparameters": dict(hyperparameters)}
    if request.kind == "supervised":
        return {"type": "supervised", "supervised": own}
    return {"type": "reinforcement", "reinforcement": {"grader": request.grader, **own}}


def asked(request: TuningRequest) -> dict[str, Any]:
    """Return the hyperparameters as they were asked for."""
    known = Hyperparameters if request.kind == "supervised" else ReinforcementHyperparameters
    return {name: getattr(request.hyperparameters, name) for name in known.model_fields if name != "reasoning_effort"}


def _or(given: Auto | int, usual: int) -> int:
    return usual if given == "auto" else given
