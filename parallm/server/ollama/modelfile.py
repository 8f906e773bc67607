"""Modelfiles: the text form of a name's source, system message, parameters, messages and license.

Ollama's program reads them and sends their fields to `POST /api/create`; so does ours.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from parallm.errors import InvalidRequest
from parallm.registry.records import Overlay
from parallm.server.ollama.options import OllamaOptions

COMMAND = re.compile(r"[ \t]*([A-Za-z]+)[ \t]+")
ROLES = ("system", "user", "assistant")
FIELDS = {"FROM": "from", "SYSTEM": "system", "TEMPLATE": "template", "ADAPTER": "adapter", "LICENSE": "license"}
"""Fields of commands that have one text."""
REFUSED = ("RENDERER", "PARSER", "REQUIRES", "DRAFT")


def read_modelfile(text: str) -> dict[str, Any]:
    """Return `from`, `system`, `template`, `adapter`, `license`, `parameters` and `messages`, as far as they are there.

    Raises InvalidRequest with the number of the line.
    """
    fields: dict[str, Any] = {}
    for line, command, value in _commands(text):
        if command in FIELDS:
            fields[FIELDS[command]] = value
        elif command == "PARAMETER":
            _add_parameter(fields.setdefault("parameters", {}), value, line)
        elif command == "MESSAGE":
            role, _, content = value.partition(" ")
            if role not in ROLES:
                raise InvalidRequest(f"line {line} of the Modelfile: MESSAGE takes {', '.join(ROLES)}", "modelfile")
            fields.setdefault("messages", []).append({"role": role, "content": _unquoted(content.strip())})
        elif command in REFUSED:
            raise InvalidRequest(f"line {line} of the Modelfile: {command} is not supported; leave it out", "modelfile")
        else:
            raise InvalidRequest(f"line {line} of the Modelfile: no command {command[:50]!r}", "modelfile")
    if "from" not in fields:
        raise InvalidRequest("the Modelfile has no FROM line, which names the model to begin with", "modelfile")
    return fields


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
        lines.append(f"SYSTEM {_quoted(overlay.system)}")
    lines += [f"PARAMETER {key} {value}" for key, value in parameter_lines(overlay.parameters)]
    lines += [f"MESSAGE {message['role']} {_quoted(message['content'])}" for message in overlay.messages]
    if overlay.license:
        lines.append(f"LICENSE {_quoted(overlay.license)}")
    return "\n".join(lines) + "\n"


def _commands(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield the line of each command, the command in capitals, and its value without quotes."""
    lines = iter(enumerate(text.splitlines(), start=1))
    for number, line in lines:
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = COMMAND.match(line)
        if match is None:
            raise InvalidRequest(f"line {number} of the Modelfile is no command with a value", "modelfile")
        value = line[match.end() :]
        if value.count('"""') == 1:
            for _, more in lines:
                value += f"\n{more}"
                if '"""' in more:
                    break
            else:
                raise InvalidRequest(f'line {number} of the Modelfile: the text after """ does not end', "modelfile")
        command = match[1].upper()
        yield number, command, value.strip() if command == "MESSAGE" else _unquoted(value.strip())


def _add_parameter(parameters: dict[str, Any], value: str, line: int) -> None:
    name, _, text = value.partition(" ")
    text = _unquoted(text.strip())
    if name == "stop":
        parameters.setdefault("stop", []).append(text)
        return
    if name not in OllamaOptions.model_fields or not text:
        raise InvalidRequest(f"line {line} of the Modelfile: no parameter {name[:50]!r} with a value", "modelfile")
    try:
        parameters[name] = json.loads(text)
    except ValueError as error:
        raise InvalidRequest(f"line {line} of the Modelfile: {name} is {text[:50]!r}", "modelfile") from error


def _quoted(text: str) -> str:
    """Return a text in marks that end where it ends."""
    if '"""' in text or text.endswith('"'):
        return json.dumps(text, ensure_ascii=False)
    return f'"""{text}"""' if "\n" in text or '"' in text else f'"{text}"'


def _unquoted(text: str) -> str:
    if len(text) >= 6 and text.startswith('"""') and text.endswith('"""'):
        return text[3:-3]
    if len(text) < 2 or not (text.startswith('"') and text.endswith('"')):
        return text
    try:
        value: str = json.loads(text)
    except ValueError:
        return text[1:-1]
    return value
