"""How much a server grows by a learner that trains: optimizer, new versions and the way back to the last good one.

Readings are taken between updates, after unused memory was given back. Judged is what the process holds after the last
one: live arrays, or all that C code has allocated if that is more. A learner holds six adapters: the newest version and
its two moments, and the same of the version before, to which it can go back. The bar is these and 5% of the base
weights; one more adapter in the arrays is too many on any model. Resident memory is shown: beside what is held it has
freed pages that malloc keeps, here in one heap (MALLOC_ARENA_MAX=1), as it cannot give back what lies at the ends of
others. What an update needs while it runs, most of it activations (`learner.micro_batch_tokens`), is shown too. The
versions before these two, which a server keeps for its clients, do not count.
"""

from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from job import add_model_options, base_job, blas_name, run_worker
from report import print_figures, print_table

SHARE_OF_BASE, NUM_ADAPTERS = 0.05, 6
UPDATES = 5
HELD_LATER = 2
"""Updates after which the learner holds all that it will hold."""


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    add_model_options(parser)
    arguments = parser.parse_args()
    job = replace(base_job(arguments), prompts=4, max_tokens=64, lora=True, steps=UPDATES)
    found = run_worker("memory", job, environment={"MALLOC_ARENA_MAX": "1"})
    figures, base = figures_of(found), found["base"]
    rows = [("", "MB", "of the base", "MB with a learner, and after each update")]
    sizes = {
        "base weights": [base],
        "one adapter": [found["adapter"]],
        "allowed: 5% of the base and 6 adapters": [round(figures["memory.learner_over_base_bar"] * base)],
        "growth, arrays": growth(found["arrays"]),
        "growth, allocated": growth(found["allocated"]),
        "growth, resident": growth(found["resident"]),
        "largest while an update runs, over the largest before": [found["peak_of_updates"] - found["peak"]],
    }
    for name, readings in sizes.items():
        last, all_of_them = readings[-1], " ".join(f"{one / 1e6:.1f}" for one in readings)
        rows.append((name, f"{last / 1e6:.2f}", f"{last / base:.3f}", all_of_them if len(readings) > 1 else ""))
    print_table(f"Memory: {arguments.model}, LoRA rank 16 on all linear layers", rows)
    print_figures(figures, device=blas_name(job))


def figures_of(found: dict[str, Any]) -> dict[str, float]:
    base, adapter = found["base"], found["adapter"]
    arrays, resident = growth(found["arrays"]), growth(found["resident"])
    held = max(arrays[-1], growth(found["allocated"])[-1])
    return {
        "memory.learner_over_base": held / base,
        "memory.learner_over_base_bar": SHARE_OF_BASE + NUM_ADAPTERS * adapter / base,
        "memory.learner_mb": held / 1e6,
        "memory.learner_adapters": arrays[-1] / adapter,
        "memory.learner_resident_mb": resident[-1] / 1e6,
        "memory.growth_by_later_updates": arrays[-1] / arrays[HELD_LATER] - 1,
        "memory.update_peak_mb": (found["peak_of_updates"] - found["peak"]) / 1e6,
    }


def growth(readings: Sequence[int]) -> list[int]:
    """With a learner, and after each update, over the first reading: that of a server without one."""
    return [size - readings[0] for size in readings[1:]]


if __name__ == "__main__":
    main()
