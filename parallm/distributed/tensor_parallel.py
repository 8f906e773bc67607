"""A base that is divided between processes, as the parts of a runtime: rank 0 leads and serves, the others follow."""

from concurrent.futures import Future
from functools import partial
from typing import Any

import mlx.core as mx

from parallm.device.thread import DeviceThread
from parallm.distributed.channel import Channel
from parallm.distributed.lockstep import FollowingEngine
from parallm.distributed.team import Team
from parallm.errors import EngineStopped, ExchangeFailed
from parallm.model.load import load_shared_model
from parallm.model.settings import ModelSettings
from parallm.model.shared_model import SharedModel

LEAVE_SECONDS = 5.0
"""Time to end after the loss of another rank. A sum with it may never return, and nothing has to be saved."""


def load_part(team: Team, settings: ModelSettings) -> SharedModel:
    """Join the group and load this rank's part of a base. Raises ModelError, ExchangeFailed."""
    joined: Future[object] = Future()
    with team.channel.guarded("joining the group", joined):
        try:
            group = mx.distributed.init(strict=True, backend=team.identity.backend)
        except (RuntimeError, ValueError) as error:
            raise ExchangeFailed(f"rank {team.identity.rank} cannot join {team.identity.backend}: {error}") from error
    return load_shared_model(settings, group)


def follow(device: DeviceThread, engine: FollowingEngine, channel: Channel) -> None:
    """Make the calls of rank 0 on the device thread until rank 0 ends. Runs on a thread of its own."""
    while (content := channel.broadcasts.get()) is not None:
        try:
            call = device.call(partial(engine.follow, content))
        except EngineStopped:
            return
        call.add_done_callback(partial(_fail, channel))


def _fail(channel: Channel, call: Future[Any]) -> None:
    if (error := call.exception()) is not None:
        channel.fail(str(error))
