"""The command line of an environment, and the file from which it learns what this run is like."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallm.errors import ConfigError
from parallm.rollout.atropos.api import Sizes
from parallm.rollout.atropos.start.settings import EnvironmentProcess

HOST = Path(__file__).with_name("hosted.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What all environments of a run are told."""

    api: str
    """URL of run-api."""
    server: str
    """Ours."""
    recipes: str
    """The folder of the recipes that come with ParaLLM."""
    tokenizer: str
    """A folder or hub id that transformers reads."""
    model: str
    """The name of the policy in requests."""
    sizes: Sizes
    group_size: int
    max_tokens: int


def own_config(told: Surroundings, process: EnvironmentProcess) -> dict[str, Any]:
    """As atroposlib's `serve --config` reads it.

    There are two entries for our one server: with a single one, environments whose own default is no list drop its
    URL and ask localhost:9004 to 9007.
    """
    env = {
        "group_size": told.group_size,
        "batch_size": told.sizes.batch_size,
        "max_token_length": told.max_tokens,
        "max_batches_offpolicy": 1,
        "steps_per_eval": 0,
        "total_steps": -1,  # what the trainer registers
        "tokenizer_name": told.tokenizer,
        "rollout_server_url": told.api,
        "use_wandb": False,
    }
    server = {
        "server_type": "vllm",
        "base_url": f"{told.server}/v1",
        "model_name": told.model,
        "tokenizer_name": told.tokenizer,
        "api_key": "x",
    }
    return {
        "env": env | process.env,
        "openai": [server | process.openai, server | process.openai],
        "slurm": False,
        "testing": False,
    }


def command_of(name: str, process: EnvironmentProcess, told: Surroundings, *, python: str, folder: Path) -> list[str]:
    """Writes the file into `folder`. Raises ConfigError for a script that is not there."""
    place = Path(process.folder).expanduser().resolve()
    script = place / Path(process.script.replace("{recipes}", told.recipes)).expanduser()
    if not script.is_file():
        raise ConfigError(
            f"rollout.atropos.start.environments.{name}: {script} is no file; the environments of Atropos are in its "
            "repository, not in the package atroposlib"
        )
    config = folder / f"{name}.json"
    config.write_text(json.dumps(own_config(told, process), indent=1))
    words = {"{config}": str(config), "{api}": told.api, "{server}": told.server, "{tokenizer}": told.tokenizer}
    return [python, str(HOST), str(script), *(_filled(one, words) for one in process.arguments)]


def _filled(text: str, words: dict[str, str]) -> str:
    for word, value in words.items():
        text = text.replace(word, value)
    return text
