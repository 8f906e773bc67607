"""Protocols of the rest of the program: what the server needs of the engine, tokenizer, adapters, training and device.

`run/` passes the objects that satisfy them. The server imports neither MLX nor the trainer; tests pass small stand-ins.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np

from parallm.conversation import ChatPrompt, GrammarSource, PromptEnd, Section, ToolCall
from parallm.registry.records import Loaded, Named, Overlay
from parallm.reports import TrajectoryReport
from parallm.server.control.replica_schemas import JoinAnswer, JoinBody, ReceivedVersion
from parallm.tensors import Actions, ActRequest, Arrays, PolicyCard, Signature
from parallm.types import (
    AdapterCard,
    Completion,
    EncodeRequest,
    EngineStats,
    GenerationRequest,
    GivenTrajectory,
    GivenUpdate,
    Grammar,
    Message,
    RecentTrajectory,
    ScoringRequest,
    TaskSpec,
    TokenEvent,
    TrajectoryState,
)


class EngineClient(Protocol):
    """Interface of `engine.async_engine.AsyncEngine`. Routes generate through `EngineGateway` only."""

    @property
    def max_context(self) -> int: ...
    @property
    def is_alive(self) -> bool: ...

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        """Return all `n` completions. Cancelling the caller aborts the request."""

    def stream(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        """Yield events of all `n` completions, interleaved. Closing it aborts the request."""

    def coalesce(self, seconds: float) -> None:
        """Let events of streams come together, every `seconds`, but first and last ones; 0: as tokens are sampled."""

    def completions(self, requests: Sequence[GenerationRequest]) -> AsyncGenerator[tuple[int, Completion], None]:
        """Yield each completion as soon as it ends, with the index of its request. Closing it aborts the requests."""

    def stats(self) -> EngineStats: ...

    async def ping(self) -> None:
        """Return when the device thread has come by. Raises EngineStopped."""

    async def cancel(self, request_ids: Collection[str]) -> int:
        """End requests: they answer with their tokens so far, and `abort` as the reason. Returns how many ran."""

    async def pause(self) -> None:
        """Freeze serving traffic until `resume`."""

    async def resume(self) -> None: ...

    async def reset_caches(self) -> None:
        """Forget what only saves work."""


class OutputReader(Protocol):
    """Splits the text of one answer into sections, without the marks between them."""

    def read(self, text: str) -> list[tuple[Section, str]]: ...
    def finish(self) -> list[tuple[Section, str]]: ...


class OutputFormat(Protocol):
    """Interface of `model.chat.output.OutputFormat`: how a model marks reasoning and tool calls in its text."""

    @property
    def marks(self) -> tuple[str, ...]:
        """All texts that begin or end a section."""

    @property
    def reasoning_marks(self) -> tuple[str, str] | None:
        """Marks before and after reasoning; None if the model has none."""

    @property
    def tool_marks(self) -> tuple[str, str] | None:
        """Marks before and after a tool call; None if the model's notation is unknown."""

    def reader(self, *, begins_in_reasoning: bool, has_tools: bool) -> OutputReader: ...
    def parse_calls(self, text: str, tools: Sequence[Mapping[str, object]]) -> list[ToolCall]: ...


class Tokenizer(Protocol):
    """Interface of `model.chat.tokenizer.ChatTokenizer`."""

    @property
    def output(self) -> OutputFormat: ...
    @property
    def template_variables(self) -> frozenset[str]:
        """Variables of the chat template that a client may set."""

    @property
    def template_source(self) -> str:
        """The chat template, that for calls of tools if there are several; empty without one."""

    @property
    def end_token(self) -> int:
        """Token that ends a plain text."""

    @property
    def max_token_length(self) -> int:
        """Characters of the longest token."""

    def token_text(self, token: int) -> str:
        """Return the text of one token, special tokens shown."""

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> tuple[int, ...]: ...
    def encode_more(self, text: str) -> tuple[int, ...]:
        """Return the tokens of text that follows other text."""

    def encode_chat(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the tokens of plain messages and of the beginning of an answer. Raises InvalidRequest."""

    def encode_answer(self, messages: Sequence[Message], answer: str) -> tuple[int, ...]:
        """Return the tokens of the answer after that beginning, its end token included. Raises InvalidRequest."""

    def encode_prompt(
        self,
        turns: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] = (),
        variables: Mapping[str, object] | None = None,
        end: PromptEnd = "answer",
    ) -> ChatPrompt: ...
    def compile_grammar(self, source: GrammarSource, *, reasoning: bool | None = None) -> Grammar:
        """Compile within about a second. Raises InvalidRequest.

        `reasoning`: the text begins inside reasoning (True), may begin with it (False), or has none (None).
        """

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str: ...


class Adapters(Protocol):
    """Interface of `checkpoint.adapter_store.AdapterStore`.

    All changes raise AdapterError, UnknownModel, and NotStored or FolderInUse where they could not outlive the process.
    """

    async def load(self, name: str, path: str) -> AdapterCard:
        """Load a folder as the next version of `name` and serve it. Raises AdapterMissing, too."""

    async def upload(self, name: str, archive: bytes) -> AdapterCard: ...

    async def update(self, name: str, weights: bytes) -> AdapterCard:
        """Publish the served version with these tensors in place of its own as the next version."""

    async def unload(self, name: str, version: int | None = None) -> None: ...
    async def promote(self, name: str, version: int) -> None: ...
    async def roll_back(self, name: str) -> int: ...
    async def set_alias(self, alias: str, name: str, version: int) -> None: ...
    async def remove_alias(self, alias: str, name: str) -> None: ...
    async def archive(self, model: str) -> tuple[AdapterCard, bytes]:
        """Return a version with a zip archive of its files. Raises UnknownModel, AdapterError."""

    async def set_splits(self, splits: Mapping[str, Mapping[str, float]]) -> None:
        """Keep the models of these splits in memory, and nothing for the sake of splits before."""

    @property
    def splits(self) -> Mapping[str, Mapping[str, float]]:
        """Splits of an earlier process."""


class ReplicaHost(Protocol):
    """Interface of `distributed.rollout_engines.host.ReplicaHost`: this server as a rollout engine of a trainer.

    All methods raise Unavailable for a session that has not joined.
    """

    async def join(self, trainer: JoinBody, *, is_paused: bool) -> JoinAnswer:
        """Begin or continue a session. Raises Unavailable for a trainer that this server cannot sample for."""

    async def receive(self, session: str, version: int, content: bytes) -> ReceivedVersion:
        """Publish a version under this number. Raises AdapterError."""

    def digests(self, session: str) -> Mapping[int, str]:
        """Return the digest of each version that the session has sent, also of those that come later."""

    def leave(self, session: str) -> None: ...


Rate: TypeAlias = Callable[[Sequence[ScoringRequest]], Awaitable[list[float]]]
"""Returns the scores of all completions, in the order of the prompts and of each prompt's completions."""
RewardModels: TypeAlias = Mapping[str, Rate]


class Encoder(Protocol):
    """Interface of `tasks.encoder.Encoder`: vectors, scores and labels of texts."""

    @property
    def vocabulary_size(self) -> int: ...

    def spec(self, model: str) -> TaskSpec:
        """Return what `model` makes of texts. Raises UnknownModel, Unavailable."""

    def encode_text(self, text: str, spec: TaskSpec) -> tuple[int, ...]:
        """Return the token ids of a text as the model reads it."""

    def encode_pairs(
        self,
        spec: TaskSpec,
        query: str,
        documents: Sequence[str],
        *,
        instruction: str | None = None,
        limit: int,
        document_limit: int | None = None,
        cuts: bool = False,
    ) -> list[tuple[tuple[int, ...], int]]:
        """Return the token ids of each pair, and how many of them belong to the query. Raises InvalidRequest."""

    def end_token(self, spec: TaskSpec) -> int | None:
        """Return the token that every row has to end with; None: any."""

    def frame(self, spec: TaskSpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the tokens before and after each text that `encode_text` encodes."""

    async def encode(self, request: EncodeRequest) -> np.ndarray:
        """Return a vector, or a number for each label, for each row, float32.

        Raises InvalidRequest, UnknownModel, EngineFull, NotFinite.
        """

    async def encode_tokens(self, request: EncodeRequest, *, max_bytes: int) -> list[np.ndarray]:
        """Return the hidden states (T, D) of each row's tokens, float32. Raises as `encode`."""


class TensorModels(Protocol):
    """Interface of `tasks.actor.Actor` and `tasks.predictor.Predictor`: named arrays through a model."""

    def signature(self, model: str) -> Signature:
        """Return the inputs and outputs of an exact version. Raises UnknownModel, Unavailable."""

    async def predict(self, model: str, inputs: Arrays, outputs: Sequence[str]) -> Arrays:
        """Return these outputs. Raises UnknownModel, Unavailable, InvalidRequest, EngineFull, NotFinite."""


class Predictor(TensorModels, Protocol):
    """Interface of `tasks.predictor.Predictor`: arrays through the language model."""

    async def prepare(self) -> None:
        """Learn the sizes of signatures. Called before them."""


class Actor(TensorModels, Protocol):
    """Interface of `tasks.actor.Actor`: policy nets and their actions."""

    def cards(self) -> tuple[PolicyCard, ...]:
        """Return every version in memory."""

    def card(self, model: str) -> PolicyCard:
        """Return the card of `agent`, its newest version, or of `agent@3`. Raises UnknownModel."""

    async def publish(self, name: str, weights: bytes) -> PolicyCard:
        """Publish a safetensors file as the next version of `name`. Raises InvalidRequest, FolderInUse, NotStored."""

    async def unload(self, model: str) -> None:
        """Forget all of a name, or one version. Raises UnknownModel, InvalidRequest, FolderInUse, NotStored."""

    async def act(self, request: ActRequest) -> Actions:
        """Return an action for each row. Raises UnknownModel, InvalidRequest, EngineFull, NotFinite."""


class Models(Protocol):
    """The models of the catalogue beside the process's own, whose names are those of `Service.catalog`.

    Requests that load a model by its name do so before they reach a route. Methods raise UnknownModel for a name that
    is not registered, InvalidRequest for what is no name, and NotStored.
    """

    @property
    def folder(self) -> Path:
        """Return the folder of this user's catalogue, blobs and created models."""

    async def names(self) -> tuple[Named, ...]: ...
    async def describe(self, name: str) -> Named: ...
    def loaded(self) -> tuple[Loaded, ...]:
        """Return what is in memory, on its way there or out of it."""

    async def load(self, name: str, *, keep_alive: float | None = None, is_pinned: bool | None = None) -> None:
        """Return when the model is in memory. Raises ModelError, NoMemory.

        It stays for `keep_alive` seconds after its last request; negative: until its memory is needed, None: as the
        settings say. A pinned one stays until it is unloaded; None leaves a pin as it is.
        """

    async def unload(self, name: str) -> None:
        """Return when the model has left memory, after its answers have ended. Raises Unavailable for the process's
        own model."""

    async def copy(self, source: str, destination: str) -> None:
        """Let `destination` mean what `source` means."""

    async def delete(self, name: str) -> None:
        """Forget a name, and with its last name the files of a model that was created here."""

    async def create(self, name: str, source: str, overlay: Overlay | None = None) -> Named:
        """Let `name` mean a name, a hub id in the cache or a folder. Raises ModelError."""

    async def scan(self) -> tuple[str, ...]:
        """Register what is on the disk now. Returns the new names."""


class Device(Protocol):
    """Interface of `device.usage.DeviceReport`."""

    def seconds(self) -> Mapping[str, float]:
        """Return the seconds since the start by kind of work."""

    def memory(self) -> Mapping[str, int]:
        """Return the bytes of arrays: `active`, `peak`, `cache`."""

    def usage(self) -> Mapping[str, float]:
        """Return the shares of the last second in which `process`, `machine` and `accelerator` were busy, if known."""

    def shares(self) -> Mapping[str, float]:
        """Return `serving_share`, `engine_share` and, if there is one, `serving_latency_target`."""

    def set_shares(
        self, *, serving_share: float | None, engine_share: float | None, serving_latency_target: float | None
    ) -> None:
        """Change settings; None leaves one as it is, a target of 0 ends the target."""


class Training(Protocol):
    """Interface of `run.policy_runs.TrainingControl`, for one policy or all. Raises UnknownModel, Unavailable."""

    def pause(self, policy: str | None) -> None:
        """Begin no further step after the present one."""

    def resume(self, policy: str | None) -> None: ...

    async def step(self, policy: str | None, checkpoint_name: str | None = None) -> Mapping[str, str]:
        """Wait for a new step where training is paused, which it stays, or else for the present step.

        Then save under `checkpoint_name`, if given. Returns the folders by policy. Raises InvalidRequest,
        CheckpointError.
        """

    async def train_on(
        self, policy: str | None, given: Sequence[GivenTrajectory], *, serve: bool | None, checkpoint_name: str | None
    ) -> GivenUpdate:
        """Make one update on `given` after the present step. Raises InvalidRequest, CheckpointError."""

    async def checkpoint(self, policy: str | None) -> Mapping[str, str]:
        """Save after the present step. Returns the folders by policy. Raises CheckpointError."""

    async def evaluate(self, policy: str | None) -> Mapping[str, Mapping[str, Any]]:
        """Evaluate the newest versions after the present step. Returns rows of `evaluations.jsonl` by policy.

        Raises EnvironmentFailed.
        """

    async def stop(self, policy: str | None) -> None:
        """End training after the present step, save, and serve on. Raises TrainingStopped if it ended by an error."""


class Trajectories(Protocol):
    """Interface of `rollout.live.traffic.LiveSource`, for one policy that learns from clients."""

    def check(self, request: GenerationRequest, scoring_function: str | None, metadata: Mapping[str, Any]) -> None:
        """Raise InvalidRequest for what could not be trained on, and Unavailable when training has ended."""

    def record(
        self,
        trajectory_id: str,
        request: GenerationRequest,
        completion: Completion,
        scoring_function: str | None,
        metadata: Mapping[str, Any],
    ) -> bool:
        """Take a completion of a checked request. Return False if nothing can be learned from it."""

    def knows(self, trajectory_id: str) -> bool:
        """Return whether a trajectory has this id, or had it not long ago."""

    def reward(self, trajectory_id: str, reward: float | Mapping[str, float]) -> float:
        """Return the sum of the reward's parts. Raises UnknownTrajectory, Unavailable, InvalidRequest."""

    async def written(self) -> None:
        """Wait until all completions and rewards so far are on disk. Raises NotStored."""

    def report(self) -> TrajectoryReport: ...
    def recent(self, state: TrajectoryState | None, limit: int) -> list[RecentTrajectory]:
        """Return up to `limit` of what clients have marked, the newest first; of `state` alone, if one is given."""

    def listen(self, on_reward: Callable[[str, float], None]) -> None:
        """Call `on_reward` with the id and the sum of each reward from now on, those of scoring functions included."""
