"""Several policies of one run: the values that each takes from the run, and choices that cannot be combined. Pure.

`policies: {poet: {environment: ..., learner: ...}}` gives each name the parts in which it differs from the run.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from parallm.errors import ConfigError
from parallm.types import BASE, BEST, LATEST

PolicyName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_-]*$")]
"""Name in requests, of a folder and in figures."""
PolicyPart = Literal["environment", "learner", "rollout", "trainer"]
Policies = Mapping[str, Mapping[PolicyPart, Mapping[str, Any]]]

RUN_WIDE_KEYS = {"trainer": ("keep_serving",)}
"""Keys that a policy cannot override."""


def check_policies(policies: Policies, *, resume: str, wandb: str, display: str) -> None:
    """Raise ConfigError with one line for each name, key or choice of the run that these policies exclude."""
    wrong = [*_wrong_names(policies), *_wrong_keys(policies)]
    if resume not in ("auto", "never"):
        wrong.append(
            f"checkpoint.resume={resume} is one checkpoint and cannot be that of several policies; go on with all of "
            "them by checkpoint.resume=auto, or with one of them without policies"
        )
    if wandb != "off":
        wrong.append(f"metrics.wandb={wandb} logs one policy; set metrics.wandb=off, or train without policies")
    if display == "live":
        wrong.append("metrics.display=live shows one policy; set metrics.display=lines, or train without policies")
    if wrong:
        raise ConfigError("\n".join(wrong))


def values_of(policy: Mapping[PolicyPart, Mapping[str, Any]], run: Mapping[str, Any]) -> dict[str, Any]:
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


def _wrong_keys(policies: Policies) -> Iterator[str]:
    for name, parts in policies.items():
        for part, keys in parts.items():
            for key in sorted(set(keys) & set(RUN_WIDE_KEYS.get(part, ()))):
                yield f"policies.{name}.{part}.{key}: holds for the whole run; set {part}.{key}"


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
