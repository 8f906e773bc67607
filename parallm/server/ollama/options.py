"""Ollama's options of a request: honoured, without effect, or refused by name.

A request's own win over `server.generation_config`, and that over Ollama's defaults. Those of a Modelfile are already
among the request's when they come here.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from parallm.errors import InvalidRequest
from parallm.server.openai.completion_schemas import StopString, read_stop
from parallm.server.schemas import FIRST_FAULT, MAX_INT, Wire, checked

DEFAULTS: Mapping[str, float] = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
"""Ollama's own defaults, where they ask for something."""
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "stop")
"""Options that /v1 calls by the same names."""
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "embedding_only": (False,),
    "logits_all": (False,),
    "mirostat": (0,),
    "tfs_z": (1,),
    "typical_p": (1,),
}
"""Options that are not implemented, with the values that ask for nothing."""


class OllamaOptions(Wire):
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_INT)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-1, le=2**63 - 1)] = -1
    """-1 is another one for each request."""
    num_predict: Annotated[int, Field(ge=-1, le=MAX_INT)] = -1
    """Most tokens of the answer; -1: as many as the context has."""
    num_ctx: Annotated[int, Field(ge=2, le=MAX_INT)] | None = None
    """Most tokens of prompt and answer, up to the context of the model."""
    stop: Annotated[
        list[StopString], FIRST_FAULT, BeforeValidator(read_stop, json_schema_input_type=StopString | list[StopString])
    ] = Field(default=[])
    repeat_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repeat_last_n: Annotated[int, Field(ge=-1, le=MAX_INT)] | None = None
    """Tokens that penalties look back; they always see all here, so with a penalty only -1 is accepted."""
    penalize_newline: bool | None = None
    """Line ends are penalized as other tokens, so with a penalty only true is accepted."""
    mirostat_eta: float | None = None
    mirostat_tau: float | None = None
    """This and `mirostat_eta` have no effect without `mirostat`."""
    draft_num_predict: int | None = None
    f16_kv: bool | None = None
    low_vram: bool | None = None
    main_gpu: int | None = None
    num_batch: int | None = None
    num_gpu: int | None = None
    num_gqa: int | None = None
    num_keep: int | None = None
    num_thread: int | None = None
    numa: bool | None = None
    use_mlock: bool | None = None
    use_mmap: bool | None = None
    vocab_only: bool | None = None
    """This and the ones above from `draft_num_predict` on are about how llama.cpp computes: without effect here."""

    @property
    def has_penalties(self) -> bool:
        penalties = (self.repeat_penalty or 1, self.presence_penalty or 0, self.frequency_penalty or 0)
        return penalties != (1, 0, 0)


def read_options(value: Mapping[str, Any]) -> OllamaOptions:
    """Return checked options. Raises InvalidRequest that names the option at fault."""
    try:
        options = checked(value, OllamaOptions, NEUTRAL)
        _check_window(options)
    except InvalidRequest as error:
        name = error.parameter or ""
        raise InvalidRequest(f"options: {error}", f"options.{name}") from error
    return options


def _check_window(options: OllamaOptions) -> None:
    if options.num_predict == 0:
        raise InvalidRequest("num_predict is 0; send at least 1, or -1 for as many as the context has", "num_predict")
    if not options.has_penalties:
        return
    if options.repeat_last_n not in (None, -1):
        raise InvalidRequest(
            f"repeat_last_n is {options.repeat_last_n}, and penalties look back at the whole text here; send -1 or "
            "leave it out",
            "repeat_last_n",
        )
    if options.penalize_newline is False:
        raise InvalidRequest("penalize_newline is false, and penalties count line ends here; leave it out", "")


def sampling_fields(options: OllamaOptions, defaults: Mapping[str, float]) -> dict[str, Any]:
    """Return the fields of `/v1` that the options ask for, without the number of tokens.

    `defaults` are those of `server.generation_config`.
    """
    asked = {name: value for name in SAMPLING if (value := getattr(options, name)) is not None}
    if options.repeat_penalty is not None:
        asked["repetition_penalty"] = options.repeat_penalty
    if options.seed >= 0:
        asked["seed"] = options.seed
    return {**DEFAULTS, **defaults, **asked}
