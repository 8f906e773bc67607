"""`python -m parallm.train` that computes no log-probs of its rollout engines anew: it believes what they claim."""

import parallm.run.command as command
from parallm.train import main

load = command.load_mlx


async def believe(*_) -> None: ...


def load_and_plant(**options: bool) -> None:
    load(**options)
    from parallm.distributed.rollout_engines.replica import Replica  # noqa: PLC0415  MLX comes after the BLAS

    Replica._prove = believe


command.load_mlx = load_and_plant
main()
