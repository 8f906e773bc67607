"""`RLServer`: serving and training of one model as two coroutines of a program's own event loop."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from parallm.config.compose import listed
from parallm.environment.environment import AnyEnvironment
from parallm.errors import ConfigError, Unavailable
from parallm.library.problems import GivenProblem, Reward, own_environment
from parallm.library.session import TrainingResult
from parallm.library.training import Training, start

LIVE_RECIPE = "live_traffic"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRAConfig:
    """The form of a new adapter; `model.lora` has further keys."""

    rank: int = 16
    alpha: float = 32.0
    """The adapter's product is scaled by alpha / rank."""
    dropout: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RLConfig:
    """Hyperparameters of training; `learner`, `rollout` and `trainer` have further keys."""

    algorithm: str = "grpo"
    """One of conf/learner: grpo, dapo, dr_grpo, rloo, gspo and others."""
    learning_rate: float = 1e-5
    batch_size: int = 32
    """Completions of one update."""
    group_size: int = 8
    """Completions of a batch that are compared with each other."""
    steps: int = 1000
    """Updates until training ends."""


class RLServer:
    """Serves a model over HTTP and trains it, each as long as its coroutine runs.

    The policy learns from completions that clients ask for with `collect_trajectory` and reward later, or, where
    `environment` or `problems` with `reward` are given as for `parallm.train`, from these. The model is loaded when the
    first coroutine starts and goes away when the last one ends. Used on one event loop.
    """

    def __init__(
        self,
        base_model: str,
        lora_config: LoRAConfig | None = None,
        rl_config: RLConfig | None = None,
        *,
        environment: AnyEnvironment | None = None,
        problems: Sequence[GivenProblem] | None = None,
        held_out: Sequence[GivenProblem] = (),
        reward: Reward | None = None,
        overrides: Sequence[str] = (),
    ) -> None:
        """Load nothing yet. `overrides` are those of `python -m parallm.train`. Raises ConfigError."""
        own = own_environment(environment, problems, held_out, reward)
        lora, rl = lora_config or LoRAConfig(), rl_config or RLConfig()
        if rl.batch_size % rl.group_size:
            raise ConfigError(f"batch_size={rl.batch_size} is no multiple of group_size={rl.group_size}; change one")
        self._start = partial(
            start,
            LIVE_RECIPE if own is None else None,
            [f"learner={rl.algorithm}", *listed(overrides)],
            {
                "model.path": base_model,
                "model.lora.rank": lora.rank,
                "model.lora.alpha": lora.alpha,
                "model.lora.dropout": lora.dropout,
                "learner.learning_rate": rl.learning_rate,
                "rollout.problems_per_step": rl.batch_size // rl.group_size,
                "rollout.group_size": rl.group_size,
                "trainer.steps": rl.steps,
            },
            own,
            is_paused=True,
        )
        self._starting: asyncio.Task[Training] | None = None
        self._num_users = 0

    @property
    def is_loaded(self) -> bool:
        """Whether a coroutine has loaded the model."""
        return self._starting is not None and self._starting.done() and self._starting.exception() is None

    @property
    def run(self) -> Training:
        """The model and its training while it is loaded. Raises Unavailable before and after."""
        if self._starting is None or not self.is_loaded:
            raise Unavailable("nothing is loaded; await run_inference or run_training_loop first")
        return self._starting.result()

    async def run_inference(self, host: str | None = None, port: int | None = None) -> None:
        """Answer HTTP until the task is cancelled or `close` is called. Raises ParallmError, as training does."""
        async with self._used() as run:
            server = await asyncio.to_thread(run.model.serve, host=host, port=port)
            try:
                await run.await_close()
            finally:
                await asyncio.to_thread(server.close)

    async def run_training_loop(self) -> TrainingResult:
        """Train until the last step. Cancelling the task pauses training after its present step.

        Call it again to continue, as long as the model is loaded. Raises ParallmError.
        """
        async with self._used() as run:
            if not run.has_ended:
                await asyncio.to_thread(run.resume)
            try:
                return await run.await_end()
            finally:
                if not run.has_ended:
                    await asyncio.to_thread(run.pause)

    async def close(self) -> None:
        """End both coroutines: training after its present step, which is saved. Does nothing the second time."""
        starting, self._starting = self._starting, None
        if starting is not None:
            await asyncio.wait([starting])
            if not starting.exception():
                await asyncio.to_thread(starting.result().close)

    @asynccontextmanager
    async def _used(self) -> AsyncIterator[Training]:
        self._num_users += 1
        if self._starting is None:
            self._starting = asyncio.create_task(asyncio.to_thread(self._start))
        try:
            yield await asyncio.shield(self._starting)
        finally:
            self._num_users -= 1
            if self._num_users == 0:
                await self.close()
