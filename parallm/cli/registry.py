"""Models that a server knows beside the one that it began with (`registry.enabled=true`): their names and memory."""

import json
import sys
from argparse import Namespace
from collections.abc import Iterable, Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, TextIO
from urllib.parse import quote

from parallm.cli import start
from parallm.cli.connection import CommandFailed, command, post, post_lines, server
from parallm.cli.models import size_text
from parallm.client.calls import ApiError, Call

PULL_SECONDS = 86_400.0


@command
def pull(arguments: Namespace) -> int:
    """Make a model known to the server, which may download it first. The route is one of Ollama's."""
    with server(arguments.host, seconds=PULL_SECONDS) as client:
        try:
            write_progress(client.events(post_lines("/api/pull", {"model": arguments.model})), sys.stdout)
        except ApiError as error:
            if error.code in ("unknown_url", "wrong_method"):
                raise CommandFailed("the server pulls no models; start it with server.ollama=true") from error
            raise
    return 0


def write_progress(lines: Iterable[Mapping[str, Any]], output: TextIO) -> None:
    """Print each status on a line; on a terminal also how much of a file is there, on the same line until its end."""
    is_terminal, last = output.isatty(), None
    for line in lines:
        status, total = line["status"], line.get("total")
        if status != last and last is not None and is_terminal:
            output.write("\n")
        if is_terminal:
            share = f" {100 * (line.get('completed') or 0) // total}% of {size_text(total)}" if total else ""
            output.write(f"\r{status}{share}\x1b[K")
        elif status != last:
            output.write(f"{status}\n")
        output.flush()
        last = status
    if last is not None and is_terminal:
        output.write("\n")


@command
def create(arguments: Namespace) -> int:
    """Name a model, by a Modelfile or by what it comes from."""
    fields = {"source": arguments.source} if arguments.file is None else _read_modelfile(Path(arguments.file))
    folder = Path() if arguments.file is None else Path(arguments.file).parent
    source = folder / Path(fields["source"]).expanduser()
    fields |= {"model": arguments.name, "source": str(source.resolve()) if source.exists() else fields["source"]}
    if arguments.system is not None:
        fields["system"] = arguments.system
    with server(arguments.host) as client:
        client.send(post("/v1/models/create", fields))
    return 0


def _read_modelfile(path: Path) -> dict[str, Any]:
    """Return the fields of `/v1/models/create` that a Modelfile gives."""
    try:
        fields: dict[str, Any] = resolve_name("parallm.server.ollama.modelfile:read_modelfile")(path.read_text())
    except (OSError, ValueError) as error:  # what a Modelfile must not say is a ValueError, too
        raise CommandFailed(f"-f {path} cannot be read: {error}") from error
    return {"source": fields.pop("from"), **fields}


@command
def copy(arguments: Namespace) -> int:
    """Give a model another name."""
    with server(arguments.host) as client:
        client.send(post("/v1/models/copy", {"source": arguments.source, "destination": arguments.destination}))
    return 0


@command
def remove(arguments: Namespace) -> int:
    """Forget a name."""
    with server(arguments.host) as client:
        client.send(Call("DELETE", f"/v1/models/{quote(arguments.model, safe='')}", json.dumps))
    return 0


def stop(arguments: Namespace) -> int:
    """Unload a model, or end the server."""
    return start.stop(arguments) if arguments.model is None else _unload(arguments)


@command
def _unload(arguments: Namespace) -> int:
    with server(arguments.host) as client:
        client.send(post("/v1/models/unload", {"model": arguments.model}))
    return 0
