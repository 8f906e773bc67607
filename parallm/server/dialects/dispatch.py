"""Which program is asking: the one place that looks at the keys of a `/generate` body."""

from collections.abc import Mapping
from typing import Any

from parallm.server.dialects.dialect import Dialect
from parallm.server.dialects.legacy_vllm import LEGACY_VLLM
from parallm.server.dialects.native import NATIVE
from parallm.server.dialects.sglang import SGLANG
from parallm.server.dialects.trl import TRL
from parallm.server.dialects.versioned import VERSIONED


def dialect_of(value: Mapping[str, Any]) -> Dialect:
    """The dialect of a body by its keys; one that fits none is native, which names the field at fault."""
    if "prompts" in value:
        return TRL
    if value.keys() & {"input_ids", "text", "sampling_params"}:
        return SGLANG
    if isinstance(value.get("prompt"), dict):
        return LEGACY_VLLM
    if "policy_version" in value or _counts(value.get("logprobs")):
        return VERSIONED
    return NATIVE


def _counts(logprobs: object) -> bool:
    """Whether these are log-probs that the native form has no place for."""
    return isinstance(logprobs, int) and not isinstance(logprobs, bool) and logprobs > 0
