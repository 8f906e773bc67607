"""A server whose model thinks, and calls the function `add` where a request has it: its engine says what is scripted.

No model that is small enough for a test calls functions by itself, and Ollama's API has no way to make one. Everything
but the engine is ours. Called with `server.port=NUMBER`, as every server of `bench.processes`.
"""

import asyncio
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import uvicorn
from mlx_lm.utils import load_tokenizer

from parallm.model.chat.tokenizer import ChatTokenizer
from parallm.model.load import NANO
from parallm.server.settings import ServerSettings
from parallm.types import Completion, GenerationRequest
from tests.server.conftest import HERMES, EchoEngine, card, make_app

THOUGHT = "I add.\n</think>\n\n"
CALL = '<tool_call>{"name": "add", "arguments": {"x": 7}}</tool_call>'
RESULT = "<|tool|>"


@dataclass
class ScriptedEngine(EchoEngine):
    max_context: int = 4000
    tokenizer: Any = None

    def _completion(self, request: GenerationRequest, index: int) -> Completion:
        prompt = self.tokenizer.decode(request.prompt_tokens, special=True)
        self.says = THOUGHT if prompt.endswith("<think>\n") else ""
        self.says += CALL if '"add"' in prompt and RESULT not in prompt else "7"
        return super()._completion(request, index)


def thinking_tokenizer(folder: Path) -> ChatTokenizer:
    """Return the embedded model's with marks of thoughts, and a template that knows them and functions."""
    tokenizer = load_tokenizer(NANO, {"chat_template": HERMES})._tokenizer
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.save_pretrained(folder)
    return ChatTokenizer(load_tokenizer(folder))


def main() -> None:
    port = int(next(word for word in sys.argv if word.startswith("server.port=")).partition("=")[2])
    with TemporaryDirectory() as folder:
        tokenizer = thinking_tokenizer(Path(folder))
        app = make_app(
            ScriptedEngine(tokenizer=tokenizer),
            tokenizer,
            catalog=lambda: (card(3), card(2, "best")),
            settings=ServerSettings(ollama=True),
        )
        asyncio.run(uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning")).serve())


if __name__ == "__main__":
    main()
