"""Rows of token ids -> vectors, scores and labels, on the shared base or through one of its adapters.

`Encoder` knows what a name makes of texts (`TaskSpec`); `passes.py` computes it. Work is a traffic class of the
governor of its own, cut into passes: no answer that streams waits for a whole request.
Axes: N rows, L labels, D numbers of a row.
"""

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import mlx.core as mx
import numpy as np

from parallm.device.streams import DeviceStreams
from parallm.device.thread import DeviceThread
from parallm.errors import EngineFull, InvalidRequest, ModelError, NotFinite, Unavailable
from parallm.learner.passes.packing import can_pack
from parallm.model.adapters.adapter import REWARD, Adapter
from parallm.model.adapters.table import AdapterTable
from parallm.model.chat.tokenizer import ChatTokenizer
from parallm.model.lora.dora import lora_scaling
from parallm.model.lora.linear import LoraBinding
from parallm.model.lora.single import single_lora
from parallm.model.shared_model import SharedModel
from parallm.model.task_head import Head, Projection, read_head, read_projection
from parallm.model.task_spec import adds_end_token, check_attention, read_task_spec
from parallm.tasks.pairs import INSTRUCTION_PROMPT, encode_pairs
from parallm.tasks.passes import Passes
from parallm.tasks.settings import TaskSettings
from parallm.tasks.templates import FAMILIES, family_of
from parallm.types import Activation, EncodeRequest, TaskSpec

HIDDEN = "last_hidden_state"
Result = TypeVar("Result")
NO_SPEC = (
    "{model} makes no vectors: nothing says how to pool its hidden states. Set tasks.pooling=last or mean as it was "
    "trained, load a model whose folder has a modules.json, or name an adapter that makes vectors"
)


class Encoder:
    """Makes vectors, scores and labels of token ids. Used on the asyncio thread; passes run on the device thread."""

    def __init__(
        self,
        device: DeviceThread,
        streams: DeviceStreams,
        model: SharedModel,
        adapters: AdapterTable,
        settings: TaskSettings,
        folder: Path,
        *,
        unit_tokens: int,
        max_waiting: int,
    ) -> None:
        """`folder` is the base's. A unit of device work has at most `unit_tokens` tokens, or one row for each stream;
        more than `max_waiting` requests at once are refused."""
        self._device = device
        self._streams = streams
        self._model = model
        self._adapters = adapters
        self.budget = max(1, unit_tokens // streams.width)
        """Tokens of a pass, unless one row has more."""
        self._max_waiting = max_waiting
        self._num_waiting = 0
        self._form: _Form | None = None  # found by the first request: it takes a forward
        self._bound: tuple[Adapter, LoraBinding] | None = None  # the newest; DoRA's takes a pass over the base
        self._settings = settings
        self._folder = folder
        self._base: TaskSpec | None = None
        self._first: dict[str, TaskSpec] = {}  # by policy: what it makes of texts before its first version
        self.fault = _fault(model, folder)
        """Why neither the base nor any adapter makes anything of texts but more text; None: they may."""
        self._refusal = NO_SPEC.format(model=model.name)
        try:
            self._base = _base_spec(folder, settings, model.tokenizer)
        except ModelError as error:
            self._refusal = f"{model.name} makes no vectors: {error}"
        self._end_token = _end_token(model, folder, settings)

    @property
    def vocabulary_size(self) -> int:
        return self._model.vocabulary_size

    @property
    def has_base_spec(self) -> bool:
        """Whether the base itself makes something of texts."""
        return self._base is not None

    @property
    def appended_token(self) -> int | None:
        """The token that texts for vectors get at their end, unless the tokenizer itself adds it."""
        own = self._model.tokenizer.text_frame[1][-1:]
        return None if self._end_token is None or own == (self._end_token,) else self._end_token

    def begin(self, policy: str, spec: TaskSpec) -> None:
        """Let `policy`, which is in training, make what `spec` says before its first version, too. Any thread."""
        self._first[policy] = spec

    def spec(self, model: str) -> TaskSpec:
        """What `model` makes of texts: as its adapter says, else as the base. Raises UnknownModel, Unavailable."""
        adapter = self._adapters.resolve(model)
        if self.fault is not None:
            raise Unavailable(self.fault)
        if self._model.parallel is not None:
            raise Unavailable("a base that is divided between devices makes no vectors; serve it on one device")
        first = self._first.get(model.partition("@")[0]) if adapter is None else None
        if first is not None and first.labels:
            raise Unavailable(f"{model} has no version yet, and until then no labels; ask again after its first update")
        spec = first or (self._base if adapter is None or adapter.spec is None else adapter.spec)
        if spec is None:
            raise Unavailable(self._refusal)
        is_last = spec.task == "embed" and "last" in spec.pooling
        if is_last and self.end_token(spec) is None and self._settings.end_token is None:
            raise Unavailable(
                f"{model} pools the last token, and the tokenizer of {self._model.name} ends texts by none; set "
                "tasks.end_token=append, or none if the model was trained so"
            )
        if spec.answers and not spec.template:
            raise Unavailable(
                f"{model} answers with a word, and nothing says the text that asks for it; set tasks.score_template to "
                f"{' or '.join(FAMILIES)}, or to a text"
            )
        return spec

    def encode_text(self, text: str, spec: TaskSpec) -> tuple[int, ...]:
        """Token ids of a text as the model reads it: with the tokenizer's special tokens, and its end token."""
        tokens, end = self._model.tokenizer.encode(text), self.end_token(spec)
        return tokens if end is None or tokens[-1:] == (end,) else (*tokens, end)

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
        """See `pairs.encode_pairs`."""
        return encode_pairs(
            self._model.tokenizer,
            spec,
            query,
            documents,
            instruction=instruction,
            limit=limit,
            document_limit=document_limit,
            cuts=cuts,
        )

    def end_token(self, spec: TaskSpec) -> int | None:
        """The token that every row has to end with; None: any."""
        if spec == REWARD:
            return self._model.tokenizer.end_token
        if spec.task != "embed":
            return None
        return self._end_token if spec.end_token is None else spec.end_token

    def frame(self, spec: TaskSpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The tokens before and after each text that `encode_text` encodes."""
        (before, after), end = self._model.tokenizer.text_frame, self.end_token(spec)
        return before, after if end is None or after[-1:] == (end,) else (*after, end)

    async def encode(self, request: EncodeRequest) -> np.ndarray:
        """Numbers (N, D), float32, in the order of the rows: vectors, or one number for each label.

        Cancelling the caller ends the work after a pass. Raises UnknownModel, Unavailable, InvalidRequest for
        `dimensions` that the model was not trained for, EngineFull, NotFinite.
        """
        form, spec = await self._known_form(), self.spec(request.model)
        projection = form.projection if spec.dense else None
        size = len(spec.pooling) * form.hidden if projection is None else projection.size
        _check_dimensions(request, spec, size)
        numbers_ND = await self._computed(self._units(request, self._adapters.resolve(request.model), spec, form))
        if not np.isfinite(numbers_ND).all():
            raise NotFinite(f"{request.model} computes values that are not finite for one of the inputs")
        if spec.task != "embed":
            return activated(numbers_ND, spec.activation) if request.activates else numbers_ND
        vectors_ND = numbers_ND[:, : request.dimensions]
        return normalized(vectors_ND) if request.activates and spec.normalizes else vectors_ND

    async def encode_tokens(self, request: EncodeRequest, *, max_bytes: int) -> list[np.ndarray]:
        """Hidden states (T, D) of each row's tokens, float32, of length 1 where the model's vectors are.

        Raises as `encode`, and InvalidRequest for a model without vectors or with layers behind its pooling, and for
        answers of more than `max_bytes`.
        """
        form, spec = await self._known_form(), self.spec(request.model)
        if spec.task != "embed" or spec.dense:
            reason = "has layers behind its pooling" if spec.dense else "makes no vectors"
            raise InvalidRequest(f"{request.model} {reason}, so there is none for each token; leave task out", "task")
        _check_dimensions(request, spec, form.hidden)
        num_bytes = 4 * sum(map(len, request.rows)) * (request.dimensions or form.hidden)
        if num_bytes > max_bytes:
            raise InvalidRequest(
                f"the vectors of all tokens would have {num_bytes} bytes, the limit is {max_bytes}; send fewer texts, "
                "or raise server.max_answer_bytes",
                "input",
            )
        states = await self._computed(self._token_units(request, self._adapters.resolve(request.model), spec, form))
        if not all(np.isfinite(state_TD).all() for state_TD in states):
            raise NotFinite(f"{request.model} computes values that are not finite for one of the inputs")
        cut = [state_TD[:, : request.dimensions] for state_TD in states]
        return [normalized(cut_TD) for cut_TD in cut] if request.activates and spec.normalizes else cut

    async def _known_form(self) -> "_Form":
        if self._form is None:
            self._form = await asyncio.wrap_future(
                self._device.call(partial(_form, self._model, self._folder, self._base))
            )
        return self._form

    async def _computed(self, units: Iterator[Result | None]) -> Result:
        """Return what units of device work end with. Raises EngineFull."""
        if self._num_waiting >= self._max_waiting:
            raise EngineFull(f"{self._num_waiting} requests for vectors wait; send this one again later")
        self._num_waiting += 1
        try:
            found = await asyncio.wrap_future(self._device.encode(units))
        finally:
            self._num_waiting -= 1
        assert found is not None, "encoding ends with the numbers"
        return found

    def _units(
        self, request: EncodeRequest, adapter: Adapter | None, spec: TaskSpec, form: "_Form"
    ) -> Iterator[np.ndarray | None]:
        yield from self._passes(adapter, spec, form).units(request.rows, request.first_lengths)

    def _token_units(
        self, request: EncodeRequest, adapter: Adapter | None, spec: TaskSpec, form: "_Form"
    ) -> Iterator[list[np.ndarray] | None]:
        states: list[np.ndarray] = [np.empty(0)] * len(request.rows)
        for indices, found in self._passes(adapter, spec, form).token_units(request.rows, (HIDDEN,)):
            ends = np.cumsum([len(request.rows[index]) for index in indices])[:-1]
            for index, state_TD in zip(indices, np.split(found[HIDDEN], ends), strict=True):
                states[index] = state_TD
            yield None
        yield states

    def _passes(self, adapter: Adapter | None, spec: TaskSpec, form: "_Form") -> Passes:
        """On the device thread."""
        head = form.head if adapter is None or adapter.head is None else Head(weight_LH=adapter.head)
        return Passes(
            model=self._model,
            streams=self._streams,
            spec=spec,
            lora=self.binding(adapter),
            head=None if spec.task == "embed" else head,
            projection=form.projection if spec.dense else None,
            packs=form.packs,
            budget=self.budget,
        )

    def binding(self, adapter: Adapter | None) -> LoraBinding | None:
        """Return what applies an adapter; on the device thread."""
        if adapter is None:
            return None
        if self._bound is None or self._bound[0] is not adapter:
            self._bound = adapter, single_lora(dict(adapter.arrays), lora_scaling(adapter, self._model))
        return self._bound[1]


def activated(logits_NL: np.ndarray, activation: Activation) -> np.ndarray:
    """Probabilities of logits, float32."""
    if activation == "none":
        return logits_NL
    wide_NL = logits_NL.astype(np.float64)
    if activation == "sigmoid":
        probabilities_NL = np.exp(-np.logaddexp(0.0, -wide_NL))
    else:
        powers_NL = np.exp(wide_NL - wide_NL.max(axis=1, keepdims=True))
        probabilities_NL = powers_NL / powers_NL.sum(axis=1, keepdims=True)
    return np.asarray(probabilities_NL, np.float32)


def normalized(vectors_ND: np.ndarray) -> np.ndarray:
    """Vectors of length 1, float32; zeros stay zeros. Each row's numbers are its own."""
    lengths_N1 = np.linalg.norm(vectors_ND.astype(np.float64), axis=1, keepdims=True)
    scaled_ND: np.ndarray = (vectors_ND / np.maximum(lengths_N1, 1e-12)).astype(np.float32)
    return scaled_ND


def _base_spec(folder: Path, settings: TaskSettings, tokenizer: ChatTokenizer) -> TaskSpec | None:
    """The spec by the settings, else by the files of the base. Raises ModelError."""
    if settings.score_template is not None or settings.score_tokens:
        if settings.pooling is not None:
            raise ModelError("tasks.pooling makes vectors and tasks.score_template scores pairs; set one of the two")
        return _score_spec(folder, settings, tokenizer)
    if settings.pooling is not None:
        spec: TaskSpec | None = TaskSpec(pooling=(settings.pooling,), source="tasks.pooling")
    else:
        spec = read_task_spec(folder)
    return replace(spec, dimensions=()) if spec is not None and settings.matryoshka else spec


def _score_spec(folder: Path, settings: TaskSettings, tokenizer: ChatTokenizer) -> TaskSpec:
    """The spec of a base that scores pairs by a template. Raises ModelError."""
    if settings.score_template is None:
        raise ModelError("tasks.score_tokens answer a text; set tasks.score_template, too")
    family, found = family_of(settings.score_template), read_task_spec(folder)
    prompts = {INSTRUCTION_PROMPT: family.instruction} if family.instruction else {}
    source = f"tasks.score_template={settings.score_template}"[:100]
    if found is not None and found.task != "embed":
        if found.answers and settings.score_tokens:
            raise ModelError(f"{found.source} names the tokens of the answer; leave tasks.score_tokens out")
        return replace(found, template=family.template, prompts=prompts, source=source)
    words = settings.score_tokens or family.answers
    if not 0 < len(words) <= 2:
        raise ModelError("tasks.score_tokens should be one or two words, such as [yes, no]")
    return TaskSpec(
        task="score",
        pooling=("last",),
        activation="sigmoid",
        labels=words[:1],
        answers=tuple(_answer(word, tokenizer) for word in words),
        template=family.template,
        prompts=prompts,
        normalizes=False,
        source=source,
    )


def _answer(word: str, tokenizer: ChatTokenizer) -> int:
    tokens = tokenizer.encode_more(word)
    if len(tokens) != 1:
        raise ModelError(f"tasks.score_tokens: {word[:100]!r} has {len(tokens)} tokens; an answer has one")
    return tokens[0]


def _end_token(model: SharedModel, folder: Path, settings: TaskSettings) -> int | None:
    """The token that ends every text of the base; None if texts end as they are."""
    if settings.end_token is not None:
        return model.tokenizer.end_token if settings.end_token == "append" else None
    if after := model.tokenizer.text_frame[1]:
        return after[-1]
    return model.tokenizer.end_token if adds_end_token(folder) else None


def _fault(model: SharedModel, folder: Path) -> str | None:
    """Why neither the base nor any adapter makes anything of texts but more text."""
    if model.trunk_owner is None and not model.is_encoder:
        return f"{model.name} cannot be split into trunk and head, so it has no hidden states to pool"
    try:
        check_attention(folder)
    except ModelError as error:
        return f"{model.name} makes no vectors: {error}"
    return None


@dataclass(frozen=True, slots=True)
class _Form:
    """What only a forward and the arrays of the folder show."""

    packs: bool
    hidden: int
    head: Head | None
    projection: Projection | None


def _form(model: SharedModel, folder: Path, spec: TaskSpec | None) -> _Form:
    hidden = model.hidden(mx.zeros((1, 1), mx.int32), model.make_cache(), None).shape[-1]
    head = None
    if spec is not None and spec.task != "embed" and not spec.answers:
        head = read_head(folder, json.loads((folder / "config.json").read_text()))
        if len(head.weight_LH) != len(spec.labels):
            raise ModelError(f"{folder} has a head of {len(head.weight_LH)} rows and names {len(spec.labels)} labels")
    projection = None
    if spec is not None and spec.dense:
        projection = read_projection(folder, spec.dense, len(spec.pooling) * hidden)
    return _Form(can_pack(model), hidden, head, projection)


def _check_dimensions(request: EncodeRequest, spec: TaskSpec, size: int) -> None:
    """Raise InvalidRequest unless vectors of `size` numbers may be cut as the request asks."""
    asked = request.dimensions
    if asked is None or (asked == size and spec.task == "embed"):
        return
    if spec.task != "embed":
        raise InvalidRequest(f"{request.model} makes no vectors, whose dimensions could be chosen", "dimensions")
    if asked > size:
        raise InvalidRequest(f"dimensions is {asked}, and vectors of {request.model} have {size}", "dimensions")
    if spec.dimensions is None:
        raise InvalidRequest(
            f"{request.model} was not trained for shorter vectors: leave dimensions out or send {size}; if it was "
            "(Matryoshka), start the server with tasks.matryoshka=true",
            "dimensions",
        )
    if spec.dimensions and asked not in spec.dimensions:
        sizes = ", ".join(map(str, sorted({*spec.dimensions, size})))
        raise InvalidRequest(f"dimensions is {asked}, and {request.model} knows {sizes}", "dimensions")
