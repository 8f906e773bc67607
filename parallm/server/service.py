"""What the routes need from the rest of the program, as narrow faces: no import of MLX, none of the trainer."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from parallm.conversation import ChatPrompt, GrammarSource, PromptEnd, Section, ToolCall
from parallm.reports import TrainingStatus, TrajectoryReport
from parallm.server.interfaces import Engine
from parallm.server.request_limits import BodyBudget, WorkerPool
from parallm.server.settings import ServerSettings
from parallm.types import (
    AdapterCard,
    Completion,
    GenerationRequest,
    GivenTrajectory,
    GivenUpdate,
    Grammar,
    Message,
    ScoringRequest,
)


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
    def end_token(self) -> int:
        """Token that ends a plain text."""
        ...

    @property
    def max_token_length(self) -> int:
        """No token stands for more characters."""
        ...

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> tuple[int, ...]: ...
    def encode_more(self, text: str) -> tuple[int, ...]:
        """Of text that follows other text."""
        ...

    def encode_chat(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return plain messages and the beginning of an answer. Raises InvalidRequest."""
        ...

    def encode_answer(self, messages: Sequence[Message], answer: str) -> tuple[int, ...]:
        """Return the answer after that beginning, with the token that ends it. Raises InvalidRequest."""
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
    """The face of `checkpoint.adapter_store.AdapterStore` that the server uses.

    All changes raise AdapterError, UnknownModel, and NotStored or FolderInUse where they could not outlive the process.
    """

    async def load(self, name: str, path: str) -> AdapterCard:
        """Load a folder as the next version of `name` and serve it. Raises AdapterMissing, too."""
        ...

    async def upload(self, name: str, archive: bytes) -> AdapterCard: ...

    async def update(self, name: str, weights: bytes) -> AdapterCard:
        """The served version with these tensors in place of its own, as the next version."""
        ...

    async def unload(self, name: str, version: int | None = None) -> None: ...
    async def promote(self, name: str, version: int) -> None: ...
    async def roll_back(self, name: str) -> int: ...
    async def set_alias(self, alias: str, name: str, version: int) -> None: ...
    async def remove_alias(self, alias: str, name: str) -> None: ...
    async def set_splits(self, splits: Mapping[str, Mapping[str, float]]) -> None:
        """Keep the models of these splits in memory, and nothing for the sake of splits before."""
        ...

    @property
    def splits(self) -> Mapping[str, Mapping[str, float]]:
        """Those that an earlier process has left."""
        ...


Rate: TypeAlias = Callable[[Sequence[ScoringRequest]], Awaitable[list[float]]]
"""Scores of all completions, in the order of the prompts and of each prompt's completions."""
RewardModels: TypeAlias = Mapping[str, Rate]


class Device(Protocol):
    """The face of `device.device_report.DeviceReport` that the server uses."""

    def seconds(self) -> Mapping[str, float]:
        """Return seconds by kind of work, since the start."""
        ...

    def memory(self) -> Mapping[str, int]:
        """Bytes of arrays: `active`, `peak`, `cache`."""
        ...

    def usage(self) -> Mapping[str, float]:
        """Return the shares of the last second in which `process`, `machine` and `accelerator` were busy, if known."""
        ...

    def shares(self) -> Mapping[str, float]:
        """Return `serving_share` and `engine_share`."""
        ...

    def set_shares(self, *, serving_share: float | None, engine_share: float | None) -> None:
        """Change the shares; None leaves a share as it is."""
        ...


class Training(Protocol):
    """The face of `training_control.TrainingControl`: one policy, or all. Raises UnknownModel, Unavailable."""

    def pause(self, policy: str | None) -> None:
        """Begin no further step; the present one ends first."""
        ...

    def resume(self, policy: str | None) -> None: ...

    async def step(self, policy: str | None, checkpoint_name: str | None = None) -> Mapping[str, str]:
        """Wait for a new step where training is paused, which it stays, or else for the present step.

        Then save under `checkpoint_name`, if given. Returns the folders by policy. Raises InvalidRequest,
        CheckpointError.
        """
        ...

    async def train_on(
        self, policy: str | None, given: Sequence[GivenTrajectory], *, serve: bool | None, checkpoint_name: str | None
    ) -> GivenUpdate:
        """Make one update on these after the present step. Raises InvalidRequest, CheckpointError."""
        ...

    async def checkpoint(self, policy: str | None) -> Mapping[str, str]:
        """Save after the present step; folders by policy. Raises CheckpointError."""
        ...


class Trajectories(Protocol):
    """The face of `rollout.live.traffic.LiveSource` that the server uses: of one policy that learns from clients."""

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

    def knows(self, trajectory_id: str) -> bool:
        """Whether a trajectory has this id, or had it not long ago."""
        ...

    def reward(self, trajectory_id: str, reward: float | Mapping[str, float]) -> float:
        """Returns the sum. Raises UnknownTrajectory, Unavailable, InvalidRequest."""
        ...

    async def written(self) -> None:
        """Wait until the end of the process would lose no completion and no reward so far. Raises NotStored."""
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
    bodies: BodyBudget
    device: Device | None = None
    trajectories: Mapping[str, Trajectories] = field(default_factory=dict)
    """By policy, of those that learn from what clients ask for."""
    note_trajectory: Callable[[str, GenerationRequest, Completion], None] = lambda *_: None
    """Told of each trajectory's id."""
    reward_models: Callable[[], RewardModels] = dict
    """Loaded reward models, by name."""
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    """Sampling defaults of OpenAI's routes, by the names of their fields."""
    swaps: Callable[[], Mapping[str, int]] = dict
    """How often the bare name of each adapter has come to mean another version."""
    workers: WorkerPool = field(default_factory=WorkerPool)
    routed: Callable[[Sequence[GenerationRequest]], list[GenerationRequest]] = list
    """The requests of one answer, to the models that a split of their name chooses."""
