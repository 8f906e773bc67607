"""`train`, `training` and `Training`: training by a recipe or a program's objects while the model is used."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from parallm.config.compose import compose, listed
from parallm.config.schema import RunConfig
from parallm.device.blas import load_blas
from parallm.device.load_mlx import load_mlx
from parallm.environment.environment import AnyEnvironment
from parallm.errors import ConfigError
from parallm.library.answer import Answer
from parallm.library.loop_thread import LoopThread
from parallm.library.model import Model
from parallm.library.problems import GivenProblem, Reward, own_environment
from parallm.library.session import LocalClient, TrainingResult, TrainingSession
from parallm.reports import TrainingStatus, TrajectoryReport
from parallm.types import GivenUpdate


def train(
    recipe: str | None = None,
    overrides: Sequence[str] = (),
    *,
    model: str | Path | None = None,
    adapter: str | Path | None = None,
    environment: AnyEnvironment | None = None,
    problems: Sequence[GivenProblem] | None = None,
    held_out: Sequence[GivenProblem] = (),
    reward: Reward | None = None,
) -> TrainingResult:
    """Train to the end and return the result. Arguments and errors are those of `training`.

    KeyboardInterrupt ends it after the present step, which is saved.
    """
    with training(
        recipe,
        overrides,
        model=model,
        adapter=adapter,
        environment=environment,
        problems=problems,
        held_out=held_out,
        reward=reward,
    ) as run:
        return run.wait()


def training(
    recipe: str | None = None,
    overrides: Sequence[str] = (),
    *,
    model: str | Path | None = None,
    adapter: str | Path | None = None,
    environment: AnyEnvironment | None = None,
    problems: Sequence[GivenProblem] | None = None,
    held_out: Sequence[GivenProblem] = (),
    reward: Reward | None = None,
) -> "Training":
    """Start training and return while it runs; use it in a `with`, or call its `close`.

    `recipe` and `overrides` are those of `python -m parallm.train`: a name and `["trainer.steps=20"]`. `model` is a
    folder or an id of the hub, `adapter` the adapter to start from. `environment` is an object as described in
    parallm/environment/README.md; `problems` with `reward` are the short form of one, with `held_out` for evaluations.
    Without any of these the recipe names the environment. Nothing is displayed unless `overrides` has
    `metrics.display=lines`, and the model stays until `close`, whatever `trainer.keep_serving` is. Raises
    ParallmError.
    """
    own = own_environment(environment, problems, held_out, reward)
    named = {"model.path": model, "model.adapter": adapter}
    given = {key: str(value) for key, value in named.items() if value is not None}
    return start(recipe, overrides, given, own)


def start(
    recipe: str | None,
    overrides: Sequence[str],
    given: Mapping[str, object],
    environment: AnyEnvironment | None,
    *,
    is_paused: bool = False,
) -> "Training":
    """Start like `training`; `given` has values by dotted keys. With `is_paused` the first step waits for `resume`."""
    first = ["metrics.display=off"] + ([] if recipe is None else [f"+recipe={recipe}"])
    if environment is not None:
        kind = type(environment)
        first.append("environment=custom")
        given = {**given, "environment.target": f"{kind.__module__}:{kind.__qualname__}"}
    composed = compose("train", RunConfig, [*first, *listed(overrides)], given)
    if environment is not None and composed.config.policies:
        raise ConfigError("policies: each has an environment of its own; leave environment and problems out")
    blas = load_blas(composed.config.device)
    load_mlx()
    # not at the top: it imports MLX, and the BLAS must be loaded first
    from parallm.library import background  # noqa: PLC0415

    main = background.training(composed, blas, environment, is_paused=is_paused)
    return Training(LoopThread(main, f"the run {composed.config.name}", background.release_memory))


class Training:
    """A training run in the background. Any thread may call its methods, also in notebooks.

    `policy` names one of several policies; None means all of them.
    """

    def __init__(self, thread: LoopThread[TrainingSession]) -> None:
        self._thread = thread
        self._result = thread.session.result
        self._is_awaited = False
        self.folder = thread.session.folder
        """The folder of the run."""
        self.model = Model(thread)
        """The model in training. `policy` means the newest version, unless `trainer.publish_if` says otherwise."""

    def status(self) -> TrainingStatus:
        """Return the state, the step, the newest version and the metrics of the last step."""
        return self._thread.call(self._client.training_status())

    def pause(self, policy: str | None = None) -> None:
        """Pause after the present step."""
        self._thread.call(self._client.pause_training(policy))

    def resume(self, policy: str | None = None) -> None:
        """Continue a paused training."""
        self._thread.call(self._client.resume_training(policy))

    def step(self, policy: str | None = None) -> TrainingStatus:
        """Wait for one more step: a new one if training is paused, which it stays, otherwise the running one."""
        return self._thread.call(self._client.train_step(policy))

    def checkpoint(self, policy: str | None = None) -> dict[str, Path]:
        """Save after the present step; return the folder of each policy's checkpoint."""
        folders = self._thread.call(self._client.checkpoint(policy))
        return {name: Path(folder) for name, folder in folders.items()}

    def reward(self, answer: Answer | str, value: float | Mapping[str, float]) -> float:
        """Set the reward of an answer that was sampled with `collect_trajectory=True`, or of its `trajectory_id`.

        Needs `rollout=live`, which the recipe live_traffic has. Returns the sum of the parts.
        """
        given = answer.trajectory_id if isinstance(answer, Answer) else answer
        if given is None:
            raise ConfigError("the answer is no trajectory; ask for it with collect_trajectory=True")
        return self._thread.call(self._client.reward(given, value))

    def trajectories(self) -> dict[str, TrajectoryReport]:
        """Return the counts of answers with `collect_trajectory=True`, by policy."""
        return self._thread.call(self._client.trajectories())

    def train_on(
        self,
        trajectories: Sequence[Mapping[str, Any]],
        *,
        policy: str | None = None,
        update_inference: bool | None = None,
        checkpoint_name: str | None = None,
    ) -> GivenUpdate:
        """Make one update on trajectories of `Answer.rewarded`, after the present step.

        `update_inference` is whether the policy's name means the new version from now on; None follows
        `trainer.publish_if`. `checkpoint_name` saves the version under that name.
        """
        work = self._client.train_on(
            trajectories, policy=policy, update_inference=update_inference, checkpoint_name=checkpoint_name
        )
        return self._thread.call(work)

    def stop(self) -> None:
        """End training after the present step, which is saved; return at once. The model stays."""
        self._thread.session.stop()

    def wait(self) -> TrainingResult:
        """Wait for the end of training; raises the error that ended it, such as TrainingStopped. The model stays."""
        self._is_awaited = True
        return self._result.result()

    @property
    def has_ended(self) -> bool:
        """Whether training has ended, by its last step, by `stop` or by an error."""
        return self._result.done()

    async def await_close(self) -> None:
        """Wait until the model is closed; raises the error that closed it."""
        await asyncio.shield(asyncio.wrap_future(self._thread.ended))

    async def await_end(self) -> TrainingResult:
        """Await the result; like `wait`."""
        self._is_awaited = True
        return await asyncio.shield(asyncio.wrap_future(self._result))

    def close(self) -> None:
        """End training after the present step, which is saved, then the model. Does nothing the second time."""
        self._thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close()
        failure = self._result.exception()
        if failure is not None and kind is None and not self._is_awaited:
            raise failure

    def __repr__(self) -> str:
        return f"<{self._thread.name} in {self.folder}{'' if self._thread.is_open else ', closed'}>"

    @property
    def _client(self) -> LocalClient:
        return self._thread.session.client
