"""The hand of HTTP on the trainers of a run: pause, resume, one step, one update, a checkpoint."""

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial

from parallm.errors import InvalidRequest, Unavailable, UnknownModel
from parallm.policy_runs import PolicyRun
from parallm.trainer.pacing import Pacing
from parallm.updates import GivenTrajectory, GivenUpdate


class TrainingControl:
    """About one policy by name, or all of them. For the asyncio thread.

    Everything raises UnknownModel for a policy that is not trained, and Unavailable before training begins and after.
    """

    def __init__(self, runs: Sequence[PolicyRun]) -> None:
        self._runs = runs

    def pause(self, policy: str | None) -> None:
        """Begin no further step; the present one ends first."""
        for pacing in self._chosen(policy).values():
            pacing.pause()

    def resume(self, policy: str | None) -> None:
        for pacing in self._chosen(policy).values():
            pacing.resume()

    async def step(self, policy: str | None, checkpoint_name: str | None = None) -> Mapping[str, str]:
        """Wait for one more step: a new one where paused, which stays so, else the one at work.

        Then save under a name, if one is given, in folders that stay; they are returned by policy.
        """
        chosen = self._chosen(policy)
        trainers = [run.trainer for run in self._runs if run.name in chosen and run.trainer is not None]
        if checkpoint_name is not None:
            for trainer in trainers:
                trainer.check_name(checkpoint_name)
        await asyncio.gather(*(pacing.step() for pacing in chosen.values()))
        if checkpoint_name is None:
            return {}
        saves = [trainer.pacing.between_steps(partial(trainer.save_as, checkpoint_name)) for trainer in trainers]
        return {name: str(folder) for name, folder in zip(chosen, await asyncio.gather(*saves), strict=True)}

    async def train_on(
        self, policy: str | None, given: Sequence[GivenTrajectory], *, serve: bool | None, checkpoint_name: str | None
    ) -> GivenUpdate:
        """One update on these after the present step, which is none itself; see `GivenUpdates.update`."""
        self._chosen(policy)
        runs = [run for run in self._runs if policy in (None, run.name)]
        if len(runs) > 1:
            raise InvalidRequest(f"name the policy to train: {', '.join(run.name for run in runs)}", "policy")
        if runs[0].given_updates is None:
            raise Unavailable("this run learns from learner.data and not from completions with rewards")
        return await runs[0].given_updates.update(given, serve=serve, checkpoint_name=checkpoint_name)

    async def checkpoint(self, policy: str | None) -> Mapping[str, str]:
        """Save after the present step; the folder of each policy's checkpoint. Raises CheckpointError."""
        chosen = self._chosen(policy)
        folders = await asyncio.gather(*(pacing.checkpoint() for pacing in chosen.values()))
        return {name: str(folder) for name, folder in zip(chosen, folders, strict=True)}

    def _chosen(self, policy: str | None) -> dict[str, Pacing]:
        names = [run.name for run in self._runs]
        if policy is not None and policy not in names:
            raise UnknownModel(f"no policy {policy!r} is trained here; there are {', '.join(names)}")
        trainers = {run.name: run.trainer for run in self._runs if policy in (None, run.name)}
        begun = {name: trainer.pacing for name, trainer in trainers.items() if trainer is not None}
        if len(begun) < len(trainers):
            raise Unavailable("training has not begun yet; try again when its status is not `starting`")
        return begun
