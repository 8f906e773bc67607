"""Names of layers in files of adapters: those of transformers' classes, PEFT's patterns, names within layers.

PEFT finds layers by the names of the class that `AutoModelForCausalLM` makes, or `AutoModelForImageTextToText` where
that is the only one. It loads an adapter of other names as well, warns about missing keys and serves the plain base:
so names that were not compared with transformers' own (tests/model/adapters/peft_layers.json) are never written.
"""

import re
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import translate
from typing import TypeVar

from parallm.errors import AdapterError
from parallm.model.lora.targets import ROUTERS

Value = TypeVar("Value", int, float)
Pairs = tuple[tuple[str, str], ...]
"""Names of mlx-lm, each with that of transformers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftNames:
    """The names of one model type in both libraries."""

    heads: Pairs = ()
    """Beginnings of paths. Several pairs may have the same name of mlx-lm: the first is written, all are read."""
    tails: Pairs = ()
    """Ends of paths."""
    lacking: frozenset[str] = ROUTERS
    """Parts of paths that transformers' class has no linear layer for."""

    def to_peft(self, target: str) -> str:
        """The name of `target` in transformers' class."""
        return _with_tail(_with_head(target, self.heads), self.tails)

    def from_peft(self, name: str) -> str:
        """The target that is called `name` in transformers' class; a name of mlx-lm stays as it is."""
        if not any(_begins(name, ours) for ours, _ in self.heads):
            # the longest first: model.language_model begins with model
            theirs = sorted(((their, our) for our, their in self.heads), key=lambda pair: -len(pair[0]))
            name = _with_head(name, tuple(theirs))
        return _with_tail(name, tuple((their, our) for our, their in self.tails))


SAME = PeftNames()
"""Model types whose layers have the same names in both libraries."""

_WRAPPED = PeftNames(heads=(("language_model.model", "model.language_model"),))
_QWEN3_5 = PeftNames(heads=(("language_model.model", "model"), ("language_model.model", "model.language_model")))
_GPT2 = PeftNames(heads=(("model.h", "transformer.h"),))

KNOWN: dict[str, PeftNames] = {
    **dict.fromkeys(
        (
            *("afmoe", "apertus", "cohere", "cohere2", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5"),
            *("ernie4_5_moe", "exaone4", "exaone_moe", "falcon_mamba", "gemma", "gemma2", "gemma3_text"),
            *("gemma4_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "gpt_bigcode", "gpt_oss", "granite"),
            *("granitemoe", "helium", "hunyuan_v1_dense", "internlm3", "jamba", "lfm2", "llama", "mamba", "mamba2"),
            *("mellum", "minicpm3", "minimax_m2", "ministral3", "mistral", "mixtral", "nemotron", "olmo2", "olmo3"),
            *("olmo_hybrid", "olmoe", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
            *("qwen3_next", "seed_oss", "smollm3", "solar_open", "stablelm", "starcoder2"),
        ),
        SAME,
    ),
    **dict.fromkeys(("gemma3", "mistral3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"), _WRAPPED),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), _QWEN3_5),
    **dict.fromkeys(("gpt2", "gptj"), _GPT2),
    "gpt_neox": PeftNames(heads=(("model.h", "gpt_neox.layers"),)),
    # a dense model has one input layer in place of gate and up
    "granitemoehybrid": PeftNames(lacking=ROUTERS | {"mlp"}),
    "lfm2_moe": PeftNames(
        tails=(
            (".feed_forward.gate_proj", ".feed_forward.w1"),
            (".feed_forward.up_proj", ".feed_forward.w3"),
            (".feed_forward.down_proj", ".feed_forward.w2"),
        )
    ),
    "nemotron_h": PeftNames(heads=(("backbone", "model"),)),
}
"""Keys are the `model_type` of config.json."""

RESCALED = {"falcon_h1": "mlx-lm folds this model's multipliers into its weights"}
"""Types whose layers have transformers' names and other numbers, and why."""

_PROJECTIONS = frozenset({"gate_proj", "up_proj", "down_proj"})
LEFT_OUT: dict[str, frozenset[str]] = {
    # with transformers 5 PEFT takes these for the experts, also those of dense layers and shared experts
    **dict.fromkeys(
        (
            *("afmoe", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe", "exaone_moe", "glm4_moe"),
            *("glm4_moe_lite", "mellum", "olmoe", "qwen3_moe", "qwen3_next", "solar_open"),
        ),
        _PROJECTIONS,
    ),
    **dict.fromkeys(("falcon_mamba", "mamba", "mamba2", "nemotron_h"), frozenset({"out_proj"})),
}
"""Last names of layers that PEFT 0.21 itself does not adapt, though transformers' class has them."""


def left_out_by_peft(targets: Iterable[str], model_type: str) -> list[str]:
    """The `targets` that other readers of the format find and PEFT itself does not."""
    names = LEFT_OUT.get(model_type, frozenset())
    return [target for target in targets if target.rpartition(".")[2] in names]


def modules_of(targets: Iterable[str], model_type: str) -> dict[str, str]:
    """The names of `targets` in transformers' class.

    Raises AdapterError for a type whose names, or numbers, in transformers are not known to be the same, and for a
    target that is no linear layer there.
    """
    if model_type not in KNOWN:
        reason = RESCALED.get(model_type, "the names of its layers in transformers are not known here")
        raise AdapterError(
            f"an adapter of {model_type} is not written in PEFT's format: {reason}; export it with formats=[mlx,fused]"
        )
    names, modules = KNOWN[model_type], {}
    for target in targets:
        if names.lacking & set(target.split(".")):
            raise AdapterError(
                f"transformers has no linear layer for {target}, so PEFT could not load this adapter; export it with "
                "formats=[mlx,fused], or leave that layer out of model.lora.targets"
            )
        modules[target] = names.to_peft(target)
    return modules


def names_to_read(model_type: str, *, is_ours: bool) -> PeftNames:
    """The names of a type, mlx-lm's for an unknown one. Raises AdapterError for an adapter of another program (not
    `is_ours`) and a type in `RESCALED`."""
    if model_type in RESCALED and not is_ours:
        raise AdapterError(
            f"PEFT's adapters of {model_type} have other numbers: {RESCALED[model_type]}; use an adapter in mlx-lm's "
            "format"
        )
    return KNOWN.get(model_type, SAME)


def _begins(name: str, head: str) -> bool:
    return name.startswith(f"{head}.")


def _with_head(name: str, pairs: Pairs) -> str:
    pair = next((pair for pair in pairs if _begins(name, pair[0])), None)
    return name if pair is None else pair[1] + name.removeprefix(pair[0])


def _with_tail(name: str, pairs: Pairs) -> str:
    pair = next((pair for pair in pairs if name.endswith(pair[0])), None)
    return name if pair is None else name.removesuffix(pair[0]) + pair[1]


# PEFT takes a key of a pattern as a regular expression: the first one that matches the end of a path, from a dot on,
# counts. Adapters come from strangers, and an expression can take a time that is exponential in its length. So a key
# is names with dots between them, `.*` for anything, `^` for the beginning of the path, and `|` between alternatives.
# A dot is a dot.

LETTERS = frozenset(string.ascii_letters + string.digits + "_-.")
ANYTHING = ".*"
DOT = "\0"
"""Stands for an escaped dot while a key is split."""
MAX_ANYTHING = 256
"""Limit for one pattern: keys with `.*` are compared with every name, while others are looked up."""


def check_keys(pattern: Iterable[str]) -> None:
    """Raise AdapterError for a key that is more than names, dots, `.*`, `^` and `|`."""
    number = sum(glob.count("*") for key in pattern for glob, _ in _alternatives(key))
    if number > MAX_ANYTHING:
        raise AdapterError(f"the keys of a pattern have {ANYTHING} {number} times, the limit is {MAX_ANYTHING}")


def values_by_name(pattern: Mapping[str, Value], names: Iterable[str]) -> dict[str, Value]:
    """The value of each of `names` that a key fits, as PEFT chooses it. Raises AdapterError for other expressions."""
    check_keys(pattern)
    exact: dict[tuple[str, bool], int] = {}  # index of the key that names an end, or the whole path, without gaps
    gapped: list[tuple[int, re.Pattern[str]]] = []
    for index, key in enumerate(pattern):
        for glob, is_whole in _alternatives(key):
            if "*" in glob:  # `translate` makes expressions that take a time linear in theirs and the name's length
                globs = [glob] if is_whole else [glob, f"*.{glob}"]
                gapped.append((index, re.compile("|".join(map(translate, globs)))))
            else:
                exact.setdefault((glob, is_whole), index)
    values = list(pattern.values())
    matches = {name: _matches(name, exact, gapped) for name in names}
    return {name: values[min(indices)] for name, indices in matches.items() if indices}


def _matches(name: str, exact: Mapping[tuple[str, bool], int], gapped: list[tuple[int, re.Pattern[str]]]) -> list[int]:
    """Indices of the keys that fit `name`."""
    ends = [(name, True), *((end, False) for end in _ends(name))]
    gapped_matches = [index for index, expression in gapped if expression.match(name)]
    return [exact[end] for end in ends if end in exact] + gapped_matches


def _alternatives(key: str) -> list[tuple[str, bool]]:
    """Each expression of a key with `*` for anything, and whether it begins the path."""
    alternatives = []
    for part in key.split("|"):
        text = part.removeprefix("^").removesuffix("$")
        # an escaped dot before a star is no dot of `.*`
        pieces = [piece.replace(DOT, ".") for piece in text.replace("\\.", DOT).split(ANYTHING)]
        if not text or DOT in text or not all(LETTERS.issuperset(piece) for piece in pieces):
            raise AdapterError(
                f"the key {key[:100]!r} of a pattern is an expression that is not read here; name layers by the ends "
                f"of their paths, such as q_proj or layers.0.mlp.up_proj, with {ANYTHING} for anything and | between "
                "alternatives"
            )
        alternatives.append(("*".join(pieces), part.startswith("^")))
    return alternatives


def _ends(name: str) -> list[str]:
    """`name`, and the text after each of its dots."""
    parts = name.split(".")
    return [".".join(parts[start:]) for start in range(len(parts))]


LAYER_TARGET = re.compile(r"(?P<stack>(?:.+\.)?layers)\.(?P<index>\d+)\.(?P<name>.+)")


def layered_names(targets: Sequence[str]) -> tuple[list[str], list[int]] | None:
    """The targets within layers as paths within a layer times layers; None if that would name others too, or if there
    are none."""
    matches = [match for target in targets if (match := LAYER_TARGET.fullmatch(target))]
    within = {(int(match["index"]), match["name"]) for match in matches}
    names, layers = sorted({name for _, name in within}), sorted({index for index, _ in within})
    if len({match["stack"] for match in matches}) != 1 or len(within) != len(names) * len(layers):
        return None
    return names, layers


def layer_of(target: str) -> int | None:
    """The number of the layer that `target` lies in, if it lies in one."""
    match = LAYER_TARGET.fullmatch(target)
    return int(match["index"]) if match else None


def outside_layers(targets: Sequence[str]) -> list[str]:
    return [target for target in targets if not LAYER_TARGET.fullmatch(target)]


def to_pattern(values: Mapping[str, Value], targets: Sequence[str]) -> dict[str, Value]:
    """`values` of some of the `targets`, by the last name where all targets of that name have one value."""
    pattern: dict[str, Value] = {}
    for target, value in values.items():
        ending = target.rsplit(".", 1)[-1]
        alike = all(values.get(other) == value for other in targets if other.endswith(f".{ending}"))
        pattern[ending if alike else target] = value
    return pattern
