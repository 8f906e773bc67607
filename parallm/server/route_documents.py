"""Wire types and working requests of each route, for the OpenAPI document.

`openapi.py` reads this table; descriptions are the docstrings of the routes' functions, and errors follow from the
roles in `operation/auth.py`. Every route has one row; tests send each example.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import BaseModel

from parallm.server.control import routes_adapter_aliases as aliases
from parallm.server.control import routes_adapters as adapters
from parallm.server.control import routes_engine as engine
from parallm.server.control import routes_scores as scores
from parallm.server.control import routes_shares as shares
from parallm.server.control import routes_splits as splits
from parallm.server.control import routes_training as training
from parallm.server.control import routes_trajectories as trajectories
from parallm.server.dialects import native, sglang, trl, versioned, vllm_legacy, vllm_tokens
from parallm.server.dialects import routes_identity as identity
from parallm.server.dialects import routes_tokenize as tokenize
from parallm.server.openai.chat_schemas import ChatAnswer, ChatBody
from parallm.server.openai.completion_schemas import CompletionAnswer, CompletionBody
from parallm.server.openai.responses_schemas import ResponseAnswer, ResponseBody
from parallm.server.routes_models import ModelEntry, ModelList

Example = Mapping[str, Any]
FORM = "multipart/form-data"


@dataclass(frozen=True, slots=True)
class RouteDocument:
    """One row of the table."""

    bodies: tuple[type[BaseModel], ...] = ()
    """Types of the JSON body, one of which it has; empty: no JSON body."""
    answers: tuple[type[BaseModel], ...] = ()
    """Types of the JSON answer; empty: an object without a fixed form."""
    example: Example | None = None
    """A body that works."""
    more_examples: Mapping[str, Example] = field(default_factory=dict)
    """Other bodies that work, by what they show."""
    answer_example: Example | None = None
    """An answer, where no type describes it."""
    parameters: tuple[Mapping[str, Any], ...] = ()
    """Parameters of the query in OpenAPI's form, where the route reads them by hand."""
    body_type: str = "application/json"
    """Media type of the body: JSON, a file, or a form (`FORM`) with a file."""
    media_type: str = "application/json"
    """Media type of the answer."""
    errors: tuple[int, ...] = ()
    """Statuses beside those that follow from the role and the body."""
    events: str = "events `data: JSON`, the last one `data: [DONE]`"
    """Form of a stream, for a body that can ask for one."""
    is_stored: bool = False
    """Whether the change outlives the process, as all changes by admins do."""


def _parameter(name: str, description: str, *, is_required: bool = False, **schema: Any) -> Mapping[str, Any]:
    schema = {"type": "string"} | schema
    return {"name": name, "in": "query", "required": is_required, "description": description, "schema": schema}


MESSAGES = [{"role": "user", "content": "2 + 3?"}]
SUM_SCHEMA = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
FOLDER = {"name": "poet", "path": "poet/adapter"}
VERSION = {"name": "poet", "version": 3}
STATUS = {"state": "paused", "step": 4, "total_steps": 200, "version": 4, "metrics": {"reward/mean": 0.61}}
METRICS = {
    "current_policy_version": 12,
    "queue_depth": 0,
    "max_batch_size": 128,
    "flush_interval_ms": 0.0,
    "num_running": 3,
    "metrics": {"vllm:num_requests_running": [{"labels": {"engine": "0", "model_name": "nano"}, "value": 3.0}]},
}
MODE = _parameter("mode", "Treatment of running requests.", enum=["abort", "wait", "keep"], default="abort")
NAME = _parameter("name", "Name of the adapter.", is_required=True)

_models = RouteDocument((), (ModelList,))
_pause = RouteDocument((engine.PauseBody,), (engine.PauseAnswer,), {"mode": "keep"})
_resume = RouteDocument((engine.NoFields,), (engine.PauseAnswer,), {})
_reset = RouteDocument((), (engine.CachesAnswer,))
_queue = RouteDocument((), (engine.QueueAnswer,))
_load = RouteDocument((adapters.LoadBody,), (adapters.AdapterEntry,), FOLDER)
_load_sglang = replace(_load, answers=(aliases.LoadedAdapters,))
_unload = RouteDocument((aliases.UnloadBody,), (), {"name": "poet"})
_upload = RouteDocument((), (adapters.AdapterEntry,), body_type="application/zip")
_done = RouteDocument((), (adapters.Done,))
_shares = RouteDocument((), (shares.SharesAnswer,), errors=(409,))
_training = RouteDocument((training.TrainingBody,), (), {"policy": None}, answer_example=STATUS)
_status = RouteDocument(answer_example=STATUS)
_checkpoint = RouteDocument((training.TrainingBody,), (training.CheckpointAnswer,), {})
_generate = RouteDocument(
    (CompletionBody, sglang.SglangBody, trl.TrlBody, versioned.VersionedBody),
    (native.NativeAnswer, sglang.SglangRow, trl.TrlAnswer, vllm_legacy.LegacyAnswer, versioned.VersionedAnswer),
    {"prompt": [17, 10, 18], "model": "policy", "max_tokens": 8, "n": 1},
    {
        "SGLang": {"input_ids": [17, 10, 18], "sampling_params": {"max_new_tokens": 8}, "return_logprob": True},
        "vLLM's first server": {"prompt": {"prompt_token_ids": [17, 10, 18]}, "max_tokens": 8, "logprobs": 0},
        "TRL": {"prompts": ["2 + 3 ="], "n": 2, "max_tokens": 8},
        "a trainer that names its version": {"prompt": "2 + 3 =", "policy_version": 12, "step_id": 7, "logprobs": 1},
    },
)
_world = RouteDocument((), (identity.WorldSize,))
_weights = RouteDocument((), (identity.WeightVersion,))
_info = RouteDocument((), (identity.ModelInfo,))

DOCUMENTS: Mapping[str, RouteDocument] = {
    "GET /health": RouteDocument(
        answer_example={"status": "ok", "model_loaded": True, "num_running": 3, "num_waiting": 0}
    ),
    "GET /ready": RouteDocument(answer_example={"status": "ready"}),
    "GET /metrics": RouteDocument(media_type="text/plain"),
    "GET /v1/metrics": RouteDocument(answer_example=METRICS),
    "GET /v1/models": _models,
    "GET /models": _models,
    "GET /v1/models/{name}": RouteDocument((), (ModelEntry,)),
    "POST /v1/completions": RouteDocument(
        (CompletionBody,),
        (CompletionAnswer,),
        {"model": "policy", "prompt": "2 + 3 =", "max_tokens": 8, "temperature": 0.7, "logprobs": 1},
        {
            "token ids in and out": {"model": "policy", "prompt": [17, 10, 18], "return_token_ids": True, "n": 2},
            "log-probs of a prompt": {"model": "base", "prompt": "2 + 3 = 5", "echo": True, "logprobs": 1},
            "a stream with usage": {
                "model": "policy",
                "prompt": "2 + 3 =",
                "stream": True,
                "stream_options": {"include_usage": True},
            },
            "a version by a word": {"model": "base", "lora_adapter": "latest", "prompt": "2 + 3 ="},
            "one of several words": {"model": "policy", "prompt": "2 + 3 =", "guided_choice": ["5", "6"]},
        },
    ),
    "POST /v1/chat/completions": RouteDocument(
        (ChatBody,),
        (ChatAnswer,),
        {"model": "policy", "messages": MESSAGES, "max_tokens": 64},
        {
            "JSON of a schema": {
                "model": "policy",
                "messages": MESSAGES,
                "response_format": {"type": "json_schema", "json_schema": {"name": "sum", "schema": SUM_SCHEMA}},
            },
            "a function that is called": {
                "model": "policy",
                "messages": MESSAGES,
                "tools": [{"type": "function", "function": {"name": "add", "parameters": SUM_SCHEMA}}],
                "tool_choice": "required",
            },
            "log-probs in a stream": {
                "model": "policy",
                "messages": MESSAGES,
                "stream": True,
                "logprobs": True,
                "top_logprobs": 2,
            },
        },
    ),
    "POST /v1/responses": RouteDocument(
        (ResponseBody,),
        (ResponseAnswer,),
        {"model": "policy", "input": "2 + 3?", "max_output_tokens": 64},
        events="OpenAI's events of a response, the last one `response.completed`, `response.incomplete` or `error`",
    ),
    "POST /pause": RouteDocument((), (engine.PauseAnswer,), parameters=(MODE,)),
    "POST /pause_generation": _pause,
    "POST /areal_pause_generation": _pause,
    "POST /resume": _resume,
    "POST /continue_generation": _resume,
    "POST /areal_continue_generation": _resume,
    "GET /is_paused": RouteDocument((), (engine.IsPaused,)),
    "POST /abort_requests": RouteDocument((engine.AbortManyBody,), (engine.AbortAnswer,), {"request_ids": ["job-7"]}),
    "POST /v1/requests/{request_id}/cancel": RouteDocument((), (engine.AbortAnswer,), errors=(404,)),
    "POST /abort_request": RouteDocument((engine.AbortOneBody,), (engine.AbortAnswer,), {"rid": "job-7"}),
    "POST /reset_prefix_cache": _reset,
    "GET /flush_cache": _reset,
    "POST /flush_cache": _reset,
    "POST /v1/warmup": RouteDocument((engine.WarmUpBody,), (engine.WarmUpAnswer,), {"rows": 4, "prompt_tokens": 16}),
    "GET /v1/queue": _queue,
    "GET /v1/queue/stats": _queue,
    "GET /v1/adapters": RouteDocument((), (adapters.AdapterList,)),
    "POST /v1/adapters/load": _load,
    "POST /load_adapter": RouteDocument(
        (adapters.LoadBody, aliases.LoadPolicyBody),
        (adapters.AdapterEntry, aliases.PolicyMoved),
        FOLDER,
        {"the policy that is served moves": {"adapter_path": "poet/adapter"}},
    ),
    "PUT /v1/adapters/{name}": _upload,
    "POST /upload_adapter": RouteDocument(
        (),
        (aliases.PolicyMoved, adapters.AdapterEntry),
        parameters=({**NAME, "required": False},),
        body_type=FORM,
    ),
    "POST /update_adapter_weights": replace(_upload, parameters=(NAME,), body_type="application/octet-stream"),
    "DELETE /v1/adapters/{model}": _done,
    "POST /v1/adapters/promote": RouteDocument((adapters.PromoteBody,), (adapters.NameMeans,), VERSION),
    "POST /v1/adapters/rollback": RouteDocument((adapters.RollBackBody,), (adapters.NameMeans,), {"name": "poet"}),
    "POST /v1/adapters/aliases": RouteDocument((adapters.AliasBody,), (adapters.Done,), VERSION | {"alias": "liked"}),
    "DELETE /v1/adapters/{name}/aliases/{alias}": _done,
    "POST /v1/load_lora_adapter": replace(_load, answers=(), media_type="text/plain"),
    "POST /v1/unload_lora_adapter": replace(_unload, media_type="text/plain"),
    "POST /load_lora_adapter": _load_sglang,
    "POST /skyrl/v1/load_lora_adapter": _load_sglang,
    "POST /unload_lora_adapter": replace(_unload, answers=(aliases.LoadedAdapters,)),
    "POST /model/switch-lora": RouteDocument(
        (aliases.SwitchBody,),
        (adapters.NameMeans,),
        VERSION,
        {"the policy, by a word": {"version": "checkpoint-3"}},
    ),
    "PUT /v1/splits/{name}": RouteDocument(
        (splits.SplitBody,), (splits.SplitAnswer,), {"weights": {"policy@11": 9, "policy@12": 1}}
    ),
    "DELETE /v1/splits/{name}": RouteDocument((), (splits.SplitAnswer,)),
    "GET /v1/splits": RouteDocument((), (splits.SplitList,)),
    "GET /v1/shares": _shares,
    "PUT /v1/shares": replace(_shares, bodies=(shares.SharesBody,), example={"serving_share": 0.9}),
    "POST /v1/rewards": RouteDocument((splits.RewardBody,), (splits.RewardAnswer,), {"id": "cmpl-1f", "reward": 1.0}),
    "POST /v1/rewards/score": RouteDocument(
        (scores.ScoreBody,),
        (scores.ScoreAnswer,),
        {"model": "reward", "input": ["2 + 3 = 5", "2 + 3 = 6"]},
        {
            "completions of a prompt": {"prompt": "2 + 3 =", "completions": [" 5", " 6"]},
            "the end of a chat": {"messages": [*MESSAGES, {"role": "assistant", "content": "5"}]},
        },
    ),
    "GET /v1/trajectories": RouteDocument((), (trajectories.TrajectoryList,)),
    "POST /v1/trajectories/{trajectory_id}/reward": RouteDocument(
        (trajectories.TrajectoryRewardBody,),
        (trajectories.TrajectoryRewardAnswer,),
        {"reward": {"right": 1, "short": 0.5}},
        is_stored=True,
    ),
    "GET /v1/training/status": _status,
    "GET /debug/training": _status,
    "POST /v1/training/pause": _training,
    "POST /v1/training/resume": _training,
    "POST /v1/training/update": replace(
        _training,
        bodies=(training.UpdateBody,),
        example={},
        more_examples={
            "on given trajectories": {
                "trajectories": [
                    {"prompt": "2 + 3 =", "completion": " 5", "reward": 1.0},
                    {"prompt": "2 + 3 =", "completion": " 6", "reward": 0.0},
                ],
                "update_inference": True,
                "checkpoint_name": "manual-update-1",
            },
        },
    ),
    "POST /v1/training/checkpoint": _checkpoint,
    "POST /training/checkpoint": _checkpoint,
    "POST /generate": _generate,
    "POST /generate/": _generate,
    "POST //generate": _generate,
    "POST /inference/v1/generate": RouteDocument(
        (vllm_tokens.TokensBody,),
        (vllm_tokens.TokensAnswer,),
        {"model": "policy", "token_ids": [17, 10, 18], "sampling_params": {"max_tokens": 8}},
    ),
    "POST /tokenize": RouteDocument((tokenize.TokenizeBody,), (tokenize.TokensOfText,), {"prompt": "2 + 3"}),
    "POST /detokenize": RouteDocument((tokenize.DetokenizeBody,), (tokenize.TextOfTokens,), {"tokens": [17, 10, 18]}),
    "GET /get_world_size": _world,
    "GET /get_world_size/": _world,
    "GET /weight_info": _weights,
    "GET /get_weight_version": _weights,
    "GET /model_info": _info,
    "GET /get_model_info": _info,
    "GET /health_generate": RouteDocument((), (identity.Alive,)),
    **{f"POST {path}": RouteDocument() for path in identity.ABSENT_PATHS},
}
