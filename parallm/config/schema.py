"""The configuration classes of all commands, and their checks. Imports no MLX: a BLAS must be loaded first."""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from parallm.checkpoint.settings import CheckpointSettings
from parallm.config.errors import KnownKeys, explain_values
from parallm.config.process_log import LogForm, LogLevel
from parallm.config.run_folder import NAME_PATTERN
from parallm.config.run_kinds import wrong_evaluation
from parallm.device.settings import BlasSettings, DeviceSettings, ServingDeviceSettings
from parallm.distributed.settings import DistributedSettings, ServingSettings
from parallm.engine.settings import EngineSettings
from parallm.environment.settings import ArithmeticSettings, EnvironmentSettings
from parallm.errors import ConfigError
from parallm.jobs.settings import JobSettings
from parallm.learner.loss.objective import resolve_objective
from parallm.learner.settings import LearnerSettings
from parallm.metrics.settings import DisplaySettings, MetricsSettings
from parallm.model.settings import BaseSettings, ComputedBaseSettings, ModelSettings
from parallm.registry.settings import RegistrySettings
from parallm.rollout.settings import EpisodeSettings, RolloutSettings
from parallm.server.settings import ServerSettings
from parallm.settings import settings
from parallm.tasks.settings import TaskSettings
from parallm.trainer.settings import EvaluationSettings, TrainerSettings
from parallm.types import BASE, BEST, LATEST, POLICY

PACKAGE_FOLDER = Path(__file__).parent.parent
MANDATORY = "???"
"""OmegaConf's mark of a key without a value."""
PolicyName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_-]*$")]
"""Name in requests, of a folder and in figures."""
PolicyPart = Literal["environment", "learner", "rollout", "trainer"]


@settings
class LogConfig:
    """Keys of every command."""

    log_level: LogLevel | None = None
    """Lowest level of log records; null: info in run.log and warning on standard error."""
    log_format: LogForm = "text"
    """`text`, or `json`: each record an object on a line, and standard error with the same records as run.log."""


@settings
class LogFileConfig(LogConfig):
    """Keys of commands that write log files."""

    log_max_bytes: int | None = Field(default=None, ge=65_536)
    """Bytes at which a log file becomes FILE.1, beside the two before it; null: it grows until others move it."""


@settings
class ServiceLogConfig(LogFileConfig):
    """Keys of commands that run for weeks without a run folder."""

    log_file: str | None = None
    """File that gets the log as run.log of a training run does; null: none."""


@settings
class RunConfig(LogFileConfig):
    """All keys of a training run. One field per part: field here, folder of parallm/, group of conf/."""

    name: str = Field(default="run", pattern=NAME_PATTERN)
    """Name of the run, and of the folder below checkpoints/."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of adapter, problems' order and samples; the same seed on the same machine gives the same run."""
    model: ModelSettings = ModelSettings()
    """The model to load and the form of its adapters."""
    engine: EngineSettings = EngineSettings()
    """Continuous batching: rows, context, memory of keys and values, speculation."""
    learner: LearnerSettings = LearnerSettings()
    """The loss, the optimizer, and data for supervised training."""
    rollout: RolloutSettings = RolloutSettings()
    """The completions that make a step, and their rewards."""
    environment: EnvironmentSettings = ArithmeticSettings()
    """The problems and their judge."""
    checkpoint: CheckpointSettings = CheckpointSettings()
    """When to save, what to keep, where to go on from."""
    trainer: TrainerSettings = TrainerSettings()
    """The loop: steps, evaluations, what is published, when to stop."""
    server: ServerSettings = ServerSettings()
    """HTTP: address, keys, limits."""
    device: DeviceSettings = DeviceSettings()
    """The library behind matrix products on a CPU, and the shares of engine and serving."""
    metrics: MetricsSettings = MetricsSettings()
    """The display, and the files of the run folder."""
    tasks: TaskSettings = TaskSettings()
    """Vectors of texts: how a model that says nothing of it makes them."""
    registry: RegistrySettings = RegistrySettings()
    """More models beside `model`, which requests load by name."""
    distributed: DistributedSettings = DistributedSettings()
    """Several processes that train one policy."""
    policies: dict[PolicyName, dict[PolicyPart, dict[str, Any]]] = Field(default_factory=dict)
    """Several adapters to train at the same time, by name, each with what differs from the parts above; see conf/."""


@settings
class ServeConfig(ServiceLogConfig):
    """All keys of `parallm.serve`."""

    name: str = Field(default="serve", pattern=NAME_PATTERN)
    """Name on the screen."""
    model: ModelSettings = ModelSettings()
    """The model to load, the adapter to serve as `policy`, and the layers that adapters may have."""
    engine: EngineSettings = EngineSettings()
    """Continuous batching: rows, context, memory of keys and values, speculation."""
    tasks: TaskSettings = TaskSettings()
    """Vectors of texts: how a model that says nothing of it makes them."""
    server: ServerSettings = ServerSettings()
    """HTTP: address, keys, limits."""
    device: ServingDeviceSettings = ServingDeviceSettings()
    """The library behind matrix products on a CPU, and the share of serving."""
    metrics: DisplaySettings = DisplaySettings()
    """The display."""
    registry: RegistrySettings = RegistrySettings()
    """More models beside `model`, which requests load by name."""
    distributed: ServingSettings = ServingSettings()
    """Several servers behind one address, and a base that is divided between devices."""
    idle_exit_seconds: float | None = Field(default=None, gt=0)
    """Seconds without a request, a batch or a job after which the process ends with 0, and its memory is free; null:
    never."""
    jobs: JobSettings = JobSettings()
    """Files, batches and fine-tuning jobs of clients."""


@settings
class EvaluateConfig(LogConfig):
    """All keys of `parallm.evaluate`."""

    name: str = Field(default="evaluate", pattern=NAME_PATTERN)
    """Name of the folder below checkpoints/."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of the samples for pass@k."""
    model: ComputedBaseSettings = ComputedBaseSettings()
    """The model to load and the adapter to evaluate, of any rank."""
    adapters: tuple[str, ...] = ()
    """More adapters beside `model.adapter`; each a folder of an adapter, a checkpoint or a run, of which the best
    version counts, or FOLDER@VERSION, FOLDER@newest, FOLDER@all."""
    base: bool = True
    """Evaluate the model without an adapter too, and the differences to it."""
    engine: EngineSettings = EngineSettings()
    """Continuous batching: rows, context, memory of keys and values, speculation."""
    rollout: EpisodeSettings = EpisodeSettings()
    """The limits of a completion, and a reward model for its score."""
    environment: EnvironmentSettings = ArithmeticSettings()
    """The problems and their judge."""
    trainer: EvaluationSettings = EvaluationSettings()
    """The number of held-out problems, and samples of each."""
    device: BlasSettings = BlasSettings()
    """The library behind matrix products on a CPU."""


@settings
class QuantizeSettings:
    bits: Literal[2, 3, 4, 5, 6, 8] | None = None
    """Bits of a weight in the fused model; without them it is not quantized, whatever its base is. 8 in a GGUF file,
    whose groups are of 32 (Q8_0)."""
    group_size: Literal[32, 64, 128] = 64
    """Weights that share a scale."""


@settings
class ExportConfig(LogConfig):
    """All keys of `parallm.export`."""

    name: str = Field(default="export", pattern=NAME_PATTERN)
    """Name of the folder below checkpoints/, where no `output` is given."""
    model: BaseSettings = BaseSettings()
    """The base and its adapter. `model.dtype=auto` keeps the type that the base is stored in."""
    formats: tuple[Literal["mlx", "peft", "fused", "gguf"], ...] = Field(default=("mlx", "peft", "fused"), min_length=1)
    """`mlx` and `peft`: the adapter as mlx-lm and PEFT read it; `fused`: a whole model with the adapter merged in;
    `gguf`: the same as a file of llama.cpp's."""
    output: str | None = None
    """A folder that does not exist yet; null: below checkpoints/export."""
    quantize: QuantizeSettings = QuantizeSettings()
    """Weights of fewer bits in the fused model."""
    device: BlasSettings = BlasSettings()
    """The library behind matrix products on a CPU."""


@settings
class FrontConfig(ServiceLogConfig):
    """All keys of `parallm.front`."""

    workers: tuple[str, ...] = ()
    """Addresses of the servers, such as http://node1:8000; the first is the leader, whose views count."""
    hold_seconds: float = Field(default=60.0, ge=0)
    """Seconds that a request may wait for a server while none is there; then it gets 503."""
    server: ServerSettings = ServerSettings()
    """HTTP: address, keys, limits. Keys are those of the servers, to which they are handed on."""


COMMANDS: Mapping[str, type[RunConfig | ServeConfig | EvaluateConfig | ExportConfig | FrontConfig]] = {
    "train": RunConfig,
    "serve": ServeConfig,
    "evaluate": EvaluateConfig,
    "export": ExportConfig,
    "front": FrontConfig,
}
"""Configuration class of each command `parallm.NAME`; conf/NAME.yaml composes it."""
ENVIRONMENTS: tuple[type, ...] = get_args(get_args(EnvironmentSettings)[0])
Config = TypeVar("Config")


def to_config(composed: DictConfig, kind: type[Config]) -> Config:
    """Validate all keys at once. Raises ConfigError with one line per unknown key, wrong value or missing value."""
    try:
        values = OmegaConf.to_container(composed, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(str(error).splitlines()[0]) from error
    if renamed := _renamed_environment(values):
        raise ConfigError(
            f"environment.name={renamed}: an environment is chosen as a whole, by environment={renamed} on the command "
            f"line or by `defaults: [{{override /environment: {renamed}}}]` in a recipe"
        )
    config = _validated(_without_mandatory(values), kind)
    if isinstance(config, RunConfig):
        policy_configs(config)
    return config


def policy_configs(config: RunConfig) -> dict[str, RunConfig]:
    """Return the configuration of each policy of a run by name; `policy` alone if the run names none.

    Raises ConfigError with one line for each wrong name, key or value, and for contradicting choices.
    """
    check_choices(config)
    if not config.policies:
        return {POLICY: config}
    _check_policies(config)
    run, configs, wrong = dataclasses.asdict(config), {}, []
    for name, own in config.policies.items():
        try:
            configs[name] = _validated(_values_of(own, run), type(config))
            check_choices(configs[name])
        except ConfigError as error:
            wrong += [f"policies.{name}.{line}" for line in str(error).splitlines()]
    if wrong:
        raise ConfigError("\n".join(wrong))
    return configs


def with_parts(config: RunConfig, parts: Mapping[str, Mapping[str, Any]]) -> RunConfig:
    """Return `config` with other values of these keys. Raises ConfigError."""
    changed = _validated(_merged(dataclasses.asdict(config), parts), RunConfig)
    check_choices(changed)
    return changed


def _check_policies(config: RunConfig) -> None:
    """Raise ConfigError with one line for each name, key or choice of the run that its policies exclude."""
    resume, wandb = config.checkpoint.resume, config.metrics.wandb
    wrong = [*_wrong_names(config.policies)]
    for name, parts in config.policies.items():
        if "keep_serving" in parts.get("trainer", {}):
            wrong.append(f"policies.{name}.trainer.keep_serving: holds for the whole run; set trainer.keep_serving")
    if resume not in ("auto", "never"):
        wrong.append(
            f"checkpoint.resume={resume} is one checkpoint and cannot be that of several policies; go on with all of "
            "them by checkpoint.resume=auto, or with one of them without policies"
        )
    if wandb != "off":
        wrong.append(f"metrics.wandb={wandb} logs one policy; set metrics.wandb=off, or train without policies")
    if config.metrics.trackio:
        wrong.append("metrics.trackio=true logs one policy; set metrics.trackio=false, or train without policies")
    if config.metrics.display == "live":
        wrong.append("metrics.display=live shows one policy; set metrics.display=lines, or train without policies")
    if wrong:
        raise ConfigError("\n".join(wrong))


def _values_of(policy: Mapping[PolicyPart, Mapping[str, Any]], run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a run that trains this policy alone, from those of the run that names it.

    A policy that names an environment is evaluated on it.
    """
    changed = {str(part): _changed(run[part], keys) for part, keys in policy.items()}
    values = {**run, **changed, "policies": {}}
    is_of_policy = values["learner"]["trains"] == "policy"
    if is_of_policy and "environment" in policy and values["trainer"]["evaluate_on"] == "auto":
        values["trainer"] = {**values["trainer"], "evaluate_on": "environment"}
    return values


def _wrong_names(names: Iterable[str]) -> Iterator[str]:
    seen: dict[str, str] = {}
    for name in names:
        if name in (BASE, BEST, LATEST) or re.fullmatch(r"step_\d+", name):
            yield f"policies.{name}: the name means something else in requests or folders; choose another one"
        if other := seen.get(name.casefold()):
            yield f"policies.{name}: differs from {other} in case only, and some disks take that for the same folder"
        seen[name.casefold()] = name


def _changed(usual: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a policy. Another environment has other keys, so it takes nothing from the run's."""
    is_another = own.get("name", usual.get("name")) != usual.get("name")
    return dict(own) if is_another else _merged(usual, own)


def _merged(usual: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**usual, **own}
    for key in usual.keys() & own.keys():
        if isinstance(usual[key], Mapping) and isinstance(own[key], Mapping):
            merged[key] = _merged(usual[key], own[key])
    return merged


def check_choices(config: RunConfig) -> None:
    """Raise ConfigError with one line for each pair of contradicting choices."""
    objective, source, wrong = resolve_objective(config.learner), config.rollout.source, [*wrong_evaluation(config)]
    if source != "environment" and not config.server.enabled:
        wrong.append(f"rollout.source={source} learns from requests: it needs server.enabled=true")
    makes_vectors = config.learner.trains == "embedding" or config.policies
    of_requests = dataclasses.replace(config.tasks, end_token=None) if makes_vectors else config.tasks
    if of_requests != TaskSettings() and not config.server.enabled:
        wrong.append("tasks.*: keys for requests over HTTP; set server.enabled=true, or leave them out")
    if config.trainer.keep_serving and not config.server.enabled:
        wrong.append(
            "trainer.keep_serving=true: without HTTP nothing goes on after the last step; set server.enabled=true, or "
            "leave it out"
        )
    if source != "environment" and config.learner.data is not None:
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
    if config.distributed.engine == "off" and config.distributed != DistributedSettings():
        wrong.append("distributed.*: keys for several workers; set distributed=mlx or ray, or leave them out")
    if config.distributed.engine != "off":
        wrong += _wrong_for_workers(config)
    if wrong:
        raise ConfigError("\n".join(wrong))


def _wrong_for_workers(config: RunConfig) -> Iterator[str]:
    """Yield a line for each choice that several workers do not support."""
    engine, workers = f"distributed={config.distributed.engine}", config.distributed.workers
    min_workers, address = config.distributed.min_workers, config.distributed.address
    if config.distributed.engine == "ray" and workers is None:
        yield f"{engine} needs the number of workers: set distributed.workers=N"
    if config.distributed.engine == "mlx" and (min_workers, address) != (None, None):
        yield f"{engine}: distributed.min_workers and distributed.address are for distributed=ray; leave them out"
    if min_workers is not None and workers is not None and min_workers > workers:
        yield f"distributed.min_workers={min_workers} is more than distributed.workers={workers}"
    if config.policies:
        yield f"{engine} trains one policy; leave policies out"
    if config.rollout.source != "environment":
        yield f"{engine}: rollout.source={config.rollout.source} learns from requests, which only one process can"
    if config.rollout.engines:
        yield f"{engine}: its workers sample in shares; leave rollout.engines out, or train with distributed=off"
    if config.learner.trains != "policy":
        yield f"{engine} trains policies; train with learner={config.learner.trains} and distributed=off"
    if config.rollout.curriculum.by != "off" and config.trainer.max_off_policy_steps:
        yield (
            f"{engine}: with rollout.curriculum.by={config.rollout.curriculum.by} what is drawn ahead depends on the "
            "clock, which differs between workers; set trainer.max_off_policy_steps=0"
        )


def _validated(values: Any, kind: type[Config]) -> Config:
    try:
        return TypeAdapter(kind).validate_python(values)
    except ValidationError as error:
        raise ConfigError(explain_values(error.errors(), known_keys(kind), keys_elsewhere(kind))) from error


def known_keys(kind: type = RunConfig) -> dict[str, Any]:
    """Return every key of a command with its default; below `environment`, one level with the name of each."""
    keys = _defaults(kind)
    return keys | ({"environment": _environments()} if "environment" in keys else {})


def keys_elsewhere(kind: type) -> dict[str, KnownKeys]:
    """Return the keys of the other commands by their names."""
    return {f"parallm.{name}": known_keys(other) for name, other in COMMANDS.items() if other is not kind}


def register_defaults(kind: type = RunConfig) -> None:
    """Make every key known to Hydra, so that it can be shown and overridden without YAML."""
    for name, keys in _environments().items():
        ConfigStore.instance().store(name=f"{name}_defaults", node=OmegaConf.create(keys))
    known = known_keys(kind)
    defaults = OmegaConf.create(known | ({"environment": {}} if "environment" in known else {}))
    for part in defaults:
        if OmegaConf.is_config(defaults[part]):
            # otherwise Hydra stops at the first unknown key; to_config names all of them
            OmegaConf.set_struct(defaults[part], False)
    ConfigStore.instance().store(name="run_defaults", node=defaults)


def _environments() -> dict[str, Any]:
    return {keys["name"]: keys for keys in map(_defaults, ENVIRONMENTS)}


def _renamed_environment(values: Any) -> str | None:
    """Return the name of an environment whose keys are those of another one, or None."""
    given = values.get("environment") or {}
    name = given.get("name")
    others = [keys for other, keys in _environments().items() if other != name]
    return name if name in _environments() and any(keys.keys() <= given.keys() for keys in others) else None


def fields_of(settings: type) -> Mapping[str, FieldInfo]:
    fields: Mapping[str, FieldInfo] = getattr(settings, "__pydantic_fields__")  # noqa: B009  (mypy cannot know it)
    return fields


def shipped(folder: str) -> Path:
    """Return the folder `conf` or `recipes`: inside the package in a wheel, beside it in a checkout."""
    installed = PACKAGE_FOLDER / folder
    return installed if installed.is_dir() else PACKAGE_FOLDER.parent / folder


def _defaults(settings_class: type) -> dict[str, Any]:
    """Return the default of every key as plain data; `???` if a value must be given."""
    defaults = {
        name: MANDATORY if field.is_required() else field.get_default(call_default_factory=True)
        for name, field in fields_of(settings_class).items()
    }
    plain: dict[str, Any] = TypeAdapter(dict[str, Any]).dump_python(defaults, mode="json")
    return plain


def _without_mandatory(values: Any) -> Any:
    """Drop keys without a value: pydantic then reports them with all other errors."""
    if not isinstance(values, Mapping):
        return values
    return {key: _without_mandatory(value) for key, value in values.items() if value != MANDATORY}
