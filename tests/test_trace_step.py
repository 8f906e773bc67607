"""Which kernels make a layer, among those that a profiler has seen."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parent.parent / "scripts"
PROBE = """
import json, sys
from dataclasses import astuple
sys.path.insert(0, sys.argv[1])
import trace_step

print(json.dumps(astuple(trace_step.layer_of(json.loads(sys.argv[2])))))
"""


def layer_of(kernels: list[tuple[str, float, float]]) -> list[Any]:
    command = [sys.executable, "-c", PROBE, str(SCRIPTS), json.dumps(kernels)]
    found: list[Any] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return found


def test_a_layer_is_what_lies_between_two_kernels_of_attention() -> None:
    kernels: list[tuple[str, float, float]] = []
    for begin in (0.0, 100.0, 202.0, 700.0):  # the device waited in the third
        kernels += [
            ("decode_attention", begin, 10.0),
            ("decode_attention_merge", begin + 11, 2.0),
            ("add", begin + 20, 1.0),
            ("product", begin + 22, 30.0),
            ("add", begin + 60, 3.0),
        ]
    kernels.insert(7, ("sampling", 118.0, 1.0))  # not in every layer

    num_layers, of_layers, microseconds, found = layer_of(kernels)

    assert (num_layers, of_layers, microseconds) == (2, 3, 101.0)
    assert found == [
        ["decode_attention", 0.0, 10.0],
        ["decode_attention_merge", 11.0, 2.0],
        ["add", 20.0, 1.0],
        ["product", 22.0, 30.0],
        ["add", 60.0, 3.0],
    ]
