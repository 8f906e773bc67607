"""Loss and gradient of every choice against numbers of TRL 1.16.0 and prime-rl, on four completions of two groups."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from parallm.learner.loss.advantage import advantages
from parallm.learner.loss.objective import Objective, entropy_threshold, token_weight
from parallm.learner.loss.policy_loss import LossInputs, objective_loss

ORACLES = [json.loads(path.read_text()) for path in sorted((Path(__file__).parent / "oracles").glob("*.json"))]
CASES = [(oracle["inputs"], case) for oracle in ORACLES for case in oracle["cases"]]


def test_there_are_31_cases() -> None:
    assert len(CASES) == 31


@pytest.mark.parametrize(("inputs", "case"), CASES, ids=[case["name"] for _, case in CASES])
def test_loss_and_gradient_are_those_of_the_oracle(
    inputs: dict[str, Any], case: dict[str, Any], record_property: Callable[[str, object], None]
) -> None:
    objective = Objective(**case["objective"])
    new_N, entropies_N = mx.array(inputs["new"]), -mx.array(inputs["new"])
    loss, gradient_N = mx.value_and_grad(objective_loss)(new_N, entropies_N, loss_inputs(inputs, case), objective)
    error = max(abs(loss.item() - case["loss"]), np.abs(np.array(gradient_N) - case["gradient"]).max())
    record_property("oracle.cases", 1)
    record_property("oracle.worst_error", error)
    assert error < 1e-6


@pytest.mark.parametrize("kind", ["group_mean", "group_std", "batch_std"])
def test_advantages_are_those_of_trl(kind: Any) -> None:
    (oracle,) = [oracle for oracle in ORACLES if "advantages" in oracle]
    found = advantages(kind, oracle["inputs"]["groups"], oracle["inputs"]["num_tokens"])
    assert found.tolist() == pytest.approx(oracle["advantages"][kind], abs=1e-7)


def loss_inputs(inputs: dict[str, Any], case: dict[str, Any]) -> LossInputs:
    objective, lengths = Objective(**case["objective"]), inputs["num_tokens"]
    weights = [
        token_weight(
            objective,
            length=length,
            num_tokens=sum(lengths),
            num_completions=case.get("num_completions", len(lengths)),
            max_tokens=inputs["max_tokens"],
        )
        for length in lengths
    ]
    entropies_N = -np.asarray(inputs["new"], np.float32)
    fraction = objective.top_entropy_fraction
    return LossInputs(
        behaviour_N=mx.array(inputs["behaviour"]),
        advantages_N=mx.array(np.repeat(advantages(objective.advantage, inputs["groups"], lengths), lengths)),
        weights_N=mx.array(np.repeat(np.asarray(weights, np.float32), lengths)),
        rows_N=mx.array(np.repeat(np.arange(len(lengths)), lengths)),
        num_rows=len(lengths),
        old_N=mx.array(inputs[case["old"]]),
        reference_N=mx.array(inputs["reference"]) if objective.kl_to == "base" else None,
        entropy_threshold=entropy_threshold(entropies_N, fraction) if fraction < 1 else None,
    )
