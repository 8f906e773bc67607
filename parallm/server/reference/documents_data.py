"""Rows of documents.py for the routes that rollout workers call."""

from collections.abc import Mapping

from parallm.server.dialects.native import NativeAnswer
from parallm.server.dialects.routes_identity import Alive, ModelInfo, WeightVersion, WorldSize
from parallm.server.dialects.routes_tokenize import DetokenizeBody, TextOfTokens, TokenizeBody, TokensOfText
from parallm.server.dialects.sglang import SglangBody, SglangRow
from parallm.server.dialects.trl import TrlAnswer, TrlBody
from parallm.server.dialects.versioned import VersionedAnswer, VersionedBody
from parallm.server.dialects.vllm_legacy import LegacyAnswer
from parallm.server.dialects.vllm_tokens import TokensAnswer, TokensBody
from parallm.server.reference.document import Document, usage
from parallm.server.schemas import CompletionBody

SPAN = [{"version": "12", "start": 0, "end": 2}]
INFO = {
    "model_path": "Qwen/Qwen3-8B",
    "served_model_name": "policy",
    "tokenizer_path": "Qwen/Qwen3-8B",
    "is_generation": True,
    "preferred_sampling_params": None,
    "weight_version": "12",
    "max_model_len": 8192,
}

_generate = Document(
    bodies=(CompletionBody, SglangBody, TrlBody, VersionedBody),
    example={"prompt": [17, 10, 18], "model": "policy", "max_tokens": 8, "n": 1},
    others={
        "SGLang": {"input_ids": [17, 10, 18], "sampling_params": {"max_new_tokens": 8}, "return_logprob": True},
        "vLLM's first server": {"prompt": {"prompt_token_ids": [17, 10, 18]}, "max_tokens": 8, "logprobs": 0},
        "TRL": {"prompts": ["2 + 3 ="], "n": 2, "max_tokens": 8},
        "a trainer that names its version": {"prompt": "2 + 3 =", "policy_version": 12, "step_id": 7, "logprobs": 1},
    },
    answers=(NativeAnswer, SglangRow, TrlAnswer, LegacyAnswer, VersionedAnswer),
    answer={
        "request_id": "gen-1f",
        "step_id": None,
        "model": "policy@12",
        "text": [" 5"],
        "token_ids": [[220, 20]],
        "logprobs": [[-0.1, -0.02]],
        "logprobs_mode": "temperature",
        "finish_reasons": ["stop"],
        "policy_versions": [12],
        "weight_versions": [SPAN],
        "prompt_index": [0],
        "prompt_token_ids": [[17, 10, 18]],
        "usage": usage(3, 2),
    },
)
_weights = Document(answers=(WeightVersion,), answer={"weight_version": "12"})
_world = Document(answers=(WorldSize,), answer={"world_size": 1})
_info = Document(answers=(ModelInfo,), answer=INFO)

DATA_DOCUMENTS: Mapping[str, Document] = {
    "POST /generate": _generate,
    "POST /generate/": _generate,
    "POST //generate": _generate,
    "POST /inference/v1/generate": Document(
        bodies=(TokensBody,),
        example={"model": "policy", "token_ids": [17, 10, 18], "sampling_params": {"max_tokens": 8}},
        answers=(TokensAnswer,),
        answer={
            "request_id": "gen-1f",
            "step_id": None,
            "model": "policy@12",
            "created": 1790000000,
            "choices": [
                {
                    "index": 0,
                    "finish_reason": "stop",
                    "token_ids": [220, 20],
                    "logprobs": None,
                    "routed_experts": None,
                    "policy_version": 12,
                    "weight_versions": SPAN,
                }
            ],
            "prompt_logprobs": None,
            "prompt_token_ids": [17, 10, 18],
            "logprobs_mode": "temperature",
            "usage": usage(3, 2),
        },
    ),
    "POST /tokenize": Document(
        bodies=(TokenizeBody,),
        example={"prompt": "2 + 3"},
        answers=(TokensOfText,),
        answer={"count": 3, "max_model_len": 8192, "tokens": [17, 10, 18], "token_strs": None},
    ),
    "POST /detokenize": Document(
        bodies=(DetokenizeBody,),
        example={"tokens": [17, 10, 18]},
        answers=(TextOfTokens,),
        answer={"prompt": "2 + 3"},
    ),
    "GET /get_world_size": _world,
    "GET /get_world_size/": _world,
    "GET /weight_info": _weights,
    "GET /get_weight_version": _weights,
    "GET /model_info": _info,
    "GET /get_model_info": _info,
    "GET /health_generate": Document(answers=(Alive,), answer={"status": "ok"}),
}
