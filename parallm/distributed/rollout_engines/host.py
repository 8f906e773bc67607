"""A server as a rollout engine of a trainer elsewhere. `server/control/routes_replicas.py` calls it.

A session of a trainer has one policy, whose versions keep the trainer's numbers. When another session takes its place,
the numbers come again for other weights: so all versions of the policy, and all that was computed with them, go first.
"""

import asyncio
import io
import logging
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from parallm.checkpoint.persistent_table import PersistentTable
from parallm.checkpoint.untrusted_files import check_safetensors
from parallm.device.thread import DeviceThread
from parallm.errors import AdapterError, EngineFull, Unavailable, UnknownModel
from parallm.model.adapters.adapter import Adapter
from parallm.model.adapters.transfer import from_bytes
from parallm.model.shared_model import SharedModel
from parallm.server.control.replica_schemas import API, JoinAnswer, JoinBody, ReceivedVersion
from parallm.types import BASE, EngineStats

logger = logging.getLogger(__name__)

LEASE_SECONDS = 10.0
"""Time after its last sign of life for which a trainer keeps its policy's name against others."""


class ReplicaEngine(Protocol):
    """The part of `AsyncEngine` that a host uses."""

    @property
    def max_context(self) -> int: ...

    def stats(self) -> EngineStats: ...

    async def reset_caches(self) -> None: ...


@dataclass(slots=True, kw_only=True)
class Claim:
    """One session: a trainer's process that samples a policy here."""

    session: str
    owner: str
    policy: str
    seen: float
    """Time of the last sign of life, monotonic."""
    digests: dict[int, str] = field(default_factory=dict)
    """Digest of each version that was sent; the base has none."""
    served: int | None = None
    """Version that clients of the trainer get; 0: the base."""
    num_behind: int = 0
    """Joins in a row after which clients got another version here."""

    @property
    def is_fresh(self) -> bool:
        return time.monotonic() - self.seen < LEASE_SECONDS


class ReplicaHost:
    """Used on the asyncio thread; the device thread reads arrays."""

    def __init__(self, device: DeviceThread, model: SharedModel, kept: PersistentTable, engine: ReplicaEngine) -> None:
        self.process = uuid.uuid4().hex
        self._device = device
        self._model = model
        self._kept = kept
        self._table = kept.table
        self._engine = engine
        self._claims: dict[str, Claim] = {}  # by policy
        self._lock = asyncio.Lock()

    def owner(self, policy: str) -> str | None:
        """Return the trainer whose versions this name has, if one is there."""
        claim = self._claims.get(policy)
        return claim.owner if claim is not None and claim.is_fresh else None

    async def join(self, trainer: JoinBody, *, is_paused: bool) -> JoinAnswer:
        """Begin or continue a session. Raises Unavailable for a trainer that this server cannot sample for.

        Raises EngineFull while another trainer is there, or requests still run on its versions.
        """
        if difference := self._difference(trainer):
            raise Unavailable(difference)
        async with self._lock:
            claim = self._claims.get(trainer.policy)
            if claim is None or claim.session != trainer.session:
                claim = await self._claim(trainer, claim)
            claim.seen = time.monotonic()
            claim.served = trainer.served
            if trainer.served is not None:
                self._serve(claim, trainer.served)
        return JoinAnswer(
            api=API,
            process=self.process,
            dtype=str(self._model.dtype).removeprefix("mlx.core."),
            max_rows=0 if is_paused else self._engine.stats().max_rows,
            versions={str(version): digest for version, digest in self._held(claim).items()},
        )

    async def receive(self, session: str, version: int, content: bytes) -> ReceivedVersion:
        """Take a version under this number. Raises AdapterError for arrays that do not fit, or that have changed."""
        claim = self._claim_of(session)
        await asyncio.to_thread(check_safetensors, io.BytesIO(content), len(content))
        read = partial(from_bytes, content, self._model.targets)
        adapter = await asyncio.wrap_future(self._device.call(read))
        if adapter.key != (claim.policy, version):
            raise AdapterError(f"{adapter.name}@{adapter.version} was sent as {claim.policy}@{version}")
        async with self._lock:
            self._keep(self._claim_of(session), adapter)  # another one may have taken its place meanwhile
        return ReceivedVersion(name=adapter.name, version=version, digest=adapter.digest)

    def digests(self, session: str) -> Mapping[int, str]:
        """Return the digest of each version that the session has sent, also of those that come later."""
        return self._claim_of(session).digests

    def leave(self, session: str) -> None:
        """End a session; its versions stay."""
        claim = self._claim_of(session)
        claim.seen = -LEASE_SECONDS

    def _keep(self, claim: Claim, adapter: Adapter) -> None:
        """Take a version into the table; it may be older than others there. Raises AdapterError for changed arrays."""
        version = adapter.version
        if claim.digests.get(version, adapter.digest) != adapter.digest:
            raise AdapterError(f"{claim.policy}@{version} was sent before, with other arrays")
        if version >= self._table.next_version(claim.policy):
            self._table.publish(adapter, serve=False)
        elif not self._table.holds(*adapter.key):
            # served at once: the table drops older versions that nothing uses
            served = {claim.policy: version} if version == claim.served else {}
            self._table.restore([adapter], served=served, aliases={}, held=(), highest={})
        claim.digests[version] = adapter.digest

    def _serve(self, claim: Claim, version: int) -> None:
        """Let clients get the version that they get at the trainer. The log says once if they cannot."""
        reason = "the trainer has not sent it"
        if version in {0, *claim.digests}:
            try:
                self._table.promote(version, name=claim.policy)
            except UnknownModel as error:  # dropped since, or the base under a name that is no policy's here
                reason = str(error)
        cards = [card for card in self._table.cards() if card.name == claim.policy and card.is_served]
        served = cards[0].version if cards else 0
        claim.num_behind = 0 if served == version else claim.num_behind + 1
        if claim.num_behind == 2:  # after the first one the trainer sends it
            logger.warning(
                "clients get version %d of %s here and version %d at %s: %s",
                *(served, claim.policy, version, claim.owner, reason),
            )

    def _difference(self, trainer: JoinBody) -> str:
        """Return why this server cannot sample for a trainer; empty if it can."""
        if trainer.api != API:
            return (
                f"this server speaks version {API} of the protocol of rollout engines, the trainer {trainer.api}; "
                "install the same version of ParaLLM on both"
            )
        if trainer.base_sha256 != self._model.sha256:
            return (
                f"this server has the base {self._model.name} (sha256 {self._model.sha256[:12]}), the trainer "
                f"{trainer.base} (sha256 {trainer.base_sha256[:12]}); start it with the trainer's model.path"
            )
        if trainer.tokenizer_sha256 != self._model.tokenizer.sha256:
            return (
                f"the tokenizer of this server has the sha256 {self._model.tokenizer.sha256[:12]}, the trainer's "
                f"{trainer.tokenizer_sha256[:12]}; give both the same tokenizer files"
            )
        if trainer.max_context > self._engine.max_context:
            return (
                f"this server has a context of {self._engine.max_context} tokens, the trainer asks for up to "
                f"{trainer.max_context}; start it with engine.max_context={trainer.max_context}"
            )
        return ""

    async def _claim(self, trainer: JoinBody, before: Claim | None) -> Claim:
        policy = trainer.policy
        if before is not None and before.is_fresh and before.owner != trainer.owner:
            raise EngineFull(
                f"this server samples {policy} for {before.owner}; stop that run, or train a policy of another name"
            )
        if policy in self._kept.state.highest or policy == BASE:
            raise Unavailable(
                f"{policy} is an adapter that operators have loaded on this server; unload it and restart the server "
                "with server.state=off, or train a policy of another name"
            )
        self._claims.pop(policy, None)
        try:
            self._table.forget(policy)
        except AdapterError as error:
            raise EngineFull(f"{error}; ask again in a moment") from error
        await self._engine.reset_caches()
        claim = Claim(session=trainer.session, owner=trainer.owner, policy=policy, seen=time.monotonic())
        self._claims[policy] = claim
        logger.info("samples %s for %s", policy, claim.owner)
        return claim

    def _claim_of(self, session: str) -> Claim:
        for claim in self._claims.values():
            if claim.session == session:
                return claim
        raise Unavailable("this session has not joined, or another trainer has taken its place; join again")

    def _held(self, claim: Claim) -> dict[int, str]:
        """Versions that new requests may ask for."""
        cards = {card.version for card in self._table.cards() if card.name == claim.policy}
        return {version: digest for version, digest in claim.digests.items() if version in cards}
