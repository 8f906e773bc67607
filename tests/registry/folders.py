"""Model folders of a few hundred bytes, which the catalogue can read and nothing can load."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from functools import wraps
from pathlib import Path
from typing import ParamSpec

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "vocab_size": 32,
    "max_position_embeddings": 128,
}
Parameters = ParamSpec("Parameters")
TEMPLATE = "{% if tools %}{{ tools }}{% endif %}<think>"


def write_folder(folder: Path, *, template: str = "", **config: object) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    tensors = {"model.embed_tokens.weight": {"dtype": "F32", "shape": [32, 8], "data_offsets": [0, 0]}}
    header = json.dumps(tensors).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return folder


def on_loop(test: Callable[Parameters, Awaitable[None]]) -> Callable[Parameters, None]:
    """Run a test on an event loop of its own."""

    @wraps(test)
    def run(*arguments: Parameters.args, **options: Parameters.kwargs) -> None:
        async def begin() -> None:
            await test(*arguments, **options)

        asyncio.run(begin())

    return run
