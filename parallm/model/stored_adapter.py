"""Arrays and config of an adapter file, of mlx-lm's or PEFT's format, as the parts of an `Adapter`. No files here."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import mlx.core as mx

from parallm.errors import AdapterError
from parallm.model.adapter_arrays import REWARD_HEAD
from parallm.model.name_patterns import values_by_name
from parallm.model.peft_names import names_to_read
from parallm.model.sites import ROUTERS
from parallm.model.stored_configs import CONFIG, MlxConfig, PeftConfig

PEFT_TENSOR = re.compile(
    r"(?:base_model\.model\.)?(?P<site>.+)\.lora_(?:(?P<part>[AB])(?:\.default)?\.weight|"
    r"magnitude_vector(?:\.default)?(?:\.weight)?)"
)
PEFT_HEAD = re.compile(r"(?:base_model\.model\.)?score(?:\.modules_to_save\.default)?\.weight")

Arrays = Mapping[str, mx.array]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredAdapter:
    arrays: dict[str, mx.array]
    metadata: Mapping[str, str]
    rank: int
    alpha: float
    ranks: Mapping[str, int] = field(default_factory=dict)
    alphas: Mapping[str, float] = field(default_factory=dict)
    rslora: bool
    dropout: float

    def check_sites(self, sites: Mapping[str, tuple[int, int]]) -> None:
        """Raise AdapterError unless every array fits a site of the base (site -> inputs, outputs)."""
        for name in sorted(self.arrays.keys() - {REWARD_HEAD}):
            site, _, part = name.rpartition(".")
            shape = self.arrays[name].shape
            if site not in sites:
                raise AdapterError(f"it has {name} {shape}, but {site} is no LoRA site here; {_way_out(site, sites)}")
            (inputs, outputs), rank = sites[site], self.ranks.get(site, self.rank)
            expected = {"lora_a": (inputs, rank), "lora_b": (rank, outputs), "m": (outputs,)}.get(part, shape)
            if shape != expected:
                raise AdapterError(
                    f"it does not fit this base: {name} has shape {shape}, expected {expected}; set model.path to the "
                    "base that it was trained on"
                )


def from_mlx(config: MlxConfig, arrays: Arrays, metadata: Mapping[str, str]) -> StoredAdapter:
    """Raises AdapterError."""
    _check_experts(arrays)
    _check_magnitudes(arrays, config.fine_tune_type == "dora")
    lora, rslora = config.lora_parameters, bool(metadata.get("rslora"))
    alpha = lora.scale * (math.sqrt(lora.rank) if rslora else lora.rank)
    exact = float(metadata.get("alpha", alpha))  # alpha / rank * rank need not be alpha
    return StoredAdapter(
        arrays=dict(arrays),
        metadata=metadata,
        rank=lora.rank,
        alpha=exact if math.isclose(exact, alpha) else alpha,
        rslora=rslora,
        dropout=lora.dropout,
    )


def from_peft(config: PeftConfig, tensors: Arrays, metadata: Mapping[str, str], model_type: str) -> StoredAdapter:
    """`model_type` is that of the base, by which its layers are known. Raises AdapterError."""
    names = names_to_read(model_type, is_ours="digest" in metadata)
    arrays: dict[str, mx.array] = {}
    modules: dict[str, str] = {}  # names in the file by site
    for name, tensor in tensors.items():
        if config.has_reward_head and PEFT_HEAD.fullmatch(name):
            arrays[REWARD_HEAD] = _one_score(tensor)
            continue
        match = PEFT_TENSOR.fullmatch(name)
        if match is None:
            raise AdapterError(f"it holds {name}, which is no lora_A, lora_B or magnitude of a linear layer")
        site = names.from_peft(match["site"])
        modules[site] = match["site"]
        arrays[_array_name(match, site)] = mx.contiguous(tensor.T)
    _check_magnitudes(arrays, config.use_dora)
    ranks = values_by_name(config.rank_pattern or {}, modules.values())
    alphas = values_by_name(config.alpha_pattern or {}, modules.values())
    return StoredAdapter(
        arrays=arrays,
        metadata=metadata,
        rank=config.r,
        alpha=config.lora_alpha,
        ranks={site: ranks[module] for site, module in modules.items() if module in ranks},
        alphas={site: alphas[module] for site, module in modules.items() if module in alphas},
        rslora=config.use_rslora,
        dropout=config.lora_dropout,
    )


def from_peft_names(tensors: Arrays, model_type: str) -> dict[str, mx.array]:
    """Tensors under PEFT's names as arrays of an adapter; other names stay as they are.

    Raises AdapterError where PEFT's adapters of this type have other numbers.
    """
    arrays: dict[str, mx.array] = {}
    for name, tensor in tensors.items():
        match = PEFT_TENSOR.fullmatch(name)
        if match is None:
            arrays[name] = tensor
        else:
            site = names_to_read(model_type, is_ours=False).from_peft(match["site"])
            arrays[_array_name(match, site)] = mx.contiguous(tensor.T)
    return arrays


def _array_name(match: re.Match[str], site: str) -> str:
    part = f"lora_{match['part'].lower()}" if match["part"] else "m"
    return f"{site}.{part}"


def _one_score(tensor: mx.array) -> mx.array:
    if tensor.ndim != 2 or tensor.shape[0] != 1:
        raise AdapterError(f"it classifies with a head of shape {tensor.shape}; a reward model has (1, hidden)")
    return mx.contiguous(tensor[0])


def _check_experts(arrays: Arrays) -> None:
    """mlx-lm adapts all experts of a layer as one array of three axes."""
    experts = next((name for name, array in arrays.items() if name.endswith(".lora_a") and array.ndim == 3), None)
    if experts is not None:
        raise AdapterError(
            f"it adapts the experts of a mixture ({experts.removesuffix('.lora_a')}), and only linear layers can be "
            "adapted here; train it with lora_parameters.keys that leave the experts out"
        )


def _check_magnitudes(arrays: Arrays, is_dora: bool) -> None:
    if is_dora != any(name.endswith(".m") for name in arrays):
        kind, other = ("DoRA", "no magnitudes") if is_dora else ("LoRA", "magnitudes of DoRA")
        raise AdapterError(f"{CONFIG} says that it is {kind}, and its weights hold {other}")


def _way_out(site: str, sites: Mapping[str, tuple[int, int]]) -> str:
    if ROUTERS & set(site.split(".")):
        return "it is a router, which all-linear leaves out: name it in model.lora.targets beside all other layers"
    return (
        f"there are {len(sites)}, such as {min(sites, default='none')}; load the base it was trained on, or leave "
        "model.lora.targets and model.lora.layers out"
    )
