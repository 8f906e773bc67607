"""YAML, recipes and the command line -> RunConfig. Imports no MLX: a BLAS must be able to load before it."""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import yaml
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import Field, TypeAdapter, ValidationError

from parallm.checkpoint.settings import CheckpointSettings
from parallm.config_errors import explain_values
from parallm.device.settings import DeviceSettings
from parallm.engine.settings import EngineSettings
from parallm.environment.settings import ArithmeticSettings, EnvironmentSettings
from parallm.errors import ConfigError
from parallm.learner.presets import objective_of
from parallm.learner.settings import LearnerSettings
from parallm.metrics.settings import MetricsSettings
from parallm.model.settings import ModelSettings
from parallm.policies import PolicyName, PolicyPart, check_policies, values_of
from parallm.rollout.settings import RolloutSettings
from parallm.server.settings import ServerSettings
from parallm.settings import settings
from parallm.trainer.settings import TrainerSettings
from parallm.types import POLICY

PACKAGE_FOLDER = Path(__file__).parent
RUNS_FOLDER = Path("checkpoints")
NAME_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9._-]*$"
TRAJECTORIES = "trajectories.jsonl"
"""In the folder of a policy that learns from clients."""
SERVING = "serving-"
"""What the folder with what operators have set begins with; the beginning of the base's digest follows."""
MANDATORY = "???"
"""How OmegaConf marks a key without a value."""


@settings
class RunConfig:
    """Everything that a run depends on. One field per part: folder of conf/, field here, folder of parallm/."""

    name: str = Field(default="run", pattern=NAME_PATTERN)
    """Folder below checkpoints/."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    model: ModelSettings = ModelSettings()
    engine: EngineSettings = EngineSettings()
    learner: LearnerSettings = LearnerSettings()
    rollout: RolloutSettings = RolloutSettings()
    environment: EnvironmentSettings = ArithmeticSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    trainer: TrainerSettings = TrainerSettings()
    server: ServerSettings = ServerSettings()
    device: DeviceSettings = DeviceSettings()
    metrics: MetricsSettings = MetricsSettings()
    policies: dict[PolicyName, dict[PolicyPart, dict[str, Any]]] = Field(default_factory=dict)
    """Several adapters to train at the same time, by name, each with what differs from the parts above; see conf/."""


@settings
class EvaluateConfig(RunConfig):
    """What `parallm.evaluate` compares, and how: `trainer.evaluate_*` for the problems and samples."""

    adapters: tuple[str, ...] = ()
    """More adapters beside `model.adapter`; each a folder of an adapter, a checkpoint or a run, of which the best
    version counts, or FOLDER@VERSION, FOLDER@newest, FOLDER@all."""
    base: bool = True
    """Evaluate the model without an adapter too, and the differences to it."""


@settings
class QuantizeSettings:
    bits: Literal[2, 3, 4, 5, 6, 8] | None = None
    """Bits of a weight in the fused model; without them it is not quantized, whatever its base is."""
    group_size: Literal[32, 64, 128] = 64
    """Weights that share a scale."""


@settings
class ExportConfig:
    """What `parallm.export` writes, and from what: `model.path` and `model.adapter`."""

    name: str = Field(default="export", pattern=NAME_PATTERN)
    model: ModelSettings = ModelSettings()
    """`model.dtype=auto` keeps the type that the base is stored in."""
    formats: tuple[Literal["mlx", "peft", "fused"], ...] = Field(default=("mlx", "peft", "fused"), min_length=1)
    """`mlx` and `peft`: the adapter as mlx-lm and PEFT read it; `fused`: a whole model with the adapter merged in."""
    output: str | None = None
    """A folder that does not exist yet; none: below checkpoints/export."""
    quantize: QuantizeSettings = QuantizeSettings()
    device: DeviceSettings = DeviceSettings()


ENVIRONMENTS: tuple[type, ...] = get_args(get_args(EnvironmentSettings)[0])
Config = TypeVar("Config")


def to_config(composed: DictConfig, kind: type[Config]) -> Config:
    """Check everything at once. Raises ConfigError with one line per unknown key, wrong value or missing value."""
    try:
        values = OmegaConf.to_container(composed, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(str(error).splitlines()[0]) from error
    config = _validated(_without_mandatory(values), kind)
    if isinstance(config, RunConfig):
        policy_configs(config)
    return config


def policy_configs(config: RunConfig) -> dict[str, RunConfig]:
    """The configuration of each policy that a run trains, by name; of `policy` alone if it names none.

    Raises ConfigError with one line for each wrong name, key or value, and for choices that contradict each other.
    """
    check_choices(config)
    if not config.policies:
        return {POLICY: config}
    metrics = config.metrics
    check_policies(config.policies, resume=config.checkpoint.resume, wandb=metrics.wandb, display=metrics.display)
    run, configs, wrong = dataclasses.asdict(config), {}, []
    for name, own in config.policies.items():
        try:
            configs[name] = _validated(values_of(own, run), type(config))
            check_choices(configs[name])
        except ConfigError as error:
            wrong += [f"policies.{name}.{line}" for line in str(error).splitlines()]
    if wrong:
        raise ConfigError("\n".join(wrong))
    return configs


def check_choices(config: RunConfig) -> None:
    """Raise ConfigError with one line for each pair of choices that contradict each other."""
    objective = objective_of(config.learner)
    source = config.rollout.source
    if source == "environment":
        return
    wrong = []
    if not config.server.enabled:
        wrong.append(f"rollout.source={source} learns from requests: it needs server.enabled=true")
    if config.learner.data is not None:
        wrong.append(f"rollout.source={source} learns from requests: leave learner.data out, or rollout.source")
    if source == "atropos" and objective.needs_base and objective.kl_placement == "reward":
        wrong.append(
            "rollout.source=atropos: environments may send advantages instead of rewards, so the KL cannot be part of "
            "a reward; set learner.kl_placement=loss"
        )
    if source == "live" and config.rollout.live.group_by == "none" and objective.advantage != "reinforce_pp":
        wrong.append(
            f"rollout.live.group_by=none: learner.advantage={objective.advantage} compares the completions of a group, "
            "and there are none; set learner.advantage=reinforce_pp, whose baseline is the whole step"
        )
    if wrong:
        raise ConfigError("\n".join(wrong))


def _validated(values: Any, kind: type[Config]) -> Config:
    try:
        return TypeAdapter(kind).validate_python(values)
    except ValidationError as error:
        raise ConfigError(explain_values(error.errors(), known_keys(kind))) from error


def known_keys(kind: type = RunConfig) -> dict[str, Any]:
    """Every key of a command with its default; below `environment`, one level with the name of each environment."""
    keys = _defaults(kind)
    return keys | ({"environment": _environments()} if "environment" in keys else {})


def register_defaults(kind: type = RunConfig) -> None:
    """Make every key known to Hydra, so that it can be shown and overridden though no YAML names it."""
    for name, keys in _environments().items():
        ConfigStore.instance().store(name=f"{name}_defaults", node=OmegaConf.create(keys))
    known = known_keys(kind)
    defaults = OmegaConf.create(known | ({"environment": {}} if "environment" in known else {}))
    for part in defaults:
        if OmegaConf.is_config(defaults[part]):
            # Hydra would stop at the first unknown key; let it pass here, so that to_config names all of them
            OmegaConf.set_struct(defaults[part], False)
    ConfigStore.instance().store(name="run_defaults", node=defaults)


def _environments() -> dict[str, Any]:
    return {keys["name"]: keys for keys in map(_defaults, ENVIRONMENTS)}


def shipped(folder: str) -> Path:
    """The folder `conf` or `recipes`: inside the package in a wheel, beside it in a checkout."""
    installed = PACKAGE_FOLDER / folder
    return installed if installed.is_dir() else PACKAGE_FOLDER.parent / folder


def register_recipes(*folders: Path) -> None:
    """Make each `NAME.yaml` selectable as `+recipe=NAME`; later folders win. Raises ConfigError for a broken file."""
    for path in recipe_files(*folders).values():
        try:
            recipe = OmegaConf.load(path)
        except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError, OSError) as error:
            raise ConfigError(f"recipe {path} cannot be read: {error}") from error
        if not isinstance(recipe, DictConfig):
            raise ConfigError(f"recipe {path} must be a mapping of keys to values")
        ConfigStore.instance().store(
            group="recipe", name=path.stem, node=recipe, package="_global_", provider=str(path.parent)
        )


def recipe_files(*folders: Path) -> dict[str, Path]:
    """Recipe names with their files; later folders win."""
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.yaml"))}


def run_folder(name: str, resume: str, now: str) -> str:
    """Where a run writes: `checkpoints/NAME/NOW`.

    With `resume=auto`, the newest run folder of that name that holds a checkpoint, trajectories of clients or what
    operators have set, if there is one: the run goes on in it. A checkpoint named by its folder starts a new run, so
    that the run it came from stays as it is.
    """
    # Hydra makes the folder before to_run_config refuses a wrong name
    runs = RUNS_FOLDER / (str(name) if re.match(NAME_PATTERN, str(name)) else "run")
    if resume == "auto":
        begun = [
            folder
            for folder in runs.glob("*/")
            if (has_checkpoint(folder) or has_trajectories(folder) or has_serving_state(folder))
            and not folder.name.startswith("sweep_")
        ]
        if begun:
            return str(max(begun, key=lambda folder: folder.name))
    return str(runs / now)


def has_checkpoint(folder: Path) -> bool:
    """Whether the checkpoint manager has saved anything in this run folder or in one of its policies, good or not."""
    return any(True for pattern in ("step_*/", "*/step_*/") for _ in folder.glob(pattern))


def has_trajectories(folder: Path) -> bool:
    """Whether completions of clients were collected in this run folder or for one of its policies."""
    return any(True for pattern in (TRAJECTORIES, f"*/{TRAJECTORIES}") for _ in folder.glob(pattern))


def has_serving_state(folder: Path) -> bool:
    """Whether operators have set anything while a run in this folder was served."""
    return any(True for _ in folder.glob(f"{SERVING}*/serving.json"))


def _defaults(settings_class: type) -> dict[str, Any]:
    """Default of every key, as plain data; `???` where a value must be given."""
    fields = getattr(settings_class, "__pydantic_fields__")  # noqa: B009  (pydantic adds it; mypy cannot know)
    defaults = {
        name: MANDATORY if field.is_required() else field.get_default(call_default_factory=True)
        for name, field in fields.items()
    }
    plain: dict[str, Any] = TypeAdapter(dict[str, Any]).dump_python(defaults, mode="json")
    return plain


def _without_mandatory(values: Any) -> Any:
    """Drop keys that still lack a value: pydantic then reports them with everything else that is wrong."""
    if isinstance(values, Mapping):
        return dict(_given(values))
    return values


def _given(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if not (isinstance(value, str) and value == MANDATORY):
            yield key, _without_mandatory(value)
