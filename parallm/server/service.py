"""What the routes need from the rest of the program, as narrow faces: no import of MLX, none of the trainer."""

from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from parallm.conversation import ChatPrompt, GrammarSource, PromptEnd, Section, ToolCall
from parallm.reports import TrainingStatus, TrajectoryReport
from parallm.server.body_budget import BodyBudget
from parallm.server.settings import ServerSettings
from parallm.server.worker_pool import WorkerPool
from parallm.types import AdapterCard, Completion, GenerationRequest, Grammar, TokenEvent, TrafficClass


class EngineLoad(Protocol):
    """Completions that run and requests that wait."""

    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def tokens_total(self) -> Mapping[TrafficClass, int]: ...
    @property
    def kv_bytes(self) -> int: ...
    @property
    def kv_bytes_limit(self) -> int: ...
    @property
    def num_preemptions(self) -> int: ...
    @property
    def prompt_tokens_total(self) -> int: ...
    @property
    def cached_prompt_tokens_total(self) -> int: ...
    @property
    def num_drafts(self) -> int: ...
    @property
    def draft_tokens_total(self) -> int: ...
    @property
    def accepted_draft_tokens_total(self) -> int: ...


class Engine(Protocol):
    """The face of `engine.async_engine.AsyncEngine` that the server uses."""

    @property
    def max_context(self) -> int: ...
    @property
    def is_alive(self) -> bool: ...

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        """All `n` completions. Cancelling the caller aborts the request."""
        ...

    def stream(self, request: GenerationRequest) -> AsyncIterator[TokenEvent]:
        """Events of all `n` completions, interleaved. Closing it aborts the request."""
        ...

    def stats(self) -> EngineLoad: ...

    async def ping(self) -> None:
        """Returns when the device thread has come by. Raises EngineStopped."""
        ...


class SteerableEngine(Engine, Protocol):
    """What `SteeredEngine` needs of the engine beyond that."""

    async def cancel(self, request_ids: Collection[str]) -> int:
        """End requests: they answer with what they have, and `abort` as the reason. Returns how many ran."""
        ...

    async def hold(self) -> None:
        """Freeze serving traffic where it is, until `release`."""
        ...

    async def release(self) -> None: ...

    async def reset_caches(self) -> None:
        """Forget what only saves work."""
        ...


class OutputReader(Protocol):
    """Text of one answer in sections, without the marks between them."""

    def read(self, text: str) -> list[tuple[Section, str]]: ...
    def finish(self) -> list[tuple[Section, str]]: ...


class OutputFormat(Protocol):
    """The face of `model.chat_output.OutputFormat` that the server uses."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Everything that begins or ends a section."""
        ...

    @property
    def tool_marks(self) -> tuple[str, str] | None:
        """None for a model whose notation of tool calls is unknown."""
        ...

    def reader(self, *, begins_in_reasoning: bool, has_tools: bool) -> OutputReader: ...
    def parse_calls(self, text: str, tools: Sequence[Mapping[str, object]]) -> list[ToolCall]: ...


class TokenTexts(Protocol):
    def token_text(self, token: int) -> str:
        """Text of one token, special tokens shown."""
        ...


class Tokenizer(TokenTexts, Protocol):
    """The face of `model.chat.ChatTokenizer` that the server uses."""

    @property
    def output(self) -> OutputFormat: ...
    @property
    def template_variables(self) -> frozenset[str]:
        """What a client may set in the chat template."""
        ...

    @property
    def longest_token(self) -> int:
        """No token stands for more characters."""
        ...

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> tuple[int, ...]: ...
    def encode_more(self, text: str) -> tuple[int, ...]:
        """Of text that follows other text."""
        ...

    def encode_prompt(
        self,
        turns: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] = (),
        variables: Mapping[str, object] | None = None,
        end: PromptEnd = "answer",
    ) -> ChatPrompt: ...
    def compile_grammar(self, source: GrammarSource, *, reasoning: bool | None = None) -> Grammar:
        """Takes up to a second. `reasoning`: the text begins inside of some, or may begin with some; None: it has none.

        Raises InvalidRequest.
        """
        ...

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str: ...


class Adapters(Protocol):
    """The face of `checkpoint.adapter_store.AdapterStore` that the server uses. Raises AdapterError, UnknownModel."""

    async def load(self, name: str, path: str) -> AdapterCard:
        """Load a folder as the next version of `name` and serve it. Raises AdapterMissing, too."""
        ...

    async def upload(self, name: str, archive: bytes) -> AdapterCard: ...

    async def update(self, name: str, weights: bytes) -> AdapterCard:
        """The served version with these tensors in place of its own, as the next version."""
        ...

    def unload(self, name: str, version: int | None = None) -> None: ...
    def promote(self, name: str, version: int) -> None: ...
    def roll_back(self, name: str) -> int: ...
    def set_alias(self, alias: str, name: str, version: int) -> None: ...
    def remove_alias(self, alias: str, name: str) -> None: ...
    def hold(self, models: Iterable[str]) -> None:
        """Keep what these names mean in memory, and nothing of an earlier call."""
        ...


class Training(Protocol):
    """The face of `training_control.TrainingControl`: one policy, or all. Raises UnknownModel, Unavailable."""

    def pause(self, policy: str | None) -> None:
        """Begin no further step; the present one ends first."""
        ...

    def resume(self, policy: str | None) -> None: ...

    async def step(self, policy: str | None) -> None:
        """Wait for one more step: a new one where paused, which stays so, else the one at work."""
        ...

    async def checkpoint(self, policy: str | None) -> Mapping[str, str]:
        """Save after the present step; folders by policy. Raises CheckpointError."""
        ...


class Trajectories(Protocol):
    """The face of `rollout.live.traffic.LiveTraffic` that the server uses: of one policy that learns from clients."""

    def check(self, request: GenerationRequest, scoring_function: str | None, metadata: Mapping[str, Any]) -> None:
        """Raise InvalidRequest for what could not be trained on, and Unavailable when training has ended."""
        ...

    def record(
        self,
        trajectory_id: str,
        request: GenerationRequest,
        completion: Completion,
        scoring_function: str | None,
        metadata: Mapping[str, Any],
    ) -> bool:
        """Take in a completion of a request that `check` let pass; False for one that nothing can be learned from."""
        ...

    def reward(self, trajectory_id: str, reward: float | Mapping[str, float]) -> float:
        """Returns the sum. Raises UnknownTrajectory, Unavailable, InvalidRequest."""
        ...

    def report(self) -> TrajectoryReport: ...
    def listen(self, on_reward: Callable[[str, float], None]) -> None:
        """From now on `on_reward` gets the id and the sum of each reward, those of scoring functions, too."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """Everything that a route may use."""

    engine: Engine
    tokenizer: Tokenizer
    catalog: Callable[[], tuple[AdapterCard, ...]]
    status: Callable[[], TrainingStatus]
    settings: ServerSettings
    base_name: str
    policies: tuple[str, ...]
    """Names that are the base until their first version is published."""
    started: int
    """Unix seconds."""
    device_seconds: Callable[[], Mapping[str, float]]
    """By kind of work, since the start."""
    bodies: BodyBudget
    trajectories: Mapping[str, Trajectories] = field(default_factory=dict)
    """By policy, of those that learn from what clients ask for."""
    note_trajectory: Callable[[str, GenerationRequest, Completion], None] = lambda *_: None
    """Told of each trajectory's id."""
    swaps: Callable[[], Mapping[str, int]] = dict
    """How often the bare name of each adapter has come to mean another version."""
    workers: WorkerPool = field(default_factory=WorkerPool)
    routed: Callable[[Sequence[GenerationRequest]], list[GenerationRequest]] = list
    """The requests of one answer, to the models that a split of their name chooses."""
