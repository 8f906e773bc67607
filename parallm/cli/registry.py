"""Models that a server knows beside the one that it began with (`registry.enabled=true`): their names and memory."""

import json
import sys
from argparse import Namespace
from pathlib import Path
from urllib.parse import quote

from parallm.cli import start
from parallm.cli.connection import CommandFailed, command, post, server
from parallm.client.calls import Call


@command
def pull(arguments: Namespace) -> int:
    """Make a model known to the server."""
    with server(arguments.host) as client:
        answer = client.send(post("/v1/models/pull", {"model": arguments.model}))
    sys.stdout.write(f"{answer.get('status', 'success')}\n")
    return 0


@command
def create(arguments: Namespace) -> int:
    """Name a model, by a Modelfile or by what it comes from."""
    fields = {"model": arguments.name}
    if arguments.file is not None:
        try:
            fields["modelfile"] = Path(arguments.file).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise CommandFailed(f"-f {arguments.file} cannot be read: {error}") from error
    else:
        source = Path(arguments.source).expanduser()
        fields["source"] = str(source.resolve()) if source.exists() else arguments.source
    if arguments.system is not None:
        fields["system"] = arguments.system
    with server(arguments.host) as client:
        client.send(post("/v1/models/create", fields))
    return 0


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
