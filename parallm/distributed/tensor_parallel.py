"""A base that is divided between processes, as the parts of a runtime: rank 0 leads and serves, the others follow."""

import socket
from concurrent.futures import Future
from functools import partial
from typing import Any

import mlx.core as mx

from parallm.device.thread import DeviceThread
from parallm.distributed.channel import Channel
from parallm.distributed.lockstep import FollowingEngine
from parallm.distributed.team import Team
from parallm.errors import EngineStopped, ExchangeFailed
from parallm.model.kernels.all_sum import PeerMemory, open_peer_memory
from parallm.model.kernels.peer_trial import tried
from parallm.model.load import load_shared_model
from parallm.model.settings import ModelSettings
from parallm.model.shared_model import SharedModel
from parallm.model.tensor_parallel import Ranks

LEAVE_SECONDS = 5.0
"""Time to end after the loss of another rank. A sum with it may never return, and nothing has to be saved."""


def load_part(team: Team, settings: ModelSettings) -> SharedModel:
    """Load this rank's part of a base. Device thread only. Raises ModelError, ExchangeFailed."""
    return load_shared_model(settings, join_ranks(team))


def join_ranks(team: Team) -> Ranks:
    """Join the group of mx.distributed, and share memory where the GPUs can. Raises ExchangeFailed."""
    joined: Future[object] = Future()
    with team.channel.guarded("joining the group", joined):
        try:
            group = mx.distributed.init(strict=True, backend=team.identity.backend)
        except (RuntimeError, ValueError) as error:
            raise ExchangeFailed(f"rank {team.identity.rank} cannot join {team.identity.backend}: {error}") from error
    return Ranks(group=group, peers=_peer_memory(team))


def _peer_memory(team: Team) -> PeerMemory | None:
    """Memory that all ranks share, if they are on one host and have GPUs."""

    def gather(part: bytes) -> list[bytes]:
        return team.channel.gather("memory", part).result()

    identity = team.identity
    if identity.backend != "nccl" or len(set(gather(socket.gethostname().encode()))) > 1:
        return None
    peers = open_peer_memory(identity.rank, identity.size, gather)
    if peers is None:
        return None
    waiting: Future[object] = Future()
    with team.channel.guarded("trying sums", waiting):
        return tried(peers, gather)


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
