"""Modelfiles: the text form of a name's source, system message, parameters, messages and license."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from parallm.registry.records import Overlay


def parameter_lines(parameters: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield names and values as Ollama shows them: texts in quotes, a line for each item of a list."""
    for name, value in parameters.items():
        for item in value if isinstance(value, list | tuple) else [value]:
            yield name, json.dumps(item, ensure_ascii=False)


def write_modelfile(name: str, source: str, overlay: Overlay) -> str:
    """Return a Modelfile that makes the same name again."""
    lines = [f"# Modelfile of {name}", f"FROM {source}"]
    if overlay.adapter:
        lines.append(f"ADAPTER {overlay.adapter}")
    if overlay.system:
        lines.append(f"SYSTEM {quoted(overlay.system)}")
    lines += [f"PARAMETER {key} {value}" for key, value in parameter_lines(overlay.parameters)]
    lines += [f"MESSAGE {message['role']} {quoted(message['content'])}" for message in overlay.messages]
    if overlay.license:
        lines.append(f"LICENSE {quoted(overlay.license)}")
    return "\n".join(lines) + "\n"


def quoted(text: str) -> str:
    """Return a text between the marks that it has none of."""
    return f'"""{text}"""' if "\n" in text or '"' in text else f'"{text}"'
