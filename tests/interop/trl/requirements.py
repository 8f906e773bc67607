"""The environment of TRL, in which its programs run."""

from bench.measurement import request_of_tests
from bench.processes import cpu_torch, python_with

TRL, TORCH = "1.16.0", "2.13.0"
REQUIREMENTS = (f"trl=={TRL}", "peft==0.21.2", "transformers==5.23.0", "pydantic")
"""Pydantic is what our environments' settings need."""


def trl_python() -> str:
    return python_with(request_of_tests().peers / "trl", cpu_torch(TORCH), REQUIREMENTS)
