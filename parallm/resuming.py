"""A run that goes on: its checkpoint, what clients have sent, and numbers that its versions must not have again."""

from functools import partial

from parallm.house import House, on_device
from parallm.learner.learner import Learner
from parallm.policy_runs import PolicyRun
from parallm.trainer.loop import Loop
from parallm.trainer.parts import Parts
from parallm.trainer.restoring import restore


async def resume(run: PolicyRun, house: House, parts: Parts, trainer: Loop) -> None:
    """Go on after the newest checkpoint, if there is one, with what clients have sent, and say so."""
    config, texts = run.config, []
    load = partial(parts.checkpoints.load, config.checkpoint.resume, parts.fingerprint, parts.facts)
    state = await on_device(house.device, load)
    if config.checkpoint.resume == "auto":
        run.recorder.go_on_after(0 if state is None else state.step)
    if state is not None:
        await on_device(house.device, partial(restore, parts, state, serve=config.trainer.publish_if == "always"))
        trainer.resume(state)
        texts.append(f"resumed after step {state.step}, version {state.version}")
    run.resumed_version = parts.learner.adapter.version
    await _renumber(run, house, parts, trainer)
    if run.traffic is not None:
        step, now = 0 if state is None else state.step, parts.learner.adapter.version
        texts.append(run.traffic.resume(step, version=run.resumed_version, now=now))
    if text := "; ".join(filter(None, texts)):
        parts.display.message(text)
    if state is not None and state.facts is not None and (changes := parts.facts.changes(state.facts)):
        parts.display.message(f"other values than in the run that is gone on with: {', '.join(changes)}")


async def _renumber(run: PolicyRun, house: House, parts: Parts, trainer: Loop) -> None:
    """Where operators have named versions that no checkpoint holds the trainer goes on with numbers above those."""
    pinned, learner = house.kept.state.pinned(run.name), parts.learner
    if isinstance(learner, Learner) and pinned > learner.adapter.version:
        trainer.renumbered(await on_device(house.device, partial(learner.renumber, pinned + 1)))
