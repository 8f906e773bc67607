"""Adapters, training and the state of a server."""

import json
import sys
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx

from parallm.cli.connection import CommandFailed, address_of, command, connect, get, server, write_table
from parallm.cli.models import size_text
from parallm.client.calls import ApiError
from parallm.client.client import Client
from parallm.reports import TrainingStatus

RUNNING, STOPPED, UNKNOWN = 0, 3, 4
"""Exit codes of `status`, those of service scripts."""
STATUS_SECONDS = 5.0


@command
def adapters(arguments: Namespace) -> int:
    """List, load, promote, save and forget adapters."""
    with server(arguments.host) as client:
        match arguments.action:
            case "load":
                card = client.load_adapter(arguments.path, name=arguments.name)
                sys.stdout.write(f"{card.name}@{card.version}\n")
            case "promote":
                client.promote(arguments.version, arguments.name)
                sys.stdout.write(f"{arguments.name} is {arguments.name}@{arguments.version}\n")
            case "rollback":
                version = client.roll_back(arguments.name)
                sys.stdout.write(f"{arguments.name} is {arguments.name}@{version}\n")
            case "rm":
                client.unload_adapter(arguments.model)
            case "save":
                _save_adapter(client, arguments.model, arguments.file)
            case _:
                _list_adapters(client, is_json=arguments.json)
    return 0


def _save_adapter(client: Client, model: str, file: str | None) -> None:
    path = Path(file or f"{model}.zip")
    content = client.adapter_archive(model)
    try:
        with path.open("xb") as archive:
            archive.write(content)
    except OSError as error:
        raise CommandFailed(f"{path} cannot be written: {error.strerror}; name another file") from error
    sys.stdout.write(f"{path}  {size_text(len(content))}\n")


def _list_adapters(client: Client, *, is_json: bool) -> None:
    cards = client.adapters()
    if is_json:
        sys.stdout.write(f"{json.dumps([asdict(card) for card in cards], indent=2)}\n")
        return
    rows = [
        (
            f"{card.name}@{card.version}",
            "yes" if card.is_served else "",
            ", ".join(card.aliases),
            str(card.step),
            str(card.rank),
            size_text(card.num_bytes),
        )
        for card in cards
    ]
    write_table(("NAME", "SERVED", "ALIASES", "STEP", "RANK", "SIZE"), rows)


@command
def training(arguments: Namespace) -> int:
    """Watch, pause, resume, step, save, evaluate and stop training."""
    with server(arguments.host) as client:
        if arguments.action == "checkpoint":
            for policy, folder in client.checkpoint(arguments.policy).items():
                sys.stdout.write(f"{policy}  {folder}\n")
            return 0
        if arguments.action == "evaluate":
            _evaluate(client, arguments.policy, is_json=arguments.json)
            return 0
        status = {
            "pause": client.pause_training,
            "resume": client.resume_training,
            "step": client.train_step,
            "stop": client.stop_training,
            "status": lambda _: client.training_status(),
        }[arguments.action](arguments.policy)
    if arguments.json:
        sys.stdout.write(f"{json.dumps(asdict(status), indent=2)}\n")
        return 0
    policies = {"": status} if not status.policies else status.policies
    for name, one in policies.items():
        sys.stdout.write(f"{name + '  ' if name else ''}{_training_line(one)}\n")
    return 0


def _evaluate(client: Client, policy: str | None, *, is_json: bool) -> None:
    rows = client.evaluate(policy)
    if is_json:
        sys.stdout.write(f"{json.dumps(rows, indent=2)}\n")
        return
    for name, row in rows.items():
        sys.stdout.write(f"{name}@{row['heldout/version']}  {_score(row)}\n")


def _score(row: Mapping[str, Any]) -> str:
    if row.get("heldout/accuracy") is None:
        return f"held-out loss {row.get('heldout/loss')}"
    low, high = row["heldout/low"], row["heldout/high"]
    return f"held-out accuracy {row['heldout/accuracy']:.1%} ({low:.1%} to {high:.1%})"


def _training_line(status: TrainingStatus) -> str:
    if status.state == "serving":
        return "serving, not training"
    metrics = {name: value for name, value in status.metrics.items() if value is not None}
    reward = f", reward {metrics['reward/mean']:.3f}" if "reward/mean" in metrics else ""
    return f"{status.state}, step {status.step} of {status.total_steps}, version {status.version}{reward}"


def status(arguments: Namespace) -> int:
    """Say whether a server answers: exit code 0, 3 if there is none, 4 if it does not answer as one does."""
    address = address_of(arguments.host)
    code, report = _report(address)
    if arguments.json:
        sys.stdout.write(f"{json.dumps(report, indent=2, default=asdict)}\n")
        return code
    if code != RUNNING:
        sys.stdout.write(f"{report['status']}  {address}  {report['reason']}\n")
        return code
    sys.stdout.write(f"{report['status']}  {address}  version {report['version']}, process {report['pid']}, ")
    sys.stdout.write(f"{report['uptime_seconds']:.0f} s\nmodels   {', '.join(report['models'])}\n")
    if report["training"] is not None:
        sys.stdout.write(f"training {_training_line(report['training'])}\n")
    return code


def _report(address: str) -> tuple[int, dict[str, Any]]:
    try:
        with connect(address, seconds=STATUS_SECONDS) as client:
            report: dict[str, Any] = {"url": address, **client.send(get("/v1/status"))}
            report["models"] = [model["id"] for model in client.send(get("/v1/models"))["data"]]
            report["training"] = _training(client)
            return RUNNING, report
    except httpx.ConnectError as error:
        return STOPPED, {"status": "stopped", "url": address, "reason": str(error)}
    except (ApiError, httpx.HTTPError, httpx.InvalidURL) as error:
        reason = str(error) or "no answer within 5 s: it loads its model, or is no server of ParaLLM"
        return UNKNOWN, {"status": "unknown", "url": address, "reason": reason}


def _training(client: Client) -> TrainingStatus | None:
    """Return what the trainer does; None where the key must not see it."""
    try:
        return client.training_status()
    except ApiError:
        return None
