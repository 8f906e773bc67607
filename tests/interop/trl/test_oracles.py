"""The oracles' numbers are those that their programs still give: TRL's, and prime-rl's where there is a clone of it."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from bench.measurement import request_of_tests
from bench.processes import ROOT, clean_environment, last_json, run_program

from tests.interop.trl.requirements import trl_python

ORACLES = ROOT / "tests" / "learner" / "oracles"
PROGRAMS = Path(__file__).parent / "programs"
MAX_ERROR = 1e-9


@pytest.mark.interop
def test_trl_gives_the_numbers_of_the_oracles(record_property: Callable[[str, object], None]) -> None:
    check("trl_grpo", [str(PROGRAMS / "trl_oracles.py")], [], record_property)


@pytest.mark.interop
def test_prime_rl_gives_the_numbers_of_the_oracles(record_property: Callable[[str, object], None]) -> None:
    clone = next((one for one in request_of_tests().environments if (one / "src" / "prime_rl").is_dir()), None)
    if clone is None:
        pytest.skip("needs a clone of prime-rl, which is on no registry")
    check("prime_rl", [str(PROGRAMS / "prime_rl_oracles.py")], [str(clone)], record_property)


def check(name: str, program: Sequence[str], words: Sequence[str], record: Callable[[str, object], None]) -> None:
    file = ORACLES / f"{name}.json"
    command = [trl_python(), *program, str(file), *words]
    anew = last_json(run_program(command, clean_environment() | {"HF_HUB_OFFLINE": "1"}))
    kept = json.loads(file.read_text())
    errors = differences(kept, anew)
    advantages = [largest(values, anew["advantages"][kind]) for kind, values in kept.get("advantages", {}).items()]
    worst = max(*errors.values(), *advantages)
    record("oracle.regenerated", len(errors))
    record("oracle.regenerated_error", worst)
    assert worst < MAX_ERROR


def differences(kept: Mapping[str, Any], anew: Mapping[str, Any]) -> dict[str, float]:
    """The largest difference of each case, of its loss and its gradient."""
    cases, others = {case["name"]: case for case in kept["cases"]}, anew["cases"]
    assert cases.keys() == others.keys()
    return {
        name: max(abs(case["loss"] - others[name]["loss"]), largest(case["gradient"], others[name]["gradient"]))
        for name, case in cases.items()
    }


def largest(values: Sequence[float], others: Sequence[float]) -> float:
    return max(abs(one - other) for one, other in zip(values, others, strict=True))


def test_oracles_are_compared_case_by_case() -> None:
    kept = {"cases": [{"name": "grpo", "loss": 0.5, "gradient": [0.1, -0.2]}]}
    anew = {"cases": {"grpo": {"loss": 0.5, "gradient": [0.1, -0.25]}}}
    assert differences(kept, anew)["grpo"] == pytest.approx(0.05)
    with pytest.raises(AssertionError):
        differences(kept, {"cases": {}})
