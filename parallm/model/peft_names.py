"""How transformers' classes name the layers that mlx-lm's models have, for adapters in PEFT's format.

PEFT finds layers by the names of the class that `AutoModelForCausalLM` makes, or `AutoModelForImageTextToText` where
that is the only one. It loads an adapter of other names as well, warns about missing keys and serves the plain base:
so names that were not compared with transformers' own (tests/model/peft_layers.json) are never written.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from parallm.errors import AdapterError
from parallm.model.sites import ROUTERS

Pairs = tuple[tuple[str, str], ...]
"""Names of mlx-lm, each with that of transformers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftNames:
    """The names of one model type in both libraries."""

    heads: Pairs = ()
    """Beginnings of paths. Of several with one of ours the first is written, and all are read."""
    tails: Pairs = ()
    """Ends of paths."""
    lacking: frozenset[str] = ROUTERS
    """Parts of paths that transformers' class has no linear layer for."""

    def to_peft(self, site: str) -> str:
        """The name of `site` in transformers' class."""
        return _with_tail(_with_head(site, self.heads), self.tails)

    def from_peft(self, name: str) -> str:
        """The site that is called `name` in transformers' class; a name of ours stays as it is."""
        if not any(_begins(name, ours) for ours, _ in self.heads):
            # the longest first: model.language_model begins with model
            theirs = sorted(((their, our) for our, their in self.heads), key=lambda pair: -len(pair[0]))
            name = _with_head(name, tuple(theirs))
        return _with_tail(name, tuple((their, our) for our, their in self.tails))


SAME = PeftNames()
"""Of types whose layers have the same names in both libraries."""

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
    # a dense one has one input layer in place of gate and up
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
"""By the `model_type` of config.json."""

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


def left_out_by_peft(sites: Iterable[str], model_type: str) -> list[str]:
    """The `sites` that other readers of the format find and PEFT itself does not."""
    names = LEFT_OUT.get(model_type, frozenset())
    return [site for site in sites if site.rpartition(".")[2] in names]


def modules_of(sites: Iterable[str], model_type: str) -> dict[str, str]:
    """The names of `sites` in transformers' class.

    Raises AdapterError for a type whose names, or numbers, in transformers are not known to be the same, and for a site
    that is no linear layer there.
    """
    if model_type not in KNOWN:
        why = RESCALED.get(model_type, "the names of its layers in transformers are not known here")
        raise AdapterError(
            f"an adapter of {model_type} is not written in PEFT's format: {why}; export it with formats=[mlx,fused]"
        )
    names, modules = KNOWN[model_type], {}
    for site in sites:
        if names.lacking & set(site.split(".")):
            raise AdapterError(
                f"transformers has no linear layer for {site}, so PEFT could not load this adapter; export it with "
                "formats=[mlx,fused], or leave that layer out of model.lora.targets"
            )
        modules[site] = names.to_peft(site)
    return modules


def names_to_read(model_type: str, *, is_ours: bool) -> PeftNames:
    """Names of unknown types must be those of mlx-lm. Raises AdapterError for numbers that are not: those of another
    program (not `is_ours`) for a type in `RESCALED`."""
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
