"""The oracles' numbers, computed anew by the programs that they come from, against those in tests/learner/oracles."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compare_trl import REQUIREMENTS, TORCH
from job import SCRIPTS, clean_environment, run_program
from peers import torch_python
from report import last_json, print_table

ORACLES = SCRIPTS.parent / "tests" / "learner" / "oracles"
TRL, PRIME_RL = "trl_grpo", "prime_rl"


def check_sources(peers: Path, prime_rl: str | None) -> dict[str, float]:
    """TRL comes from PyPI; prime-rl is on no registry, and its cases need a clone of it.

    Raises ValueError if a source has no number for a case, or for one more.
    """
    python = torch_python(peers, "trl", TORCH, REQUIREMENTS)
    commands = {TRL: [python, str(SCRIPTS / "workers" / "trl_oracles.py"), str(ORACLES / f"{TRL}.json")]}
    if prime_rl is not None:
        worker = str(SCRIPTS / "workers" / "prime_rl_oracles.py")
        commands[PRIME_RL] = [python, worker, str(ORACLES / f"{PRIME_RL}.json"), prime_rl]
    rows = [("case", "loss", "gradient, largest")]
    worst = 0.0
    for name, command in commands.items():
        environment = clean_environment() | {"HF_HUB_OFFLINE": "1"}
        kept, found = json.loads((ORACLES / f"{name}.json").read_text()), last_json(run_program(command, environment))
        differences = compared(kept, found)
        rows += [(f"{name}: {case}", *(f"{one:.1e}" for one in pair)) for case, pair in differences.items()]
        advantages = [largest(one, found["advantages"][kind]) for kind, one in kept.get("advantages", {}).items()]
        worst = max(worst, *advantages, *(max(pair) for pair in differences.values()))
    print_table("Oracles, computed anew: difference to the numbers that are kept", rows)
    if prime_rl is None:
        print("  those of prime-rl: not computed, they need --prime-rl")
    return {"oracle.regenerated": len(rows) - 1, "oracle.regenerated_error": worst}


def compared(kept: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """By the name of the case, the difference of its loss and the largest of its gradient."""
    cases = {case["name"]: case for case in kept["cases"]}
    if cases.keys() != found["cases"].keys():
        raise ValueError(f"cases without a pair: {sorted(cases.keys() ^ found['cases'].keys())}")
    anew = found["cases"]
    return {
        name: (abs(case["loss"] - anew[name]["loss"]), largest(case["gradient"], anew[name]["gradient"]))
        for name, case in cases.items()
    }


def largest(values: list[float], others: list[float]) -> float:
    return max(abs(one - other) for one, other in zip(values, others, strict=True))
