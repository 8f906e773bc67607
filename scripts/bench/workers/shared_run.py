"""A run of `parallm.train` of several workers on random weights of a shape, each on a GPU or a share of the cores.

The first process starts the workers, which run this module, too.
"""

import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parallm.config.schema import RunConfig
from parallm.device.blas import BlasReport
from parallm.distributed.gang import Interrupts, NoFront, run_gangs
from parallm.distributed.identity import identity_of
from parallm.distributed.launcher import Host
from parallm.distributed.settings import DistributedSettings
from parallm.run.command import run_command

if TYPE_CHECKING:
    from bench.workers.echo import Echo
    from parallm.metrics.rollout_format import EncodedRows, StepRollouts
    from parallm.model.shared_model import SharedModel


def main(
    *,
    shape: str,
    vocabulary: int | None,
    workers: int,
    restarts: int,
    overrides: list[str],
    run: str,
    echoes: int,
    late_seconds: float,
) -> Any:
    """`vocabulary` replaces that of the shape. `run` is the folder of the run. `echoes`: how many workers a single one
    takes itself for, and `late_seconds` how late they come; see `Echo`. With 1 and more, all completions have their
    full length."""
    settings = DistributedSettings(engine="mlx", workers=workers, restarts=restarts)
    if workers > 1 and identity_of() is None:
        with tempfile.TemporaryDirectory() as temporary, (interrupts := Interrupts()).counted():
            host = Host(settings, ["-m", "bench.worker", *sys.argv[1:3]], Path(temporary) / "hosts.json", NoFront())
            sys.exit(run_gangs(host, settings, Path(run), resume="never", interrupts=interrupts))

    def train(config: RunConfig, folder: Path, blas: BlasReport, **more: Any) -> int:
        import mlx.core as mx  # noqa: PLC0415  # not at the top: the command loads the BLAS before MLX

        from bench.workers.loads import SHAPES  # noqa: PLC0415
        from bench.workers.random_model import random_model  # noqa: PLC0415
        from bench.workers.random_training import train_on  # noqa: PLC0415

        if echoes:
            from bench.workers.echo import Echo  # noqa: PLC0415
            from parallm.distributed import rollouts  # noqa: PLC0415
            from parallm.distributed.parts import Shared, Single  # noqa: PLC0415
            from parallm.rollout import collector  # noqa: PLC0415
            from parallm.run import train as training  # noqa: PLC0415

            vars(collector)["SamplingParams"] = partial(collector.SamplingParams, ignore_eos=True)
            echo = Echo(echoes, late_seconds)
            vars(training)["parts_for"] = lambda settings, _: Shared(echo, settings, None) if echoes > 1 else Single()
            vars(rollouts)["encode_own"] = echoed(rollouts.encode_own, echo)

        def make() -> "SharedModel":
            mx.random.seed(0)  # every worker has the same base
            return random_model(SHAPES[shape] | ({"vocab_size": vocabulary} if vocabulary else {}))

        return train_on(make, config, folder, blas, **more)[0]

    own = [f"distributed.workers={workers}", "distributed=mlx"] if workers > 1 else []
    sys.argv[1:] = [*overrides, *own, f"hydra.run.dir={run}", *sys.argv[3:]]  # a restart adds its own
    sys.exit(run_command("train", train))


def echoed(encode_own: Callable[..., "EncodedRows"], echo: "Echo") -> Callable[..., "EncodedRows"]:
    """Encodes rank 0's completions of a step, and lets the other ranks post theirs."""

    def encode(exchange: Any, rollouts: "StepRollouts", *more: Any) -> "EncodedRows":
        rows = encode_own(exchange, rollouts, *more)
        echo.echo_rows(rollouts.step, rows)
        return rows

    return encode
