"""What the page of each route shows: the types that parse.py reads and that answers are written with, and examples."""

from collections.abc import Mapping

from parallm.server.openai.chat_schemas import ChatBody
from parallm.server.openai.responses_schemas import ResponseAnswer, ResponseBody
from parallm.server.reference.document import Document, usage
from parallm.server.reference.documents_control import CONTROL_DOCUMENTS
from parallm.server.reference.documents_data import DATA_DOCUMENTS
from parallm.server.schemas import ChatAnswer, CompletionAnswer, CompletionBody, ModelEntry, ModelList

MODEL = {
    "id": "policy",
    "object": "model",
    "created": 1790000000,
    "owned_by": "parallm",
    "root": "Qwen/Qwen3-8B",
    "parent": "policy@11",
    "max_model_len": 8192,
    "policy_version": 12,
}

ASKED = [{"role": "user", "content": "2 + 3?"}]
SUM_SCHEMA = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
SUM = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SUM_SCHEMA}}

_models = Document(answers=(ModelList,), answer={"object": "list", "data": [MODEL]})

DOCUMENTS: Mapping[str, Document] = {
    "GET /health": Document(answer={"status": "ok", "model_loaded": True, "num_running": 3, "num_waiting": 0}),
    "GET /ready": Document(answer={"status": "ready"}),
    "GET /metrics": Document(
        media_type="text/plain", answer={"text": 'vllm:num_requests_running{engine="0",model_name="nano"} 3.0'}
    ),
    "GET /v1/metrics": Document(
        answer={
            "current_policy_version": 12,
            "queue_depth": 0,
            "max_batch_size": 128,
            "flush_interval_ms": 0.0,
            "num_running": 3,
            "metrics": {"vllm:num_requests_running": [{"labels": {"engine": "0", "model_name": "nano"}, "value": 3.0}]},
        }
    ),
    "GET /v1/models": _models,
    "GET /models": _models,
    "GET /v1/models/{name}": Document(answers=(ModelEntry,), answer=MODEL),
    "POST /v1/completions": Document(
        bodies=(CompletionBody,),
        example={"model": "policy", "prompt": "2 + 3 =", "max_tokens": 8, "temperature": 0.7, "logprobs": 1},
        others={
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
        answers=(CompletionAnswer,),
        answer={
            "id": "cmpl-1f",
            "object": "text_completion",
            "created": 1790000000,
            "model": "policy@12",
            "choices": [
                {
                    "index": 0,
                    "finish_reason": "stop",
                    "policy_version": 12,
                    "weight_versions": [{"version": "12", "start": 0, "end": 2}],
                    "text": " 5",
                    "logprobs": None,
                }
            ],
            "usage": usage(4, 2),
        },
    ),
    "POST /v1/chat/completions": Document(
        bodies=(ChatBody,),
        example={"model": "policy", "messages": ASKED, "max_tokens": 64},
        others={
            "JSON of a schema": {"model": "policy", "messages": ASKED, "response_format": SUM},
            "a function that is called": {
                "model": "policy",
                "messages": ASKED,
                "tools": [{"type": "function", "function": {"name": "add", "parameters": SUM_SCHEMA}}],
                "tool_choice": "required",
            },
            "log-probs in a stream": {
                "model": "policy",
                "messages": ASKED,
                "stream": True,
                "logprobs": True,
                "top_logprobs": 2,
            },
        },
        answers=(ChatAnswer,),
        answer={
            "id": "chatcmpl-1f",
            "object": "chat.completion",
            "created": 1790000000,
            "model": "policy@12",
            "choices": [
                {
                    "index": 0,
                    "finish_reason": "stop",
                    "policy_version": 12,
                    "weight_versions": [{"version": "12", "start": 0, "end": 2}],
                    "message": {"role": "assistant", "content": "5"},
                    "logprobs": None,
                }
            ],
            "usage": usage(9, 2),
        },
    ),
    "POST /v1/responses": Document(
        bodies=(ResponseBody,),
        example={"model": "policy", "input": "2 + 3?", "max_output_tokens": 64},
        answers=(ResponseAnswer,),
        events="OpenAI's events of a response, the last one `response.completed`, `response.incomplete` or `error`",
        answer={
            "id": "resp_1f",
            "object": "response",
            "created_at": 1790000000,
            "status": "completed",
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "max_output_tokens": 64,
            "metadata": {},
            "model": "policy@12",
            "output": [
                {
                    "type": "message",
                    "id": "msg_1f",
                    "status": "completed",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": "5", "annotations": [], "logprobs": []}],
                }
            ],
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": 1.0,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": 1.0,
            "truncation": "disabled",
            "usage": {
                "input_tokens": 9,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": 2,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": 11,
            },
            "user": None,
            "policy_version": 12,
        },
    ),
    "GET /v1/training/status": Document(
        answer={"state": "updating", "step": 4, "total_steps": 200, "version": 4, "metrics": {"reward/mean": 0.61}}
    ),
    **CONTROL_DOCUMENTS,
    **DATA_DOCUMENTS,
}
"""One row for each route, as in roles.py."""
