"""One server among the rollout engines of a trainer: whether it is there, the versions that it holds, what it proves.

`EnginePool` chooses it by its free rows. The server may end and come back at any time: it is asked again and again, and
gets the current version before the first request.
"""

import asyncio
import itertools
import logging
import math
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import partial

from parallm.device.thread import DeviceThread
from parallm.distributed.rollout_engines.check import PROOF_TOKENS, Parity, Rescorer, disproof, fault_of
from parallm.distributed.rollout_engines.replica_client import EngineLost, EngineRefused, ReplicaClient
from parallm.errors import UnknownModel
from parallm.model.adapters.adapter import Adapter, Key
from parallm.model.adapters.names import latest_of, of_alias, versioned
from parallm.model.adapters.table import AdapterTable
from parallm.model.adapters.transfer import to_bytes
from parallm.server.control.replica_schemas import JoinAnswer, JoinBody, SampleBody, SampledCompletion
from parallm.types import BASE, LATEST, Completion, GenerationRequest

PRESENT_SECONDS, ABSENT_SECONDS = 1.0, 1.0
"""Time between two signs of life, and between two tries to join."""

logger = logging.getLogger(__name__)


class Versions:
    """The versions of one policy in this process, to be sent. Used on the asyncio thread."""

    def __init__(self, table: AdapterTable, policy: str, device: DeviceThread) -> None:
        self.policy = policy
        self.digests: dict[int, str] = {0: ""}
        """Digest of each version so far; empty for the base."""
        self._table = table
        self._device = device
        self._contents: dict[Key, asyncio.Future[bytes]] = {}

    def adapter(self, model: str) -> Adapter | None:
        """Return the version that `model` means now; None: the base. Raises UnknownModel."""
        adapter = self._table.resolve(model)
        self.digests[0 if adapter is None else adapter.version] = "" if adapter is None else adapter.digest
        return adapter

    @property
    def newest(self) -> Adapter | None:
        return self.adapter(of_alias(LATEST, self.policy))

    @property
    def served(self) -> Adapter | None:
        """The version that clients get by the policy's name."""
        return self.adapter(self.policy)

    async def content(self, adapter: Adapter) -> bytes:
        """Return the bytes of a version, made once for all servers."""
        if adapter.key not in self._contents:
            made = asyncio.wrap_future(self._device.call(partial(to_bytes, adapter)))
            self._contents = {**dict(list(self._contents.items())[-1:]), adapter.key: made}
        return await asyncio.shield(self._contents[adapter.key])


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """The facts about this process that all replicas of a pool share."""

    facts: JoinBody
    """`served` is filled in."""
    versions: Versions
    rescorer: Rescorer
    vocabulary_size: int
    dtype: str


@dataclass(slots=True)
class Account:
    """The counts of one engine since the last step."""

    num_tokens: int = 0
    num_lost: int = 0
    """Requests that it did not answer to the end; they are sampled again."""


class Replica:
    """A server of `rollout.engines`. Its task `run` keeps it joined."""

    def __init__(self, client: ReplicaClient, trainer: Trainer) -> None:
        self.name = client.url
        self.account = Account()
        self.parity = Parity()
        """Since the last step."""
        self.num_taken = 0  # rows of requests under way; written by EnginePool
        self.reason = "not asked yet"
        """Why it is not there."""
        self._client = client
        self._trainer = trainer
        self._answer: JoinAnswer | None = None
        self._is_present = False
        self._held: dict[int, str] = {}  # digest by version
        self._logged: type[Exception] | None = None  # how it was last said to be absent
        self._distrusted, self._fault = "", ""  # the process that is not believed any more, and why
        self._proofs: dict[int, Parity] = {}
        self._others: dict[int, dict[str, Parity]] = {}
        self._syncing, self._proving = asyncio.Lock(), asyncio.Lock()
        self._wake = asyncio.Event()
        self._numbers = itertools.count()

    @property
    def capacity(self) -> int:
        """Rows that may be taken; 0 while it is not there."""
        return self._answer.max_rows if self._is_present and self._answer is not None else 0

    async def run(self, changed: "asyncio.Event") -> None:
        """Keep it joined until cancelled; sets `changed` when its capacity may have."""
        while True:
            self._wake.clear()
            try:
                await self.sync()
            except (EngineLost, EngineRefused) as error:
                self._leave_out(str(error))
                if type(error) is not self._logged:  # else once a second
                    self._logged = type(error)
                    logger.warning("rollouts go on without %s: %s", self.name, self.reason)
            else:
                changed.set()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), PRESENT_SECONDS if self._is_present else ABSENT_SECONDS)

    async def sync(self) -> None:
        """Join, send what clients get and the newest version, and count as present from then on.

        Raises EngineLost, EngineRefused.
        """
        async with self._syncing:
            answer = await self._join()
            versions = self._trainer.versions
            for adapter in (versions.served, versions.newest):
                if adapter is not None and self._held.get(adapter.version) != adapter.digest:
                    await self._send(adapter)
                    answer = await self._join()
            self._answer = answer
            if not self._is_present:
                self._is_present = True
                self._greet(answer)

    async def sample(self, request: GenerationRequest) -> AsyncGenerator[Completion, None]:
        """Yield each completion as soon as it ends and is checked; closing it aborts the request.

        Raises EngineLost or EngineRefused, after which this server is not there until it has joined again.
        """
        versions = self._trainer.versions
        adapter = versions.adapter(request.model)
        try:
            await self._hold(adapter)
            body = SampleBody.of(
                request,
                session=self._trainer.facts.session,
                request_id=f"{request.request_id}-{next(self._numbers)}",
                model=self._model(request, adapter),
            )
            async with aclosing(self._client.sample(body)) as completions:
                async for sampled in completions:
                    await self._check(request, sampled, adapter)
                    self.account.num_tokens += len(sampled.tokens)
                    yield sampled.completion(request.request_id)
        except (EngineLost, EngineRefused) as error:
            self.account.num_lost += 1
            if self._is_present:
                logger.warning("%s is sampled elsewhere: %s", request.request_id, error)
            self._leave_out(str(error))
            self._wake.set()
            raise

    async def leave(self) -> None:
        """Send the last version and end the session."""
        if self._answer is None:
            return
        with suppress(EngineLost, EngineRefused):
            if self._is_present:
                await self.sync()
            await self._client.leave(self._trainer.facts.session)

    async def _join(self) -> JoinAnswer:
        served = self._trainer.versions.served
        facts = self._trainer.facts.model_copy(update={"served": 0 if served is None else served.version})
        answer = await self._client.join(facts)
        if answer.process == self._distrusted:
            raise EngineRefused(f"{self._fault}; restart the server, then it is asked again")
        if self._answer is not None and answer.process != self._answer.process:
            self._is_present = False  # it has come back between two signs of life
        self._held = {int(version): digest for version, digest in answer.versions.items()}
        if self._answer is None or answer.process != self._answer.process:
            self._proofs, self._others = {}, {}
        self._answer = answer
        return answer

    async def _hold(self, adapter: Adapter | None) -> None:
        if adapter is None or self._held.get(adapter.version) == adapter.digest:
            return
        async with self._syncing:
            if self._held.get(adapter.version) != adapter.digest:
                await self._send(adapter)

    async def _send(self, adapter: Adapter) -> None:
        began = time.perf_counter()
        content = await self._trainer.versions.content(adapter)
        received = await self._client.send(self._trainer.facts.session, adapter.version, content)
        if received.digest != adapter.digest:
            self._distrust(f"{self.name} has made the digest {received.digest[:12]} of {adapter.digest[:12]}")
        self._held[adapter.version] = adapter.digest
        logger.debug(
            "sent %s@%d (digest %s, %.1f MB) to %s in %.2f s",
            *(adapter.name, adapter.version, adapter.digest[:12], len(content) / 1e6),
            *(self.name, time.perf_counter() - began),
        )

    def _model(self, request: GenerationRequest, adapter: Adapter | None) -> str:
        if adapter is None:
            return BASE
        follows = request.switches_in_flight and latest_of(request.model) is not None
        return f"{adapter.name}@{LATEST}" if follows else versioned(*adapter.key)

    async def _check(self, request: GenerationRequest, sampled: SampledCompletion, adapter: Adapter | None) -> None:
        """Raise EngineLost for a completion that was cut short there, EngineRefused for one that cannot be believed."""
        if self._answer is None or self._answer.process == self._distrusted:
            raise EngineRefused(self._fault)
        if sampled.finish_reason == "abort":
            raise EngineLost(f"{self.name}: the request was ended there before its time")
        version, digests = 0 if adapter is None else adapter.version, self._trainer.versions.digests
        allowed = {version: digests[version]}
        if request.switches_in_flight:
            allowed = {other: digest for other, digest in digests.items() if other >= version}
        if fault := fault_of(sampled, request, allowed, self._trainer.vocabulary_size):
            self._distrust(f"{self.name}: {fault}")
        await self._prove(request, sampled)

    async def _prove(self, request: GenerationRequest, sampled: SampledCompletion) -> None:
        """Compute the log-probs of the first tokens of each version anew. Raises EngineRefused if they differ."""
        versions = {span.version for span in sampled.weight_versions}
        if len(versions) != 1 or not sampled.tokens:
            return
        (version,) = versions
        async with self._proving:
            proof = self._proofs.setdefault(version, Parity())
            if proof.num_tokens >= PROOF_TOKENS:
                return
            model, *others = self._candidates(version)
            try:
                differences = await self._trainer.rescorer.differences(request, sampled, [model, *others])
            except UnknownModel:  # dropped here meanwhile: too old to be trained on, which the trainer sees
                return
            under_others = self._others.setdefault(version, defaultdict(Parity))
            proof.add(differences[0])
            self.parity.add(differences[0])
            for other, differences_T in zip(others, differences[1:], strict=True):
                under_others[other].add(differences_T)
            if reason := disproof(proof, under_others, model):
                self._distrust(f"{self.name} claims to have sampled with {model}: {reason}")

    def _candidates(self, version: int) -> list[str]:
        """Return the model of a version, and of the one before it, which a server may still use by mistake."""
        policy, digests = self._trainer.versions.policy, self._trainer.versions.digests
        before = max((other for other in digests if other < version), default=None)
        names = [version] if before is None else [version, before]
        return [versioned(policy, number) if digests[number] else BASE for number in names]

    def _greet(self, answer: JoinAnswer) -> None:
        dtype = self._trainer.dtype
        differs = "" if answer.dtype == dtype else f", in {answer.dtype} where this process computes in {dtype}"
        newest = max(self._held, default=0)
        logger.info("%s joins: up to %d rows%s, version %d", self.name, answer.max_rows, differs, newest)
        self.reason, self._logged = "", None

    def _leave_out(self, reason: str) -> None:
        self._is_present, self.reason = False, reason

    def _distrust(self, reason: str) -> None:
        """Believe this process of the server nothing any more. Raises EngineRefused."""
        self._distrusted, self._fault = "" if self._answer is None else self._answer.process, reason
        self._leave_out(reason)
        logger.error("%s; nothing of it is trained on", reason)
        raise EngineRefused(reason)

    def take_figures(self) -> Mapping[str, float]:
        """Return the figures since the last call."""
        name, account, parity = self.name.partition("://")[2], self.account, self.parity
        self.account, self.parity = Account(), Parity()
        checked = parity.num_tokens > 0
        return {
            f"engines/{name}/tokens": account.num_tokens,
            f"engines/{name}/lost_requests": account.num_lost,
            f"engines/{name}/k3": parity.k3 if checked else math.nan,
            f"engines/{name}/mean_abs": parity.mean_abs if checked else math.nan,
        }
