"""How other programs name the sites of an adapter: by layer and by ending rather than one by one."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

LAYER_SITE = re.compile(r"(?P<stack>(?:.+\.)?layers)\.(?P<index>\d+)\.(?P<name>.+)")
Value = TypeVar("Value", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayeredNames:
    """Sites of which each of `layers` has all of `names`."""

    names: tuple[str, ...]
    """Paths within a layer, e.g. "self_attn.q_proj"."""
    layers: tuple[int, ...]


def layered_names(targets: Sequence[str]) -> LayeredNames | None:
    """The sites within layers as names times layers; None if that would name others too, or if there are none."""
    matches = [match for site in targets if (match := LAYER_SITE.fullmatch(site))]
    within = {(int(match["index"]), match["name"]) for match in matches}
    names, layers = sorted({name for _, name in within}), sorted({index for index, _ in within})
    if len({match["stack"] for match in matches}) != 1 or len(within) != len(names) * len(layers):
        return None
    return LayeredNames(names=tuple(names), layers=tuple(layers))


def layer_of(site: str) -> int | None:
    """The number of the layer that `site` lies in; None: in none."""
    match = LAYER_SITE.fullmatch(site)
    return int(match["index"]) if match else None


def outside_layers(targets: Sequence[str]) -> list[str]:
    return [site for site in targets if not LAYER_SITE.fullmatch(site)]


def to_pattern(values: Mapping[str, Value], targets: Sequence[str]) -> dict[str, Value]:
    """`values` of some of the `targets`, by the last name where all targets of that name have one value."""
    pattern: dict[str, Value] = {}
    for site, value in values.items():
        ending = site.rsplit(".", 1)[-1]
        alike = all(values.get(other) == value for other in targets if other.endswith(f".{ending}"))
        pattern[ending if alike else site] = value
    return pattern
