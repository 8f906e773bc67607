"""`python -m parallm.serve` with a fault: it computes with the first version that it gets, and claims the newest."""

from dataclasses import replace

import parallm.run.command as command
from parallm.serve import main

load = command.load_mlx


def load_and_plant(**options: bool) -> None:
    load(**options)
    from parallm.distributed.rollout_engines import host  # noqa: PLC0415  MLX comes after the BLAS

    arrays = []
    read = host.from_bytes

    def stale(content, targets):
        adapter = read(content, targets)
        arrays.append(adapter.arrays)
        return replace(adapter, arrays=arrays[0])  # with number and digest of the new one

    host.from_bytes = stale


command.load_mlx = load_and_plant
main()
