"""Loss and gradient of every case under tests/learner/oracles. Prints per case how far both are off."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from parallm.learner.loss.advantage import advantages
from parallm.learner.loss.corrections import entropy_threshold
from parallm.learner.loss.objective import Objective, token_weight
from parallm.learner.loss.policy_loss import LossInputs, objective_loss

ORACLES = Path(__file__).parents[2] / "tests" / "learner" / "oracles"


def errors(inputs: dict[str, Any], case: dict[str, Any]) -> dict[str, Any]:
    """The case's name, the error of its loss and the largest error of its gradient."""
    objective = Objective(**case["objective"])
    new_N = mx.array(inputs["new"])
    loss, gradient_N = mx.value_and_grad(objective_loss)(new_N, -new_N, loss_inputs(inputs, case, objective), objective)
    return {
        "name": case["name"],
        "loss": abs(loss.item() - case["loss"]),
        "gradient": float(np.abs(np.array(gradient_N) - case["gradient"]).max()),
    }


def loss_inputs(inputs: dict[str, Any], case: dict[str, Any], objective: Objective) -> LossInputs:
    lengths = inputs["num_tokens"]
    step = {
        "num_tokens": sum(lengths),
        "num_completions": case.get("num_completions", len(lengths)),
        "max_tokens": inputs["max_tokens"],
    }
    weights = np.asarray([token_weight(objective, length=length, **step) for length in lengths], np.float32)
    fraction = objective.top_entropy_fraction
    return LossInputs(
        behaviour_N=mx.array(inputs["behaviour"]),
        advantages_N=mx.array(np.repeat(advantages(objective.advantage, inputs["groups"], lengths), lengths)),
        weights_N=mx.array(np.repeat(weights, lengths)),
        rows_N=mx.array(np.repeat(np.arange(len(lengths)), lengths)),
        num_rows=len(lengths),
        old_N=mx.array(inputs[case["old"]]),
        reference_N=mx.array(inputs["reference"]) if objective.kl_to == "base" else None,
        entropy_threshold=(
            entropy_threshold(-np.asarray(inputs["new"], np.float32), fraction) if fraction < 1 else None
        ),
    )


files = [json.loads(path.read_text()) for path in sorted(ORACLES.glob("*.json"))]
print(json.dumps({"cases": [errors(one["inputs"], case) for one in files for case in one["cases"]]}))
