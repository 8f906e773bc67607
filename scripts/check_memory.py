"""How much a server grows when it gets a learner: optimizer and working copy of the adapter, without activations.

The bar is 5% of the base weights and 4 adapters: the working copy and two moments in float32 are 3 of them.
"""

from argparse import ArgumentParser
from dataclasses import replace

from job import add_model_options, base_job, blas_name, run_worker
from report import print_figures, print_table

SHARE_OF_BASE, NUM_ADAPTERS = 0.05, 4


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    add_model_options(parser)
    arguments = parser.parse_args()
    job = replace(base_job(arguments), prompts=4, max_tokens=64, lora=True)
    found = run_worker("memory", job)
    base, adapter = found["base"], found["adapter"]
    bar = SHARE_OF_BASE + NUM_ADAPTERS * adapter / base
    rows = [("", "MB", "of the base")]
    for name, size in (
        ("base weights", base),
        ("one adapter", adapter),
        ("serving process, resident", found["server"]),
        ("growth with a learner, resident", found["added"]),
        ("growth with a learner, arrays", found["arrays_added"]),
        ("growth after one update, arrays", found["arrays_added_after_update"]),
        ("growth after one update, resident", found["added_after_update"]),
        ("allowed: 5% of the base and 4 adapters", int(bar * base)),
    ):
        rows.append((name, f"{size / 1e6:.2f}", f"{size / base:.3f}"))
    print_table(f"Memory: {arguments.model}, LoRA rank 16 on all linear layers", rows)
    # resident memory grows by less where freed pages are used again; without /proc the arrays are all there is to see
    growth = max(found["added"], found["arrays_added"])
    print_figures(
        {
            "memory.learner_over_base": growth / base,
            "memory.learner_over_base_bar": bar,
            "memory.learner_arrays_over_base": found["arrays_added"] / base,
            "memory.learner_arrays_after_update_over_base": found["arrays_added_after_update"] / base,
        },
        device=blas_name(job),
    )


if __name__ == "__main__":
    main()
