"""Models of a server: names, what is loaded, what is known of one, vectors of texts."""

import json
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from parallm.cli.connection import CommandFailed, command, get, post, server, write_table

UNITS = ("B", "kB", "MB", "GB", "TB")
TEXTS_AT_ONCE = 64


@command
def list_models(arguments: Namespace) -> int:
    """Print a line for each name that a request may ask for."""
    with server(arguments.host) as client:
        answer = client.send(get("/v1/models"))
    if arguments.json:
        return _write_json(answer)
    rows = [
        (
            model["id"],
            str(model.get("digest") or "").removeprefix("sha256:")[:12],
            size_text(model.get("size")),
            ago(model.get("modified")),
            str(model.get("root") or ""),
            str(model.get("policy_version") or ""),
        )
        for model in answer["data"]
    ]
    write_table(("NAME", "ID", "SIZE", "MODIFIED", "BASE", "VERSION"), rows)
    return 0


@command
def list_loaded(arguments: Namespace) -> int:
    """Print a line for each model in memory."""
    with server(arguments.host) as client:
        answer = client.send(get("/v1/models"))
    loaded = [model for model in answer["data"] if model.get("loaded", True)]  # a server of one model has it loaded
    if arguments.json:
        return _write_json(answer | {"data": loaded})
    rows = [
        (
            model["id"],
            str(model.get("digest") or "").removeprefix("sha256:")[:12],
            size_text(model.get("memory_bytes")),
            str(model.get("max_model_len") or ""),
            "pinned" if model.get("pinned") else until(model.get("expires_at")),
        )
        for model in loaded
    ]
    write_table(("NAME", "ID", "SIZE", "CONTEXT", "UNTIL"), rows)
    return 0


@command
def show(arguments: Namespace) -> int:
    """Print each fact of a model on a line."""
    with server(arguments.host) as client:
        answer = client.send(get(f"/v1/models/{quote(arguments.model, safe='')}"))
    if arguments.json:
        return _write_json(answer)
    for name, value in _facts(answer):
        sys.stdout.write(f"{name:<24} {value}\n")
    return 0


@command
def embed(arguments: Namespace) -> int:
    """Print a line of JSON for each text: its index and its vector."""
    texts = arguments.words or [line.rstrip("\n") for line in sys.stdin]
    if not all(texts) or not texts:
        raise CommandFailed("an empty text has no vector; give texts as arguments or as lines of standard input")
    with server(arguments.host) as client:
        for first in range(0, len(texts), TEXTS_AT_ONCE):
            fields = {"model": arguments.model, "input": texts[first : first + TEXTS_AT_ONCE]}
            if arguments.dimensions is not None:
                fields["dimensions"] = arguments.dimensions
            for row in client.send(post("/v1/embeddings", fields))["data"]:
                line = {"index": first + row["index"], "embedding": row["embedding"]}
                sys.stdout.write(f"{json.dumps(line)}\n")
    return 0


def size_text(count: int | None) -> str:
    """Return bytes in a unit that leaves up to three digits before the point."""
    if count is None:
        return ""
    value, unit = float(count), 0
    while value >= 1000 and unit < len(UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.1f} {UNITS[unit]}" if unit and value < 100 else f"{value:.0f} {UNITS[unit]}"


def ago(moment: float | None) -> str:
    """Return how long ago a time in Unix seconds was."""
    return "" if moment is None else f"{_duration(time.time() - moment)} ago"


def until(moment: float | None) -> str:
    """Return how long it is until a time in Unix seconds."""
    return "" if moment is None else f"in {_duration(moment - time.time())}"


def _duration(seconds: float) -> str:
    for size, unit in ((86_400, "day"), (3600, "hour"), (60, "minute"), (1, "second")):
        if seconds >= size:
            count = int(seconds // size)
            return f"{count} {unit}{'s' if count > 1 else ''}"
    return "0 seconds"


def _facts(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _facts(value, f"{above}{name}.")
        elif isinstance(value, Sequence) and not isinstance(value, str):
            yield above + name, ", ".join(map(str, value))
        elif value is not None:
            yield above + name, str(value)


def _write_json(answer: Any) -> int:
    sys.stdout.write(f"{json.dumps(answer, indent=2)}\n")
    return 0
