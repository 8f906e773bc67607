"""Computes prime-rl's losses and gradients anew on the inputs of tests/learner/oracles/prime_rl.json, in float64.

Runs in an environment with torch. The loss functions are those of a clone of prime-rl, whose file is loaded by itself:
the packages that it imports for checks of types, and for configurations, are stood in for. A step's loss is the sum
over its sequences, divided by its tokens, as in prime-rl's trainer. Prints one line of JSON: name, loss and gradient.
"""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

LOSS = Path("src") / "prime_rl" / "trainer" / "rl" / "loss.py"
CASES: dict[str, tuple[str, dict[str, float]]] = {
    "dppo, probability 0.2 / 0.2, k2 x 2e-3 to the sampler": (
        "default_loss_fn",
        {"dppo_mask_low": 0.2, "dppo_mask_high": 0.2, "adv_tau": 1.0, "kl_tau": 1e-3},
    ),
    "ipo, probability 0.1, k2 x 2e-3 to the sampler": (
        "ipo_loss_fn",
        {"ipo_threshold": 0.1, "adv_tau": 1.0, "kl_tau": 1e-3},
    ),
}
"""prime-rl's penalty is the squared log-ratio, twice what is called k2."""


class Anything:
    """Stands for types that are subscripted with shapes."""

    def __getitem__(self, _: object) -> Any:
        return Any


def stand_in(name: str, **values: Any) -> None:
    module = ModuleType(name)
    module.__dict__.update(values)
    sys.modules[name] = module


def load(clone: Path) -> ModuleType:
    stand_in("beartype", beartype=lambda function: function)
    shaped = Anything()
    stand_in("jaxtyping", Bool=shaped, Float=shaped, Int=shaped, jaxtyped=lambda **_: lambda function: function)
    for package in ("prime_rl", "prime_rl.configs", "prime_rl.utils"):
        stand_in(package)
    configs = ("CustomLossConfig", "DefaultLossConfig", "IPOLossConfig", "LossConfig")
    stand_in("prime_rl.configs.trainer", **dict.fromkeys(configs, Any))
    stand_in("prime_rl.utils.utils", import_object=None)
    specification = importlib.util.spec_from_file_location("prime_rl_loss", clone / LOSS)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["prime_rl_loss"] = module
    specification.loader.exec_module(module)
    return module


def loss_and_gradient(losses: ModuleType, inputs: dict[str, Any], name: str, settings: dict[str, float]) -> Any:
    new = torch.tensor(inputs["new"], dtype=torch.float64, requires_grad=True)
    sampler = torch.tensor(inputs["behaviour"], dtype=torch.float64)
    lengths = inputs["num_tokens"]
    groups = torch.tensor(inputs["groups"], dtype=torch.float64)
    advantages = (groups - groups.mean(dim=1, keepdim=True)).flatten()
    total = torch.zeros((), dtype=torch.float64)
    parts = zip(new.split(lengths), sampler.split(lengths), advantages, strict=True)
    for logprobs, sampled, advantage in parts:
        sequence = losses.LossInputs(
            trainer_logprobs=logprobs,
            inference_logprobs=sampled,
            ref_logprobs=None,
            advantages=advantage.expand_as(logprobs),
            loss_mask=torch.ones_like(logprobs, dtype=torch.bool),
        )
        total = total + getattr(losses, name)(sequence, SimpleNamespace(**settings)).loss
    loss = total / sum(lengths)
    loss.backward()
    assert new.grad is not None
    return {"loss": loss.item(), "gradient": new.grad.tolist()}


INPUTS = json.loads(Path(sys.argv[1]).read_text())["inputs"]
LOSSES = load(Path(sys.argv[2]))
print(json.dumps({"cases": {name: loss_and_gradient(LOSSES, INPUTS, *case) for name, case in CASES.items()}}))
