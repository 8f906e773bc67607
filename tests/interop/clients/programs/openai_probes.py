"""Asks a server everything that OpenAI's API has, through OpenAI's own Python client. Needs that and nothing of ours.

    python tests/interop/clients/programs/openai_probes.py http://127.0.0.1:8000

The model must know tools (`tool_model.py` makes one). A parameter that the server does not honour must be
refused with 400; a probe that finds it ignored fails. One line for each probe that failed, then the counts as JSON.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import openai

Client = openai.OpenAI
Probe = Callable[[Client], object]
PROBES: list[Probe] = []

MODEL = "base"
ASK: list[Any] = [{"role": "user", "content": "Mia has 3 apples. Mia gets 4 more. How many apples?"}]
SCHEMA = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["x"],
    "additionalProperties": False,
}
ADD: Any = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}}
NAMED: Any = {"type": "function", "function": {"name": "add"}}
FLAT: Any = {"type": "function", "name": "add", "parameters": SCHEMA, "strict": False}


def probe(function: Probe) -> Probe:
    PROBES.append(function)
    return function


def complete(client: Client, **fields: Any) -> Any:
    return client.completions.create(
        **{"model": MODEL, "prompt": "12 + 3 =", "max_tokens": 8, "temperature": 0} | fields
    )


def chat(client: Client, **fields: Any) -> Any:
    defaults = {"model": MODEL, "messages": ASK, "max_completion_tokens": 8, "temperature": 0}
    return client.chat.completions.create(**defaults | fields)


def respond(client: Client, **fields: Any) -> Any:
    defaults = {"model": MODEL, "input": ASK[0]["content"], "max_output_tokens": 16, "temperature": 0}
    return client.responses.create(**defaults | fields)


def expect(is_right: object, shown: object = "") -> None:
    if not is_right:
        raise AssertionError(str(shown)[:300])


def refused(kind: type[openai.APIStatusError], parameter: str | None, call: Callable[[], object]) -> None:
    """The call raises exactly this class of error, which names the parameter."""
    try:
        answer = call()
    except openai.APIStatusError as error:
        expect(type(error) is kind, f"{type(error).__name__}: {error}")
        expect(parameter is None or str(error.param).startswith(parameter), f"param {error.param}: {error}")
        expect(error.body and error.message, "no OpenAI error body")
        return
    raise AssertionError(f"accepted: {answer}")


def bad(parameter: str | None, call: Callable[[], object]) -> None:
    refused(openai.BadRequestError, parameter, call)


def honoured(parameter: str, call: Callable[[], Any], is_right: Callable[[Any], object]) -> None:
    """The answer shows the parameter's effect, or the parameter is refused."""
    try:
        answer = call()
    except openai.BadRequestError as error:
        expect(str(error.param).startswith(parameter), f"refused for {error.param}: {error}")
        return
    expect(is_right(answer), answer)


def text_of(chunks: list[Any], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join((choice.delta.content if hasattr(choice, "delta") else choice.text) or "" for choice in choices)


def main(url: str) -> int:
    import openai_probes_batches  # noqa: F401, PLC0415
    import openai_probes_chat  # noqa: F401, PLC0415  the others register themselves
    import openai_probes_completions  # noqa: F401, PLC0415
    import openai_probes_embeddings  # noqa: F401, PLC0415
    import openai_probes_jobs  # noqa: F401, PLC0415
    import openai_probes_responses  # noqa: F401, PLC0415

    passed = 0
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        for one in PROBES:
            try:
                one(client)
                passed += 1
            except Exception as error:  # noqa: BLE001  whatever goes wrong is the probe's result
                print(f"{one.__name__}: {type(error).__name__}: {' '.join(str(error).split())[:300]}", flush=True)
    print(json.dumps({"version": openai.__version__, "passed": passed, "total": len(PROBES)}))
    return int(passed < len(PROBES))


if __name__ == "__main__":
    sys.modules["openai_probes"] = sys.modules["__main__"]
    sys.exit(main(sys.argv[1].rstrip("/")))
