"""The OpenAPI document of `/openapi.json`.

Routes come from FastAPI, wire types and working requests from `DOCUMENTS`, descriptions from the docstrings of the
routes' functions, errors and keys from the roles in `operation/auth.py`. `create_app` makes it once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from parallm import __version__
from parallm.docstrings import DescribedJsonSchema
from parallm.jobs.records import Batch, FileObject, FineTuningJob
from parallm.server.control import replica_schemas as replicas
from parallm.server.control import routes_adapters as adapters
from parallm.server.control import routes_engine as engine
from parallm.server.control import routes_models as models
from parallm.server.control import routes_splits as splits
from parallm.server.control import routes_training as training
from parallm.server.control import routes_trajectories as trajectories
from parallm.server.dialects import kserve, native, sglang, tei, trl, vllm
from parallm.server.dialects import routes_identity as identity
from parallm.server.dialects import routes_tokenize as tokenize
from parallm.server.jobs import schemas as jobs
from parallm.server.ollama import cards as ollama_cards
from parallm.server.ollama import create as ollama_create
from parallm.server.ollama import pull as ollama_pull
from parallm.server.ollama import routes_catalogue as ollama_catalogue
from parallm.server.ollama import routes_models as ollama_models
from parallm.server.ollama import schemas as ollama
from parallm.server.openai.chat_schemas import ChatAnswer, ChatBody
from parallm.server.openai.completion_schemas import CompletionAnswer, CompletionBody
from parallm.server.openai.responses_schemas import ResponseAnswer, ResponseBody
from parallm.server.openai.routes import ModelEntry, ModelList
from parallm.server.operation.auth import ROLES, Role
from parallm.server.schemas import Done, ErrorAnswer
from parallm.server.tasks import routes_classify as classify
from parallm.server.tasks import routes_embeddings as embeddings
from parallm.server.tasks import routes_predict as prediction
from parallm.server.tasks import routes_rank as rank
from parallm.server.tasks import routes_rewards as rewards
from parallm.server.tasks import routes_rl as rl

DESCRIPTION = """A language model that is served while it learns. Fields are honoured or refused by name, never ignored.
Every error has the form of `ErrorAnswer`; `/generate` has those of the dialect that asks, and those of Ollama's routes
are `{"error": "text"}`.

**Models.** `base`, `policy` (the version that is served), `policy@12`, `latest`, and aliases such as `best`; of another
adapter `poet`, `poet@3`, `poet@best`. `GET /v1/models` has them all. `model` in an answer is the exact version, and
`weight_versions` says which tokens came from which.

**Headers.** `x-request-id` comes back in the answer and stands in the log; `x-request-timeout` is the seconds by which
an answer must be complete, else 504; `traceparent` makes the request a part of a trace. A 429 or 503 says when to come
back in `Retry-After`.

**Roles.** The tag of a route is the role that its key needs, which is sent as `Authorization: Bearer KEY` or
`x-api-key: KEY`; each role may do what those before it may: `public`, `inference`, `training`, `admin`. Without keys
every route is open to this machine.
"""
REF = "#/components/schemas/{model}"
JSON = "application/json"

ERRORS: Mapping[int, str] = {
    400: "A field is wrong, unknown or not supported; `param` names it.",
    401: "No API key or a wrong one.",
    403: "The key's role does not allow this route, the route is switched off, or a page of another origin asks.",
    404: "No such model, version, alias or request.",
    408: "The body came too slowly.",
    409: "This process does not do that, or not any more: it trains nothing, takes no such weights, or another process "
    "keeps what operators set. "
    "In vLLM's dialect of `/generate`: the request was aborted.",
    413: "The body is larger than `server.max_body_bytes`.",
    422: "The model computes values that are not finite, or a file of a run cannot be shown.",
    429: "The queue is full, or too many large bodies come at once; `Retry-After` says when to try again.",
    503: "The engine has stopped, or the server is about to end.",
    504: "The answer was not complete by its deadline.",
    507: "The disk does not take it. Nothing has changed, but that a reward counts until the process ends.",
}
Example = Mapping[str, Any]
FORM = "multipart/form-data"


@dataclass(frozen=True, slots=True)
class Row:
    """What `DOCUMENTS` says of a route."""

    bodies: tuple[type[BaseModel], ...] = ()
    """Types of the JSON body, one of which it has; empty: no JSON body."""
    answers: tuple[type[BaseModel], ...] = ()
    """Types of the JSON answer; empty: an object without a fixed form."""
    example: Example | None = None
    """A body that works."""
    more_examples: Mapping[str, Example] = field(default_factory=dict)
    """Other bodies that work, by what they show."""
    answer_example: object = None
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
    stream_type: str = "text/event-stream"
    """Media type of a stream."""


LINES = "lines of JSON, the last one with `done: true`"
MESSAGES = [{"role": "user", "content": "2 + 3?"}]
CHAT = {"model": "policy", "messages": MESSAGES}
TEXT = {"model": "policy", "prompt": "2 + 3 ="}
SUM_SCHEMA = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
FOLDER = {"name": "poet", "path": "poet/adapter"}
SUM_FORMAT = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SUM_SCHEMA}}
ADD = {"type": "function", "function": {"name": "add", "parameters": SUM_SCHEMA}}
VERSION = {"name": "poet", "version": 3}
PROCESS = {
    "status": "running",
    "pid": 4321,
    "version": "0.1.0",
    "uptime_seconds": 12.5,
    "num_running": 1,
    "num_waiting": 0,
}
STATUS = {"state": "paused", "step": 4, "total_steps": 200, "version": 4, "metrics": {"reward/mean": 0.61}}
SESSION = {
    "role": "admin",
    "key": "me",
    "has_keys": True,
    "control_routes": True,
    "serves": True,
    "trains": ["policy"],
    "learns_live": [],
    "loads_adapters": True,
    "base": "nano",
    "max_context": 512,
    "run": "arithmetic_grpo~2026-01-31_22-04-10",
    "version": "0.1.0",
    "now": 1769893450.1,
}
DECODING = {
    "id": "chatcmpl-7",
    "index": 0,
    "traffic": "serving",
    "model": "policy@12",
    "is_running": True,
    "prompt_tokens": 210,
    "sampled": 33,
    "max_tokens": 512,
    "seconds": 0.9,
}
RUN = {
    "id": "arithmetic_grpo~2026-01-31_22-04-10",
    "name": "arithmetic_grpo",
    "began": 1769893450.1,
    "ended": None,
    "state": "running",
    "step": 41,
    "total_steps": 200,
    "policies": [],
    "figures": {"accuracy_best": 0.62},
    "is_current": True,
}
HISTORY = {
    "epoch": "b71e03aa",
    "first": 1,
    "last": 40,
    "bucket": 32,
    "starts": [1, 33],
    "columns": {"reward/mean": {"low": [0.1, 0.4], "high": [0.5, 0.6], "last": [0.45, 0.58]}},
    "constant": {"faults/total": 0},
}
ROLLOUT_STEPS = {
    "steps": [
        {
            "step": 412,
            "time": 1769893450.1,
            "groups": 16,
            "completions": 128,
            "reward_mean": 0.61,
            "with_signal": 11,
            "kept": False,
        }
    ],
    "damaged": [],
    "dropped": 0,
}
ROLLOUT_GROUPS = {
    "step": 412,
    "time": 1769893450.1,
    "groups": [
        {
            "group": 3,
            "problem_id": "arithmetic/train/77",
            "environment": "",
            "prompt": "12 + 3 = ?",
            "answer": "15",
            "rewards": [0, 1],
            "advantages": [-0.5, 0.5],
            "lengths": [3, 2],
            "finish_reasons": ["stop", "stop"],
            "versions": [411],
            "faulty": [],
        }
    ],
    "more": 0,
    "environments": [],
}
ROLLOUT_GROUP = {
    "step": 412,
    "group": 3,
    "groups": 16,
    "problem_id": "arithmetic/train/77",
    "environment": "",
    "messages": [{"role": "user", "content": "12 + 3 = ?"}],
    "answer": "15",
    "faulty": [],
    "completions": [
        {
            "index": 1,
            "reward": 1,
            "parts": {"correct": 1},
            "advantage": 0.5,
            "finish_reason": "stop",
            "temperature": 1,
            "versions": [{"version": 411, "start": 0, "end": 2}],
            "text": "15",
            "tokens": {
                "ids": [868, 2],
                "texts": ["15", "<|end|>"],
                "logprobs": [-0.21, -0.001],
                "learner_logprobs": None,
                "entropies": [0.31, 0.01],
                "trained": [[0, 2]],
                "clipped": [],
                "advantages": None,
                "learned": True,
            },
        }
    ],
}
TRAINER = {
    "api": replicas.API,
    "session": "5f0c1a",
    "owner": "gpu-1:checkpoints/gsm8k_grpo",
    "policy": "policy",
    "base": "nano",
    "base_sha256": "9f2c",
    "tokenizer_sha256": "e01b",
    "max_context": 512,
    "served": 11,
}
ROLLOUT = {
    "session": "5f0c1a",
    "request_id": "step-11-0",
    "prompt": [17, 10, 18],
    "n": 8,
    "model": "policy@11",
    "max_tokens": 64,
    "temperature": 1.0,
    "seed": 7,
    "stop": [],
    "is_continued": False,
    "switches_in_flight": False,
}
METRICS = {
    "current_policy_version": 12,
    "queue_depth": 0,
    "max_batch_size": 128,
    "flush_interval_ms": 0.0,
    "num_running": 3,
    "metrics": {"vllm:num_requests_running": [{"labels": {"engine": "0", "model_name": "nano"}, "value": 3.0}]},
}
MODE = {
    "name": "mode",
    "in": "query",
    "description": "Treatment of running requests.",
    "schema": {"type": "string", "enum": ["abort", "wait", "keep"], "default": "abort"},
}
OBSERVATION = {"shape": [1, 4], "datatype": "FP32", "data": [0.1, 0.0, -0.2, 0.0]}
NAME = {"name": "name", "in": "query", "description": "Name of the adapter.", "schema": {"type": "string"}}
AFTER = {"name": "after", "in": "query", "description": "Id of the last object before.", "schema": {"type": "string"}}
LIMIT = {"name": "limit", "in": "query", "description": "Most objects to show.", "schema": {"type": "integer"}}
PURPOSE = {
    "name": "purpose",
    "in": "query",
    "description": "Purpose of the files to show.",
    "schema": {"type": "string", "enum": ["fine-tune", "batch", "batch_output", "fine-tune-results"]},
}
ORDER = {
    "name": "order",
    "in": "query",
    "description": "Newest or oldest first.",
    "schema": {"type": "string", "enum": ["desc", "asc"], "default": "desc"},
}
GRADER = {
    "type": "string_check",
    "name": "sum",
    "input": "{{sample.output_text}}",
    "operation": "like",
    "reference": "#### {{item.reference_answer}}",
}

_DOCUMENTS: Mapping[str, Row] = {
    "GET /health": Row(answer_example={"status": "ok", "model_loaded": True, "num_running": 3, "num_waiting": 0}),
    "GET /ready": Row(answer_example={"status": "ready"}),
    "GET /metrics": Row(media_type="text/plain"),
    "GET /v1/metrics": Row(answer_example=METRICS),
    "GET /v1/status": Row(answer_example=PROCESS),
    "GET /v1/models, GET /models": Row((), (ModelList,)),
    "GET /v1/models/{name}": Row((), (ModelEntry,)),
    "POST /v1/completions": Row(
        (CompletionBody,),
        (CompletionAnswer,),
        TEXT | {"max_tokens": 8, "temperature": 0.7, "logprobs": 1},
        {
            "token ids in and out": {"model": "policy", "prompt": [17, 10, 18], "return_token_ids": True, "n": 2},
            "log-probs of a prompt": {"model": "base", "prompt": "2 + 3 = 5", "echo": True, "logprobs": 1},
            "a stream with usage": TEXT | {"stream": True, "stream_options": {"include_usage": True}},
            "a version by a word": TEXT | {"model": "base", "lora_adapter": "latest"},
            "one of several words": TEXT | {"guided_choice": ["5", "6"]},
        },
    ),
    "POST /v1/chat/completions": Row(
        (ChatBody,),
        (ChatAnswer,),
        CHAT | {"max_tokens": 64},
        {
            "JSON of a schema": CHAT | {"response_format": SUM_FORMAT},
            "a function that is called": CHAT | {"tools": [ADD], "tool_choice": "required"},
            "log-probs in a stream": CHAT | {"stream": True, "logprobs": True, "top_logprobs": 2},
        },
    ),
    "POST /v1/responses": Row(
        (ResponseBody,),
        (ResponseAnswer,),
        {"model": "policy", "input": "2 + 3?", "max_output_tokens": 64},
        events="OpenAI's events of a response, the last one `response.completed`, `response.incomplete` or `error`",
    ),
    "POST /v1/embeddings, POST /embeddings": Row(
        (embeddings.EmbeddingBody,),
        (embeddings.EmbeddingAnswer,),
        {"model": "base", "input": ["2 + 3", "a sum"]},
        {"as bytes": {"model": "base", "input": "2 + 3", "encoding_format": "base64"}},
        errors=(409, 422),
    ),
    "POST /pause": Row((), (engine.PauseAnswer,), parameters=(MODE,)),
    "POST /pause_generation, POST /areal_pause_generation": Row(
        (engine.PauseBody,), (engine.PauseAnswer,), {"mode": "keep"}
    ),
    "POST /resume, POST /continue_generation, POST /areal_continue_generation": Row(
        (engine.NoFields,), (engine.PauseAnswer,), {}
    ),
    "GET /is_paused": Row((), (engine.IsPaused,)),
    "POST /abort_requests": Row((engine.AbortManyBody,), (engine.AbortAnswer,), {"request_ids": ["job-7"]}),
    "POST /v1/requests/{request_id}/cancel": Row((), (engine.AbortAnswer,), errors=(404,)),
    "POST /abort_request": Row((engine.AbortOneBody,), (engine.AbortAnswer,), {"rid": "job-7"}),
    "POST /reset_prefix_cache, GET /flush_cache, POST /flush_cache": Row((), (engine.CachesAnswer,)),
    "POST /v1/warmup": Row((engine.WarmUpBody,), (engine.WarmUpAnswer,), {"rows": 4, "prompt_tokens": 16}),
    "GET /v1/queue, GET /v1/queue/stats": Row((), (engine.QueueAnswer,)),
    "GET /v1/adapters": Row((), (adapters.AdapterList,)),
    "POST /v1/adapters/load": Row((adapters.LoadBody,), (adapters.AdapterEntry,), FOLDER),
    "POST /load_adapter": Row(
        (adapters.LoadBody, adapters.LoadPolicyBody),
        (adapters.AdapterEntry, adapters.PolicyMoved),
        FOLDER,
        {"the policy that is served moves": {"adapter_path": "poet/adapter"}},
    ),
    "PUT /v1/adapters/{name}": Row((), (adapters.AdapterEntry,), body_type="application/zip"),
    "POST /upload_adapter": Row((), (adapters.PolicyMoved, adapters.AdapterEntry), parameters=(NAME,), body_type=FORM),
    "POST /update_adapter_weights": Row(
        (), (adapters.AdapterEntry,), parameters=({**NAME, "required": True},), body_type="application/octet-stream"
    ),
    "GET /v1/adapters/{model}/archive": Row((), (), media_type="application/zip"),
    "DELETE /v1/adapters/{model}, DELETE /v1/adapters/{name}/aliases/{alias}": Row((), (Done,)),
    "POST /v1/adapters/promote": Row((adapters.PromoteBody,), (adapters.NameMeans,), VERSION),
    "POST /v1/adapters/rollback": Row((adapters.RollBackBody,), (adapters.NameMeans,), {"name": "poet"}),
    "POST /v1/adapters/aliases": Row((adapters.AliasBody,), (Done,), VERSION | {"alias": "liked"}),
    "POST /v1/load_lora_adapter": Row((adapters.LoadBody,), (), FOLDER, media_type="text/plain"),
    "POST /v1/unload_lora_adapter": Row((adapters.UnloadBody,), (), {"name": "poet"}, media_type="text/plain"),
    "POST /load_lora_adapter, POST /skyrl/v1/load_lora_adapter": Row(
        (adapters.LoadBody,), (adapters.LoadedAdapters,), FOLDER
    ),
    "POST /unload_lora_adapter": Row((adapters.UnloadBody,), (adapters.LoadedAdapters,), {"name": "poet"}),
    "POST /model/switch-lora": Row(
        (adapters.SwitchBody,), (adapters.NameMeans,), VERSION, {"the policy, by a word": {"version": "checkpoint-3"}}
    ),
    "GET /v1/models/loaded": Row((), (models.LoadedModelList,)),
    "POST /v1/models/load": Row((models.ModelLoadBody,), (Done,), {"model": "qwen/qwen3:latest", "keep_alive": "5m"}),
    "POST /v1/models/unload": Row((models.ModelNameBody,), (Done,), {"model": "qwen/qwen3:latest"}),
    "POST /v1/models/scan": Row((), (models.ModelNameList,)),
    "POST /v1/models/copy": Row((models.ModelCopyBody,), (Done,), {"source": "qwen/qwen3", "destination": "chat"}),
    "POST /v1/models/create": Row(
        (models.ModelCreateBody,), (Done,), {"model": "poet", "source": "qwen/qwen3", "system": "Answer in rhymes."}
    ),
    "DELETE /v1/models/{name}": Row((), (models.ModelDeleted,)),
    "PUT /v1/splits/{name}": Row(
        (splits.SplitBody,), (splits.SplitAnswer,), {"weights": {"policy@11": 9, "policy@12": 1}}
    ),
    "DELETE /v1/splits/{name}": Row((), (splits.SplitAnswer,)),
    "GET /v1/splits": Row((), (splits.SplitList,)),
    "GET /v1/shares": Row((), (engine.SharesAnswer,), errors=(409,)),
    "PUT /v1/shares": Row((engine.SharesBody,), (engine.SharesAnswer,), {"serving_share": 0.9}, errors=(409,)),
    "POST /v1/rewards": Row((splits.RewardBody,), (Done,), {"id": "cmpl-1f", "reward": 1.0}),
    "POST /v1/rewards/score": Row(
        (rewards.RewardScoreBody,),
        (rewards.RewardScoreAnswer,),
        {"model": "reward", "input": ["2 + 3 = 5", "2 + 3 = 6"]},
        {
            "completions of a prompt": {"prompt": "2 + 3 =", "completions": [" 5", " 6"]},
            "the end of a chat": {"messages": [*MESSAGES, {"role": "assistant", "content": "5"}]},
        },
    ),
    "POST /rerank, POST /v1/rerank, POST /v2/rerank": Row(
        (rank.RerankBody, tei.TeiRerankBody),
        (rank.RerankAnswer,),
        {"model": "base", "query": "2 + 3", "documents": ["5", "7"], "top_n": 1},
        {"TEI's form": {"query": "2 + 3", "texts": ["5", "7"], "return_text": True}},
    ),
    "POST /score, POST /v1/score": Row(
        (rank.ScoreBody,),
        (rank.ScoreAnswer,),
        {"model": "base", "queries": "2 + 3", "documents": ["5", "7"]},
        {"pairs": {"model": "base", "text_1": ["2 + 3", "3 + 4"], "text_2": ["5", "7"]}},
    ),
    "POST /classify, POST /v1/classify, POST /v1/classifications": Row(
        (classify.ClassifyBody,),
        (classify.ClassifyAnswer, classify.InfinityAnswer),
        {"model": "base", "input": ["2 + 3 = 5"]},
        {"Infinity's form": {"model": "base", "input": ["2 + 3 = 5"], "raw_scores": False}},
    ),
    "POST /pooling, POST /v1/pooling": Row(
        (classify.PoolingBody,), (classify.PoolingAnswer,), {"model": "base", "input": "2 + 3", "task": "embed"}
    ),
    "POST /embed": Row((tei.TeiEmbedBody,), (), {"inputs": ["2 + 3"]}, answer_example=[[0.6, -0.8]]),
    "POST /predict": Row(
        (tei.TeiPredictBody,),
        (),
        {"inputs": "2 + 3 = 5"},
        {"pairs": {"inputs": [["2 + 3", "5"]]}},
        answer_example=[{"score": 0.9, "label": "right"}],
    ),
    "POST /similarity": Row(
        (tei.TeiSimilarityBody,),
        (),
        {"inputs": {"source_sentence": "2 + 3", "sentences": ["5", "7"]}},
        answer_example=[0.9, 0.1],
    ),
    "GET /info": Row(answer_example={"model_id": "nano", "model_type": {"embedding": {"pooling": "mean"}}}),
    "POST /v1/rl/act, POST /v1/rl/rollout": Row(
        (rl.ActBody,),
        (rl.ActAnswer,),
        {"model": "agent", "observations": [[0.1, 0.0, -0.2, 0.0]], "seed": 7},
        {"a tensor of an exact version": {"model": "agent@1", "observations": {"obs": OBSERVATION}, "encoding": "b64"}},
        errors=(422,),
    ),
    "POST /v1/predict": Row(
        (prediction.PredictBody,),
        (prediction.PredictAnswer,),
        {"model": "agent", "inputs": {"obs": OBSERVATION}, "outputs": ["logits"]},
        {"rows alone": {"model": "agent@1", "inputs": [[0.1, 0.0, -0.2, 0.0]], "encoding": "b64"}},
        errors=(422,),
    ),
    "GET /v2": Row((), (kserve.ServerMetadata,)),
    "GET /v2/health/live": Row(answer_example={"live": True}),
    "GET /v2/health/ready": Row(answer_example={"ready": True}),
    "GET /v2/models/{name}, GET /v2/models/{name}/versions/{version}": Row(
        (), (kserve.ModelMetadata,), errors=(404, 409)
    ),
    "GET /v2/models/{name}/ready, GET /v2/models/{name}/versions/{version}/ready": Row(
        answer_example={"name": "agent", "ready": True}, errors=(404, 409)
    ),
    "POST /v2/models/{name}/infer, POST /v2/models/{name}/versions/{version}/infer": Row(
        (kserve.InferBody,),
        (kserve.InferAnswer,),
        {"inputs": [{"name": "obs", **OBSERVATION}], "outputs": [{"name": "logits"}]},
        errors=(422,),
    ),
    "GET /v1/rl/policies": Row((), (rl.PolicyList,), errors=(409,)),
    "PUT /v1/rl/policies/{name}": Row((), (rl.PolicyEntry,), body_type="application/octet-stream"),
    "DELETE /v1/rl/policies/{model}": Row((), (Done,)),
    "GET /v1/trajectories": Row((), (trajectories.TrajectoryList,)),
    "POST /v1/trajectories/{trajectory_id}/reward": Row(
        (trajectories.TrajectoryRewardBody,),
        (trajectories.TrajectoryRewardAnswer,),
        {"reward": {"right": 1, "short": 0.5}},
        errors=(507,),
    ),
    "GET /v1/training/status, GET /debug/training": Row(answer_example=STATUS),
    "POST /v1/training/pause, POST /v1/training/resume, POST /v1/training/stop": Row(
        (training.TrainingBody,), (), {"policy": None}, answer_example=STATUS
    ),
    "POST /v1/training/update": Row(
        (training.UpdateBody,),
        (),
        {},
        {
            "on given trajectories": {
                "trajectories": [{"prompt": "2 + 3 =", "completion": f" {n}", "reward": float(n == 5)} for n in (5, 6)],
                "update_inference": True,
                "checkpoint_name": "manual-update-1",
            },
        },
        STATUS,
    ),
    "POST /v1/training/checkpoint, POST /training/checkpoint": Row(
        (training.TrainingBody,), (training.CheckpointAnswer,), {}
    ),
    "POST /v1/training/evaluate": Row((training.TrainingBody,), (training.EvaluationAnswer,), {}),
    "POST /v1/replica/join": Row((replicas.JoinBody,), (replicas.JoinAnswer,), TRAINER),
    "PUT /v1/replica/versions/{version}": Row((), (replicas.ReceivedVersion,), body_type="application/octet-stream"),
    "POST /v1/replica/generate": Row(
        (replicas.SampleBody,), (replicas.SampledCompletion,), ROLLOUT, media_type="text/event-stream"
    ),
    "POST /v1/replica/leave": Row((replicas.LeaveBody,), (Done,), {"session": "5f0c1a"}),
    "POST /generate, POST /generate/, POST //generate": Row(
        (CompletionBody, sglang.SglangBody, trl.TrlBody, native.VersionedBody),
        (native.NativeAnswer, sglang.SglangRow, trl.TrlAnswer, vllm.LegacyAnswer, native.VersionedAnswer),
        {"prompt": [17, 10, 18], "model": "policy", "max_tokens": 8, "n": 1},
        {
            "SGLang": {"input_ids": [17, 10, 18], "sampling_params": {"max_new_tokens": 8}, "return_logprob": True},
            "vLLM's first server": {"prompt": {"prompt_token_ids": [17, 10, 18]}, "max_tokens": 8, "logprobs": 0},
            "TRL": {"prompts": ["2 + 3 ="], "n": 2, "max_tokens": 8},
            "a trainer with its version": {"prompt": "2 + 3 =", "policy_version": 12, "step_id": 7, "logprobs": 1},
        },
    ),
    "POST /inference/v1/generate": Row(
        (vllm.TokensBody,),
        (vllm.TokensAnswer,),
        {"model": "policy", "token_ids": [17, 10, 18], "sampling_params": {"max_tokens": 8}},
    ),
    "POST /tokenize": Row((tokenize.TokenizeBody,), (tokenize.TokensOfText,), {"prompt": "2 + 3"}),
    "POST /detokenize": Row((tokenize.DetokenizeBody,), (tokenize.TextOfTokens,), {"tokens": [17, 10, 18]}),
    "POST /v1/files": Row((), (FileObject,), body_type=FORM, errors=(400, 408, 409, 413, 507)),
    "GET /v1/files": Row((), (jobs.FileList,), parameters=(PURPOSE, AFTER, LIMIT, ORDER), errors=(400, 404, 409)),
    "GET /v1/files/{file_id}": Row((), (FileObject,), errors=(404, 409)),
    "GET /v1/files/{file_id}/content": Row(media_type="application/octet-stream", errors=(404, 409)),
    "DELETE /v1/files/{file_id}": Row((), (jobs.FileDeleted,), errors=(404, 409)),
    "POST /v1/batches": Row(
        (jobs.BatchBody,),
        (Batch,),
        {"input_file_id": "file-5f0c1a", "endpoint": "/v1/chat/completions", "completion_window": "24h"},
        errors=(507,),
    ),
    "GET /v1/batches": Row((), (jobs.BatchList,), parameters=(AFTER, LIMIT), errors=(400, 404, 409)),
    "GET /v1/batches/{batch_id}": Row((), (Batch,), errors=(404, 409)),
    "POST /v1/batches/{batch_id}/cancel": Row((), (Batch,), errors=(400, 404, 409)),
    "POST /v1/fine_tuning/jobs": Row(
        (jobs.FineTuningBody,),
        (FineTuningJob,),
        {"model": "base", "training_file": "file-5f0c1a", "suffix": "sums"},
        {
            "problems with a grader": {
                "model": "base",
                "training_file": "file-5f0c1a",
                "method": {"type": "reinforcement", "reinforcement": {"grader": GRADER}},
            },
            "an environment of this server": {
                "model": "base",
                "method": {
                    "type": "reinforcement",
                    "reinforcement": {"grader": {"type": "environment", "name": "arithmetic"}},
                },
            },
        },
        errors=(507,),
    ),
    "GET /v1/fine_tuning/jobs": Row((), (jobs.JobList,), parameters=(AFTER, LIMIT)),
    "GET /v1/fine_tuning/jobs/{job_id}/events": Row((), (jobs.EventList,), parameters=(AFTER, LIMIT)),
    "GET /v1/fine_tuning/jobs/{job_id}/checkpoints": Row((), (jobs.CheckpointList,), parameters=(AFTER, LIMIT)),
    "GET /v1/fine_tuning/jobs/{job_id}, POST /v1/fine_tuning/jobs/{job_id}/cancel": Row((), (FineTuningJob,)),
    "POST /v1/fine_tuning/jobs/{job_id}/pause, POST /v1/fine_tuning/jobs/{job_id}/resume": Row((), (FineTuningJob,)),
    "GET /get_world_size, GET /get_world_size/": Row((), (identity.WorldSize,)),
    "GET /weight_info, GET /get_weight_version": Row((), (identity.WeightVersion,)),
    "GET /model_info, GET /get_model_info": Row((), (identity.ModelInfo,)),
    "GET /health_generate": Row((), (Done,)),
    ", ".join(f"POST {path}" for path in identity.ABSENT_PATHS): Row(),
    "GET /, HEAD /": Row(media_type="text/plain"),
    "GET /v1/session": Row(answer_example=SESSION),
    "GET /v1/events": Row(media_type="text/event-stream", errors=(429,)),
    "GET /v1/runs/{run}/rollouts": Row(answer_example=ROLLOUT_STEPS, errors=(404,)),
    "GET /v1/runs/{run}/rollouts/{step}": Row(answer_example=ROLLOUT_GROUPS, errors=(404, 422)),
    "GET /v1/runs/{run}/rollouts/{step}/{group}": Row(answer_example=ROLLOUT_GROUP, errors=(404, 422)),
    "GET /v1/trajectories/recent": Row((), (trajectories.RecentTrajectories,)),
    "GET /v1/device": Row(
        answer_example={
            "now": 1769893450.1,
            "name": "Device(gpu, 0)",
            "seconds": {"serving": 12.5, "rollout": 80.1, "learning": 31.0},
            "shares": {"serving_share": 0.7, "engine_share": 0.5},
            "memory": {"active": 3000000, "peak": 5000000, "cache": 100000},
            "bucket": 1,
            "times": [1769893449.1, 1769893450.1],
            "columns": {"running": [8, 12], "waiting": [0, 3]},
        }
    ),
    "GET /v1/device/timeline": Row(
        answer_example={"now": 1769893450.1, "work": ["serving", "rollout"], "spans": [[0, -1.2, 0.3], [1, -0.9, 0.5]]}
    ),
    "GET /v1/device/rows": Row(answer_example={"max_rows": 128, "waiting": 0, "held": 0, "rows": [DECODING]}),
    "GET /v1/runs": Row(answer_example={"data": [RUN], "after": None}),
    "GET /v1/runs/{run}": Row(
        answer_example={
            **RUN,
            "columns": ["time", "reward/mean"],
            "files": [{"name": "metrics.jsonl", "bytes": 48920}],
        },
        errors=(422,),
    ),
    "GET /v1/runs/{run}/config": Row(answer_example={"values": {"learner.learning_rate": 0.0004}}, errors=(422,)),
    "GET /v1/runs/{run}/history": Row(answer_example=HISTORY, errors=(422,)),
    "GET /v1/runs/{run}/evaluations": Row(
        answer_example={"data": [{"step": 20, "time": 1769893450.1, "heldout/accuracy": 0.61}]}, errors=(422,)
    ),
    "GET /v1/runs/{run}/happenings": Row(
        answer_example={"data": [{"time": 1769893450.1, "step": 20, "kind": "evaluated", "what": "policy@20"}]},
        errors=(422,),
    ),
    "GET /v1/runs/{run}/checkpoints": Row(
        answer_example={"data": [{"name": "step_000020", "step": 20, "time": 1769893450.1, "bytes": 1203884}]}
    ),
    "GET /v1/runs/{run}/faults": Row(
        answer_example={
            "data": [{"step": 7, "time": 1769893450.1, "kind": "loss", "text": "not finite", "culprits": []}]
        },
        errors=(422,),
    ),
    "GET /v1/runs/{run}/faults/{step}": Row(
        answer_example={"step": 7, "data": [{"fault": "loss", "reason": "not finite", "problem_id": "sum-9"}]},
        errors=(422,),
    ),
    "GET /v1/runs/{run}/log": Row(
        answer_example={
            "data": [{"time": 1769893450.1, "level": "WARNING", "logger": "parallm.trainer", "text": "..."}]
        }
    ),
    "GET /dashboard, GET /dashboard/": Row(media_type="text/html"),
    "GET /dashboard/{digest}/{path}": Row(media_type="text/javascript", errors=(404,)),
    "GET /api/version, HEAD /api/version": Row((), (ollama_models.VersionAnswer,)),
    "GET /api/tags, HEAD /api/tags": Row((), (ollama_cards.ModelTags,)),
    "GET /api/ps": Row((), (ollama_cards.LoadedModels,)),
    "GET /api/status": Row((), (ollama_models.CloudStatus,)),
    "POST /api/show": Row((ollama_models.ShowBody,), (ollama_cards.ModelPage,), {"model": "policy:latest"}),
    "POST /api/generate": Row(
        (ollama.OllamaGenerateBody,),
        (ollama.OllamaGenerateAnswer,),
        {"model": "policy", "prompt": "2 + 3?", "options": {"num_predict": 8, "temperature": 0}},
        {
            "the model is loaded": {"model": "policy"},
            "a raw prompt": {"model": "policy", "prompt": "2 + 3 =", "raw": True, "stream": False},
        },
        events=LINES,
        stream_type="application/x-ndjson",
    ),
    "POST /api/chat": Row(
        (ollama.OllamaChatBody,),
        (ollama.OllamaChatAnswer,),
        {"model": "policy:latest", "messages": MESSAGES, "think": False},
        {
            "JSON of a schema": {"model": "policy", "messages": MESSAGES, "format": SUM_SCHEMA, "keep_alive": "5m"},
            "functions": {"model": "policy", "messages": MESSAGES, "tools": [ADD], "stream": False},
        },
        events=LINES,
        stream_type="application/x-ndjson",
    ),
    "POST /api/embed": Row(
        (ollama.OllamaEmbedBody,),
        (ollama.OllamaEmbedAnswer,),
        {"model": "base", "input": ["2 + 3", "a sum"]},
        {"shorter vectors": {"model": "base", "input": "2 + 3", "dimensions": 1}},
    ),
    "POST /api/embeddings": Row(
        (ollama.OllamaEmbeddingsBody,), (ollama.OllamaEmbeddingsAnswer,), {"model": "base", "prompt": "2 + 3"}
    ),
    "POST /api/pull": Row(
        (ollama_catalogue.OllamaPullBody,),
        (ollama_pull.Progress,),
        {"model": "policy"},
        events=LINES,
        stream_type="application/x-ndjson",
    ),
    "POST /api/create": Row(
        (ollama_create.OllamaCreateBody,),
        (ollama_pull.Progress,),
        {"model": "poet", "from": "base", "system": "Answer in verse.", "parameters": {"temperature": 1}},
        events=LINES,
        stream_type="application/x-ndjson",
    ),
    "POST /api/copy": Row((ollama_catalogue.OllamaCopyBody,), (), {"source": "poet", "destination": "poet:v1"}),
    "DELETE /api/delete": Row((ollama_catalogue.OllamaDeleteBody,), (), {"model": "poet:v1"}),
    "HEAD /api/blobs/{digest}": Row(),
    "POST /api/blobs/{digest}": Row(body_type="application/octet-stream"),
    ", ".join(f"POST {path}" for path in ollama_models.CLOUD_PATHS): Row(),
}
DOCUMENTS = {row: document for rows, document in _DOCUMENTS.items() for row in rows.split(", ")}
"""The document of each route."""


def openapi_document(app: FastAPI, *, has_keys: bool) -> dict[str, Any]:
    """Make the document anew. Each route must have rows in `ROLES` and `DOCUMENTS`."""
    openapi = get_openapi(title=app.title, version=__version__, description=DESCRIPTION, routes=app.routes)
    schemas = _schemas()
    for path, operations in openapi["paths"].items():
        for method, operation in operations.items():
            row = f"{method.upper()} {path}"
            _describe(operation, DOCUMENTS[row], ROLES[row], has_keys=has_keys)
    components = openapi.setdefault("components", {})
    components["schemas"] = schemas
    if has_keys:
        components["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
    return openapi


def _schemas() -> dict[str, Any]:
    bodies = {body for document in DOCUMENTS.values() for body in document.bodies}
    answers = {answer for document in DOCUMENTS.values() for answer in document.answers} | {ErrorAnswer}
    models = sorted(bodies | answers, key=lambda model: model.__name__)
    _, definitions = models_json_schema(
        [(model, "validation") for model in models], ref_template=REF, schema_generator=DescribedJsonSchema
    )
    schemas: dict[str, Any] = definitions["$defs"]
    for body in bodies:
        _allow_null(schemas[body.__name__])
    return schemas


def _allow_null(schema: dict[str, Any]) -> None:
    """Allow null for each optional field, as `checked` in `schemas.py` does."""
    for name, value in schema["properties"].items():
        if name not in schema.get("required", ()) and {"type": "null"} not in value.get("anyOf", ()):
            kept = {key: value[key] for key in ("title", "default", "description") if key in value}
            kind = {key: item for key, item in value.items() if key not in kept}
            schema["properties"][name] = {"anyOf": [kind, {"type": "null"}], **kept}


def _describe(operation: dict[str, Any], document: Row, role: Role, *, has_keys: bool) -> None:
    operation["tags"] = [role]
    if document.parameters:
        operation["parameters"] = [*operation.get("parameters", ()), *document.parameters]
    if document.bodies:
        examples = {"usual": document.example, **document.more_examples}
        named = {name: {"value": value} for name, value in examples.items()}
        content = {"schema": _any_of(document.bodies), "examples": named}
        operation["requestBody"] = {"required": True, "content": {JSON: content}}
    elif document.body_type != JSON:
        file = {"type": "string", "format": "binary"}
        form = {"type": "object", "required": ["file"], "properties": {"file": file, "name": {"type": "string"}}}
        content = {"schema": form if document.body_type == FORM else file}
        operation["requestBody"] = {"required": True, "content": {document.body_type: content}}
    operation["responses"] = _responses(document, role, has_keys=has_keys)
    if has_keys and role != "public":
        operation["security"] = [{"bearer": []}, {"x-api-key": []}]


def _responses(document: Row, role: Role, *, has_keys: bool) -> dict[str, Any]:
    statuses = {403, 503, *document.errors}
    if role != "public" and has_keys:
        statuses |= {401}
    if role == "admin":
        statuses |= {507}
    if role in ("training", "admin"):
        statuses |= {400, 404, 408, 409, 413}
    elif document.bodies:
        statuses |= {400, 404, 408, 409, 413, 429, 504}
    error = {"schema": _any_of((ErrorAnswer,))}
    errors = {str(status): {"description": ERRORS[status], "content": {JSON: error}} for status in sorted(statuses)}
    return {"200": {"description": "The answer.", "content": _answer_content(document)}, **errors}


def _answer_content(document: Row) -> dict[str, Any]:
    if document.media_type != JSON:
        return {document.media_type: {"schema": {"type": "string"}}}
    example = {} if document.answer_example is None else {"example": document.answer_example}
    content: dict[str, Any] = {JSON: {"schema": _any_of(document.answers), **example}}
    if any("stream" in body.model_fields for body in document.bodies):
        events = {"type": "string", "description": f"With `stream`: {document.events}."}
        content[document.stream_type] = {"schema": events}
    return content


def _any_of(models: tuple[type[BaseModel], ...]) -> dict[str, Any]:
    refs = [{"$ref": REF.format(model=model.__name__)} for model in models]
    return refs[0] if len(refs) == 1 else {"anyOf": refs} if refs else {"type": "object"}
