"""Policy nets in memory, their versions, and actions of rows of observations.

No state of an environment is kept here: hidden states travel with the client. Passes are work of the class of vectors
on the device thread; requests that wait while it is busy go into one pass.
Axes: N rows.
"""

import asyncio
import io
import json
import logging
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from parallm.checkpoint.untrusted_files import check_safetensors
from parallm.device.thread import DeviceThread
from parallm.errors import (
    AdapterError,
    EngineFull,
    FolderInUse,
    InvalidRequest,
    ModelError,
    NotFinite,
    NotStored,
    UnknownModel,
)
from parallm.model.adapters.names import is_number, versioned
from parallm.model.policy_nets.config import PolicyConfig, read_config, read_signature
from parallm.model.policy_nets.net import PolicyNet
from parallm.tasks.distributions import distribution, uniforms_of
from parallm.tasks.net_folder import NetFolder, StoredNet, StoredNets, digest_of
from parallm.tensors import NUMPY_TYPES, Actions, ActRequest, Array, Arrays, PolicyCard, Signature, TensorSpec
from parallm.types import BASE, BEST, LATEST, POLICY

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.:-]{0,127}")
KEPT_VERSIONS = 16
"""Versions of a name in memory; a pinned version stays usable while so many newer ones are published."""
UNIT_WORK = 1 << 28
"""Multiplications of a unit on the device thread: some 10 ms of a CPU."""
UNIT_NUMBERS = 1 << 24
"""Numbers of the largest array of a unit."""
NUMBERS_ON_LOOP = 1 << 14
"""Outputs of the actor above which actions are drawn on a thread: some 5 ms."""
logger = logging.getLogger(__name__)
CONFIG, SIGNATURE, WEIGHTS = "config.json", "signature.json", "model.safetensors"


@dataclass(frozen=True, slots=True)
class _Form:
    """What a net is, read and as texts."""

    config: PolicyConfig
    signature: Signature
    config_text: str
    signature_text: str | None


@dataclass(slots=True, eq=False)
class _Job:
    """A request on its way. Its outputs are written on the device thread."""

    inputs: Arrays
    num_rows: int
    outputs: Mapping[str, Array] | None = None
    error: Exception | None = None
    is_cancelled: bool = False

    @property
    def is_done(self) -> bool:
        return self.outputs is not None or self.error is not None


@dataclass(frozen=True, slots=True, eq=False)
class _Version:
    name: str
    number: int
    net: PolicyNet
    form: "_Form"
    digest: str
    """SHA-256 of its safetensors file."""
    waiting: deque[_Job] = field(default_factory=deque)

    @property
    def stored(self) -> StoredNet:
        return StoredNet(self.name, self.number, self.digest, self.form.config_text, self.form.signature_text)

    @property
    def unit_rows(self) -> int:
        config, size = self.net.config, max(1, self.net.num_bytes // 4)
        return max(1, min(UNIT_WORK // size, UNIT_NUMBERS // config.widest))

    def units(self, job: _Job) -> Iterator[Mapping[str, Array] | None]:
        """Compute whatever waits for this version, until `job` is done; yield its outputs last."""
        while not job.is_done:
            yield from self._pass()
        if job.error is not None:
            raise job.error
        yield job.outputs

    def _pass(self) -> Iterator[None]:
        jobs = self._taken()
        if not jobs:
            yield None  # another request's unit computes it
            return
        try:
            inputs = _joined([job.inputs for job in jobs], [job.num_rows for job in jobs], self.net.signature)
            num_rows = sum(job.num_rows for job in jobs)
            parts = []
            for start in range(0, num_rows, self.unit_rows):
                rows = slice(start, start + self.unit_rows)
                parts.append(self.net.run({name: array[rows] for name, array in inputs.items()}))
                yield None
        except Exception as error:  # noqa: BLE001  raised where each of the requests is awaited
            for job in jobs:
                job.error = error
            return
        start = 0
        for job in jobs:
            rows = slice(start, start + job.num_rows)
            job.outputs = {name: np.concatenate([part[name] for part in parts])[rows] for name in parts[0]}
            start += job.num_rows

    def _taken(self) -> list[_Job]:
        """Remove from the queue what fits into a unit, at least one request."""
        jobs: list[_Job] = []
        num_rows = 0
        while self.waiting and (not jobs or num_rows + self.waiting[0].num_rows <= self.unit_rows):
            job = self.waiting.popleft()
            if not job.is_cancelled:
                jobs.append(job)
                num_rows += job.num_rows
        return jobs


class Actor:
    """Versions of policy nets by name, and their answers. Used on the asyncio thread.

    A version is published by moving a pointer; requests that run keep theirs. Of each name the newest `KEPT_VERSIONS`
    stay in memory. What clients change is on the disk before it holds, where there is a folder.
    """

    def __init__(
        self, device: DeviceThread, *, max_names: int, max_waiting: int, folder: NetFolder | None = None
    ) -> None:
        self._device = device
        self._folder = folder
        self._changed: set[str] = set()
        """Names that clients have changed, in this process or before it."""
        self._unstored: dict[str, bytes] = {}
        """Weights that the disk does not have, by their digests."""
        self._max_names = max_names
        self._max_waiting = max_waiting
        self._num_waiting = 0
        self._versions: dict[str, dict[int, _Version]] = {}
        self._highest: dict[str, int] = {}  # numbers do not come again after `unload`
        self._lock = asyncio.Lock()  # versions of a name are published in the order of the requests

    async def load(self, folders: Mapping[str, str]) -> None:
        """Serve what clients have left in an earlier process, then the net in each folder under its name, unless they
        have changed that name. Raises ModelError, CheckpointError."""
        await self._restore()
        for name, where in folders.items():
            if name in self._changed:
                logger.info("%s is as clients have left it, not as tasks.policies.%s=%s", name, name, where)
                continue
            try:
                await self._publish(name, *await asyncio.to_thread(_read_folder, Path(where).expanduser()))
            except (ModelError, InvalidRequest) as error:
                raise ModelError(f"tasks.policies.{name}={where}: {error}") from error

    async def publish(self, name: str, weights: bytes) -> PolicyCard:
        """Publish a safetensors file as the next version of `name`, and serve it.

        Its metadata may have the texts `config` and `signature`, as config.json and signature.json; without `config`
        it is a net as the served version. Raises InvalidRequest, FolderInUse, NotStored.
        """
        try:
            return await self._publish(name, weights, None, None, is_of_client=True)
        except ModelError as error:
            raise InvalidRequest(str(error)) from error

    async def unload(self, model: str) -> None:
        """Forget `agent`, or one version `agent@3`; requests that run finish on it. Raises UnknownModel, FolderInUse,
        NotStored, InvalidRequest for the version that the bare name means."""
        async with self._lock:
            version, (name, at, _) = self._find(model), model.partition("@")
            if at and version.number == max(self._versions[name]):
                raise InvalidRequest(f"{name} means {model}; forget all of {name}, or publish another version", "name")
            left = {number: kept for number, kept in self._versions[name].items() if at and number != version.number}
            await self._change(name, left, self._highest[name], is_of_client=True)

    def cards(self) -> tuple[PolicyCard, ...]:
        return tuple(self._card(version) for versions in self._versions.values() for version in versions.values())

    def card(self, model: str) -> PolicyCard:
        """Return the card of `agent`, its newest version, or `agent@3`. Raises UnknownModel."""
        return self._card(self._find(model))

    def elsewhere(self, model: str) -> str | None:
        """Return where to ask a policy net that a route of language models was asked for; None for other names."""
        name = model.partition("@")[0]
        return f"{name} is a policy net; ask /v1/rl/act or /v1/predict" if name in self._versions else None

    def signature(self, model: str) -> Signature:
        """Return the inputs and outputs of a version. Raises UnknownModel."""
        return self._find(model).net.signature

    async def predict(self, model: str, inputs: Arrays, outputs: Sequence[str]) -> Arrays:
        """Return these outputs of the signature. Raises as `run`."""
        found = await self.run(model, inputs)
        return {name: found[name] for name in outputs}

    async def run(self, model: str, inputs: Arrays) -> Arrays:
        """Return all outputs of the net for arrays of equally many rows, by the names of its inputs.

        Raises UnknownModel, EngineFull, NotFinite.
        """
        version = self._find(model)
        if self._num_waiting >= self._max_waiting:
            raise EngineFull(f"{self._num_waiting} requests for actions wait; send this one again later")
        job = _Job(inputs, len(next(iter(inputs.values()))))
        version.waiting.append(job)
        self._num_waiting += 1
        try:
            outputs = await asyncio.wrap_future(self._device.encode(version.units(job)))
        finally:
            job.is_cancelled = True
            self._num_waiting -= 1
        assert outputs is not None, "units end with the outputs"
        _check_finite(model, outputs)
        return outputs

    async def act(self, request: ActRequest) -> Actions:
        """Return an action for each row. Raises as `run`, and InvalidRequest for an entropy without a closed form."""
        version = self._find(request.model)
        outputs = await self.run(request.model, request.inputs)
        draw = partial(_actions, version.net.config, version.net.signature, outputs, request)
        num_numbers = len(request.seeds_N) * version.net.config.num_outputs
        actions = draw() if num_numbers <= NUMBERS_ON_LOOP else await asyncio.to_thread(draw)
        found = {"actions": actions.actions, "log-probs": actions.log_probs_N, "entropy": actions.entropy_N}
        _check_finite(request.model, {name: array for name, array in found.items() if array is not None})
        return actions

    async def _restore(self) -> None:
        if self._folder is None:
            return
        folder = self._folder
        try:
            stored = await asyncio.to_thread(folder.read)
        except FolderInUse as error:
            logger.warning("policy nets of earlier processes are not restored: %s", error)
            return
        self._highest, self._changed = dict(stored.highest), set(stored.highest)
        for one in stored.nets:
            weights = await asyncio.to_thread(folder.weights, one)
            try:
                form = await asyncio.to_thread(_read_form, weights, one.config, one.signature)
                assert form is not None, "its config was stored"
                net = await asyncio.wrap_future(
                    self._device.call(partial(PolicyNet, form.config, form.signature, weights))
                )
            except ModelError as error:
                raise folder.unreadable(error) from error
            versions = self._versions.setdefault(one.name, {})
            versions[one.version] = _Version(one.name, one.version, net, form, one.digest)
        if stored.nets:
            names = ", ".join(versioned(name, max(versions)) for name, versions in self._versions.items())
            logger.info("restored the policy nets %s from %s", names, folder.folder)

    async def _change(self, name: str, versions: dict[int, _Version], highest: int, *, is_of_client: bool) -> None:
        """Let these be the versions of a name, on the disk before in memory. Under the lock. Raises NotStored."""
        changed = self._changed | ({name} if is_of_client else set())
        nets, numbers = {**self._versions, name: versions}, {**self._highest, name: highest}
        if self._folder is not None and is_of_client:
            kept = tuple(version.stored for other in sorted(changed) for version in nets.get(other, {}).values())
            stored = StoredNets(kept, {other: numbers[other] for other in sorted(changed)})
            added = {net.digest: self._unstored[net.digest] for net in kept if net.digest in self._unstored}
            try:
                await asyncio.to_thread(self._folder.commit, stored, added.values())
            except OSError as error:
                raise NotStored(f"{name} is as it was: {self._folder.folder} cannot be written: {error}") from error
            self._unstored = {digest: content for digest, content in self._unstored.items() if digest not in added}
        self._versions, self._highest, self._changed = nets, numbers, changed
        if not versions:
            del self._versions[name]

    async def _publish(
        self, name: str, weights: bytes, config: str | None, signature: str | None, *, is_of_client: bool = False
    ) -> PolicyCard:
        self._check_name(name)
        form = await asyncio.to_thread(_read_form, weights, config, signature)
        digest = await asyncio.to_thread(digest_of, weights)
        async with self._lock:
            self._check_name(name)
            served = self._versions.get(name, {})
            if form is None and not served:
                raise ModelError(
                    "nothing says what the net is; put the text of its config.json into the metadata of the file as "
                    '"config"'
                )
            form = form or served[max(served)].form
            net = await asyncio.wrap_future(self._device.call(partial(PolicyNet, form.config, form.signature, weights)))
            number = self._highest.get(name, 0) + 1
            version = _Version(name, number, net, form, digest)
            if self._folder is not None:
                self._unstored[digest] = weights
            kept = dict(sorted(self._versions.get(name, {}).items())[-KEPT_VERSIONS + 1 :])
            await self._change(name, {**kept, number: version}, number, is_of_client=is_of_client)
            return self._card(version)

    def _check_name(self, name: str) -> None:
        if not NAME.fullmatch(name) or name in (BASE, POLICY, LATEST, BEST):
            raise InvalidRequest(
                f"{name[:100]!r} cannot be the name of a policy net: letters, digits and _ . : - make one, and "
                f"{BASE}, {POLICY}, {LATEST} and {BEST} mean others",
                "name",
            )
        if name not in self._versions and len(self._versions) >= self._max_names:
            raise InvalidRequest(
                f"{len(self._versions)} policy nets are loaded, the limit; unload one or raise server.max_adapters",
                "name",
            )

    def _find(self, model: str) -> _Version:
        name, at, ending = model.partition("@")
        versions = self._versions.get(name, {})
        if not versions:
            names = ", ".join(self._versions) or "none; PUT one to /v1/rl/policies/NAME, or set tasks.policies.NAME"
            raise UnknownModel(
                f"no policy net {name[:100]!r}; there are {names}. Language models answer at /v1/chat/completions"
            )
        if not at or ending == LATEST:
            return versions[max(versions)]
        number = int(ending) if is_number(ending) and len(ending) < 10 else -1
        if number not in versions:
            present = ", ".join(versioned(name, version) for version in versions)
            raise UnknownModel(f"no version {model[:100]!r}; of {name} there are {present}")
        return versions[number]

    def _card(self, version: _Version) -> PolicyCard:
        return PolicyCard(
            name=version.name,
            version=version.number,
            model_type=version.net.config.model_type,
            signature=version.net.signature,
            num_bytes=version.net.num_bytes,
            is_served=version.number == max(self._versions[version.name]),
        )


def _read_form(weights: bytes, config: str | None, signature: str | None) -> _Form | None:
    """Check a safetensors file, and return what its metadata, or the given texts, say of the net; None: nothing.

    Raises ModelError.
    """
    try:
        check_safetensors(io.BytesIO(weights), len(weights))
    except AdapterError as error:
        raise ModelError(str(error)) from error
    header = json.loads(weights[8 : 8 + int.from_bytes(weights[:8], "little")])
    metadata = {name: text for name, text in (header.get("__metadata__") or {}).items() if isinstance(text, str)}
    config = metadata.get("config") if config is None else config
    signature = metadata.get("signature") if signature is None else signature
    if config is not None:
        read = read_config(config)
        return _Form(read, read_signature(signature, read), config, signature)
    if signature is not None:
        raise ModelError('"signature" belongs to a "config"; send both in the metadata of the file, or none')
    return None


def _read_folder(folder: Path) -> tuple[bytes, str, str | None]:
    """Return the weights, the configuration and the signature in a folder. Raises ModelError."""
    try:
        signature = (folder / SIGNATURE).read_text() if (folder / SIGNATURE).is_file() else None
        return (folder / WEIGHTS).read_bytes(), (folder / CONFIG).read_text(), signature
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"a policy net is a folder with {CONFIG} and {WEIGHTS}: {error}") from error


def _joined(inputs: Sequence[Arrays], sizes: Sequence[int], signature: Signature) -> dict[str, Array]:
    """Return the rows of all requests, those of absent hidden states as zeros."""
    specs = [spec for spec in signature.inputs if any(spec.name in given for given in inputs)]
    parts = {
        spec.name: [given.get(spec.name, _zeros(spec, size)) for given, size in zip(inputs, sizes, strict=True)]
        for spec in specs
    }
    return {name: np.concatenate(arrays) for name, arrays in parts.items()}


def _zeros(spec: TensorSpec, num_rows: int) -> Array:
    return np.zeros((num_rows, *spec.shape[1:]), NUMPY_TYPES[spec.datatype])


def _actions(config: PolicyConfig, signature: Signature, outputs: Arrays, request: ActRequest) -> Actions:
    chances = distribution(config, outputs)
    with np.errstate(over="ignore", invalid="ignore"):  # the caller checks what is not finite
        sample = chances.mode() if request.is_deterministic else chances.sample(uniforms_of(request.seeds_N))
        return Actions(
            actions=chances.action(sample),
            clipped=chances.clipped(sample),
            log_probs_N=chances.log_prob(sample).astype(np.float32),
            entropy_N=chances.entropy().astype(np.float32) if request.wants_entropy else None,
            values_N=outputs.get("value"),
            hidden={spec.name: outputs[spec.name] for spec in signature.hidden},
        )


def _check_finite(model: str, outputs: Arrays) -> None:
    for name, array in outputs.items():
        finite_N = np.isfinite(array).reshape(len(array), -1).all(axis=1)
        if not finite_N.all():
            raise NotFinite(f"{model} computes values that are not finite: {name} of row {int(finite_N.argmin())}")
