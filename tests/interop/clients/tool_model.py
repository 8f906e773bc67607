"""The embedded model with a chat template that knows tools, for checks of clients that call functions."""

import json
import shutil
from pathlib import Path

from parallm.model.load import NANO

TEMPLATE = (
    "{% if tools %}<|system|>{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|' + message.role + '|>' + message.content }}"
    "{% for tool_call in message.tool_calls %}"
    "{{ '<tool_call>' + tool_call.function | tojson + '</tool_call>' }}"
    "{% endfor %}"
    "{% if message.role == 'assistant' %}<|end|>{% endif %}"
    "{% endfor %}"
    "{# tool_call.name: how mlx-lm knows this notation of calls #}"
    "{% if add_generation_prompt %}<|assistant|>{% if prefix %}{{ prefix }}{% endif %}{% endif %}"
)


def write_tool_model(folder: Path) -> None:
    """Chats without tools read as they do in the embedded model; `prefix` is a variable to begin the answer with."""
    shutil.copytree(NANO, folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": TEMPLATE}))
