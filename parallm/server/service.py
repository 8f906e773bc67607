"""The object that `create_app` takes: what is served, and the state that routes share."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from parallm.jobs.jobs import Jobs
from parallm.metrics.watching import Watching
from parallm.registry.records import Model
from parallm.reports import TrainingStatus
from parallm.server.catalog import card_of, resolved
from parallm.server.control.traffic_splits import TrafficSplits, VersionStatistics
from parallm.server.engine_gateway import CompletionListener, EngineGateway
from parallm.server.interfaces import (
    Actor,
    Adapters,
    Device,
    Encoder,
    EngineClient,
    Models,
    Predictor,
    ReplicaHost,
    RewardModels,
    Tokenizer,
    Training,
    Trajectories,
)
from parallm.server.operation.acts import Act
from parallm.server.operation.auth import StoredKey
from parallm.server.operation.request_metrics import RequestMetrics
from parallm.server.operation.tracing import Traces
from parallm.server.request_limits import MAX_BODIES, MAX_UPLOADS, BodyBudget, WorkerPool
from parallm.server.settings import ServerSettings
from parallm.types import BASE, POLICY, AdapterCard, Completion, GenerationRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnBase:
    """The base that this process was started with, as lists of models show it."""

    model: Model
    num_bytes: int
    """Memory of its weights."""
    is_on_accelerator: bool


@dataclass(slots=True, kw_only=True, eq=False)
class Service:
    """The fields with `init=False` are made from the others. Routes generate through `gateway`, never `engine`."""

    engine: EngineClient
    tokenizer: Tokenizer
    catalog: Callable[[], tuple[AdapterCard, ...]]
    """Adapter versions in memory."""
    status: Callable[[], TrainingStatus]
    settings: ServerSettings
    base_name: str
    policies: tuple[str, ...] = (POLICY,)
    """Names that mean the base until their first version is published."""
    keys: tuple[StoredKey, ...] = ()
    device: Device | None = None
    traces: Traces | None = None
    adapters: Adapters | None = None
    """Store of adapters; without one, its routes answer that this process has none."""
    training: Training | None = None
    """Control of training; without one, its routes answer that this process has none."""
    trajectories: Mapping[str, Trajectories] = field(default_factory=dict)
    """Sources of policies that learn from clients' completions, by policy."""
    sample_stores: Mapping[str, CompletionListener] = field(default_factory=dict)
    """Functions that get each request that a policy has answered, by policy."""
    swaps: Callable[[], Mapping[str, int]] = dict
    """Number of changes of the version that each adapter's bare name means."""
    reward_models: Callable[[], RewardModels] = dict
    """Loaded reward models, by name."""
    encoder: Encoder | None = None
    """Vectors of texts; without one, their route answers that this process makes none."""
    actor: Actor | None = None
    """Policy nets; without one, their routes answer that this process has none."""
    predictor: Predictor | None = None
    """Arrays through the language model; without one, `/v1/predict` knows policy nets alone."""
    replica: ReplicaHost | None = None
    """This server as a rollout engine of a trainer; without one, its routes answer that it cannot be one."""
    base: OwnBase | None = None
    """Description of the base, where `server.ollama` is on."""
    models: Models | None = None
    """Models of the catalogue, which requests load by name; without them this process has one."""
    jobs: Jobs | None = None
    """Files, batches and jobs; without them, their routes answer that this process keeps none."""
    watching: Watching = field(default_factory=Watching)
    """What the watchers of this process see."""
    on_act: Callable[[Act], None] = lambda _: None
    """Gets each act of a client after its answer, on the event loop."""
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    """Sampling defaults of OpenAI's routes, by the names of their fields."""

    started: int = field(init=False)
    """Unix seconds."""
    bodies: BodyBudget = field(init=False)
    uploads: BodyBudget = field(init=False)
    """Adapters and versions on their way into memory."""
    workers: WorkerPool = field(init=False)
    request_metrics: RequestMetrics = field(init=False)
    splits: TrafficSplits = field(init=False)
    statistics: VersionStatistics = field(init=False)
    gateway: EngineGateway = field(init=False)

    def __post_init__(self) -> None:
        self.started = int(time.time())
        self.bodies = BodyBudget(MAX_BODIES * self.settings.max_body_bytes)
        self.uploads = BodyBudget(MAX_UPLOADS * self.settings.max_adapter_bytes, "uploaded adapters")
        self.workers = WorkerPool()
        self.request_metrics = RequestMetrics(self.base_name)
        self.splits = TrafficSplits(self.catalog, self.policies)
        if self.adapters is not None:
            self.splits = TrafficSplits(self.catalog, self.policies, self.adapters.set_splits, self.adapters.splits)
        self.statistics = VersionStatistics(self.catalog)
        for trajectories in self.trajectories.values():
            trajectories.listen(self.statistics.reward_trajectory)
        self.gateway = EngineGateway(
            self.engine,
            settings=self.settings,
            metrics=self.request_metrics,
            catalog=self.catalog,
            traces=self.traces,
            listeners=[self.statistics.count, *([self._record_samples] if self.sample_stores else [])],
        )

    def serves(self, name: str) -> bool:
        """Return whether the base, an adapter or a split has this name."""
        is_own = name in (BASE, *self.policies, *self.splits.all())
        return is_own or card_of(name, self.catalog()) is not None

    def _record_samples(self, request: GenerationRequest, completions: Sequence[Completion]) -> None:
        policy = resolved(request.model, self.catalog(), self.policies).partition("@")[0]
        if policy in self.sample_stores:
            self.sample_stores[policy](request, completions)
