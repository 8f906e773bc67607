"""What a name adds to its model -> the body of a request: a system message, messages, defaults of its parameters.

OpenAI's routes know fewer parameters than Ollama's, so the others hold for Ollama's routes alone.
"""

from collections.abc import Mapping
from typing import Any

from parallm.registry.records import Overlay

Body = Mapping[str, Any]
NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "seed": "seed",
    "stop": "stop",
    "num_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
"""Fields of chats and completions by Ollama's names of parameters."""
OF_RESPONSES = {"temperature": "temperature", "top_p": "top_p", "num_predict": "max_output_tokens"}
SYSTEM_ROLES = ("system", "developer")


def overlaid(path: str, body: Body, overlay: Overlay) -> Body:
    """Return the body of a request for a name with an overlay; what it says itself stays."""
    parameters = {name: value for name, value in overlay.parameters.items() if value != -1 or name != "num_predict"}
    if path.startswith("/api/"):
        options = {**parameters, **(body.get("options") or {})}
        body = {**body, **({"options": options} if options else {})}
    elif path in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
        names = OF_RESPONSES if path == "/v1/responses" else NAMES
        defaults = {names[name]: value for name, value in parameters.items() if name in names}
        if body.get("max_completion_tokens") is not None:
            defaults.pop("max_tokens", None)
        body = {**defaults, **{name: value for name, value in body.items() if value is not None}}
    match path:
        case "/v1/chat/completions" | "/api/chat":
            return {**body, "messages": _messages(body.get("messages") or [], overlay)}
        case "/v1/responses":
            given = body.get("input") or []
            turns = [{"role": "user", "content": given}] if isinstance(given, str) else list(given)
            system = {} if overlay.system is None else {"instructions": overlay.system}
            return {**system, **body, "input": [*overlay.messages, *turns]}
        case "/api/generate" if overlay.system is not None and not body.get("raw"):
            return {"system": overlay.system, **body}
    return body


def _messages(given: Any, overlay: Overlay) -> Any:
    if not isinstance(given, list) or not given:  # the route refuses it, or only loads the model
        return given
    has_system = isinstance(given[0], dict) and given[0].get("role") in SYSTEM_ROLES
    system = given[:1] if has_system else []
    if not has_system and overlay.system is not None:
        system = [{"role": "system", "content": overlay.system}]
    return [*system, *overlay.messages, *(given[1:] if has_system else given)]
