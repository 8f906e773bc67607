"""Computes TRL's losses and gradients anew on the inputs of tests/learner/oracles/trl_grpo.json, in float64.

Runs in an environment with TRL and without MLX. The loss is TRL's own `_compute_loss`, of a trainer that is given
log-probs in place of a model; entropies are the negative log-probs. Two things stand in the middle of TRL's sampling
code and are written here as they stand there, with its `nanstd`: advantages, and the ratio to the sampler that corrects
for it. Prints one line of JSON: name, loss and gradient of each case, and the advantages.
"""

import json
import math
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.trainer.utils import nanstd

Numbers = list[float]
MASKS = ("token_mask", "sequence_mask")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`settings` are those of GRPOConfig; `sampler` corrects for the log-probs of the sampler: mode, least, most."""

    loss: str
    settings: dict[str, Any] = field(default_factory=dict)
    advantages: str = "group_std"
    is_on_policy: bool = False
    sampler: tuple[str, float | None, float] | None = None
    micro_batches: int = 1


SEQUENCE = {"importance_sampling_level": "sequence"}
CASES = {
    "dapo, on-policy": Case(loss="dapo", is_on_policy=True),
    "grpo": Case(loss="grpo"),
    "bnpo": Case(loss="bnpo"),
    "dapo": Case(loss="dapo"),
    "dapo, clip 0.2 / 0.28": Case(loss="dapo", settings={"epsilon_high": 0.28}),
    "dr_grpo": Case(loss="dr_grpo", advantages="group_mean"),
    "dapo, batch_std": Case(loss="dapo", advantages="batch_std"),
    "gspo, clip 0.05 / 0.08": Case(loss="grpo", settings={**SEQUENCE, "epsilon": 0.05, "epsilon_high": 0.08}),
    "gspo, clip 3e-4 / 4e-4": Case(loss="grpo", settings={**SEQUENCE, "epsilon": 3e-4, "epsilon_high": 4e-4}),
    "gspo, mean over tokens": Case(loss="dapo", settings=SEQUENCE),
    "cispo, ratio up to 5": Case(loss="cispo", settings={"epsilon_high": 5.0}),
    "cispo, ratio up to 1.1": Case(loss="cispo", settings={"epsilon_high": 1.1}),
    "cispo, ratio up to 0.2": Case(loss="cispo"),
    "grpo, dual clip 1.25": Case(loss="grpo", settings={"delta": 1.25}),
    "grpo, k3 x 0.04": Case(loss="grpo", settings={"beta": 0.04, "use_bias_correction_kl": False}),
    "dapo, k3 x 0.001": Case(loss="dapo", settings={"beta": 0.001, "use_bias_correction_kl": False}),
    "dapo, unbiased k3 x 0.04": Case(loss="dapo", settings={"beta": 0.04, "use_bias_correction_kl": True}),
    "sapo": Case(loss="sapo"),
    "vespo": Case(loss="vespo"),
    "luspo": Case(loss="luspo", settings=SEQUENCE),
    "dapo, token_truncate 2": Case(loss="dapo", sampler=("token_truncate", None, 2.0)),
    "dapo, token_mask 0.6 to 2": Case(loss="dapo", sampler=("token_mask", 0.6, 2.0)),
    "dapo, sequence_mask 3": Case(loss="dapo", sampler=("sequence_mask", None, 3.0)),
    "dapo, sequence_mask 2": Case(loss="dapo", sampler=("sequence_mask", None, 2.0)),
    "dapo, sequence_truncate 2": Case(loss="dapo", sampler=("sequence_truncate", None, 2.0)),
    "dapo, off-policy sequences above 0.05 dropped": Case(loss="dapo", settings={"off_policy_mask_threshold": 0.05}),
    "dapo, upper half by entropy": Case(loss="dapo", settings={"top_entropy_quantile": 0.5}),
    "grpo, one of four micro-batches": Case(loss="grpo", micro_batches=4),
    "rloo": Case(loss="rloo", advantages="group_mean"),
}


class Batch:
    """The inputs of the cases as TRL has them: (B, T), filled up at the right."""

    def __init__(self, inputs: dict[str, Any]) -> None:
        lengths = inputs["num_tokens"]
        self.mask = torch.zeros(len(lengths), max(lengths), dtype=torch.float64)
        for row, length in enumerate(lengths):
            self.mask[row, :length] = 1
        self.logprobs = {name: self._padded(inputs[name]) for name in ("behaviour", "old", "new", "reference")}
        self.max_tokens = inputs["max_tokens"]
        self.group_size = len(inputs["groups"][0])
        rewards = torch.tensor(inputs["groups"], dtype=torch.float64).flatten()
        self.advantages = {kind: self._advantages(kind, rewards) for kind in ("group_mean", "group_std", "batch_std")}

    def _padded(self, values: Numbers) -> torch.Tensor:
        filled = torch.zeros_like(self.mask)
        filled[self.mask.bool()] = torch.tensor(values, dtype=torch.float64)
        return filled

    def _advantages(self, kind: str, rewards: torch.Tensor) -> torch.Tensor:
        """As in GRPOTrainer._generate_and_score_completions."""
        groups = rewards.view(-1, self.group_size)
        centred = rewards - torch.nanmean(groups, dim=1).repeat_interleave(self.group_size)
        if kind == "group_mean":
            return centred
        if kind == "batch_std":
            return centred / (nanstd(rewards) + 1e-4)
        return centred / (nanstd(groups, dim=1).repeat_interleave(self.group_size) + 1e-4)

    def ratio_to_sampler(self, mode: str, least: float | None, most: float) -> torch.Tensor:
        """As in GRPOTrainer._generate_and_score_completions, where completions come from vLLM."""
        difference = (self.logprobs["old"] - self.logprobs["behaviour"]) * self.mask
        if mode.startswith("sequence"):
            difference = difference.sum(dim=-1, keepdim=True)
        ratio = torch.exp(difference)
        if mode in MASKS:
            return ratio.masked_fill((ratio < (-math.inf if least is None else least)) | (ratio > most), 0.0)
        return torch.clamp(ratio, min=least, max=most)


def loss_and_gradient(batch: Batch, case: Case) -> tuple[float, Numbers]:
    new = batch.logprobs["new"].clone().requires_grad_()
    tokens = torch.ones_like(batch.mask, dtype=torch.long)
    inputs = {
        "prompt_ids": tokens[:, :1],
        "prompt_mask": tokens[:, :1],
        "completion_ids": tokens,
        "completion_mask": batch.mask,
        "advantages": batch.advantages[case.advantages],
        "num_items_in_batch": batch.mask.sum(),
        "ref_per_token_logps": batch.logprobs["reference"],
        "old_logps": (batch.logprobs["old"] * batch.mask).sum(1),
    }
    if not case.is_on_policy:
        inputs["old_per_token_logps"] = batch.logprobs["old"]
    if case.sampler:
        inputs["importance_sampling_ratio"] = batch.ratio_to_sampler(*case.sampler)
    if "off_policy_mask_threshold" in case.settings:
        inputs["sampling_per_token_logps"] = batch.logprobs["behaviour"]
    loss = trainer(batch, case, new)._compute_loss(SimpleNamespace(), inputs)
    loss.backward()
    return loss.item(), new.grad[batch.mask.bool()].tolist()


def trainer(batch: Batch, case: Case, new: torch.Tensor) -> Any:
    """A trainer without a model, as its __init__ would set it up for these settings."""
    kind, config = (RLOOTrainer, RLOOConfig) if case.loss == "rloo" else (GRPOTrainer, GRPOConfig)
    named = {} if case.loss == "rloo" else {"loss_type": case.loss, "steps_per_generation": 1}
    with tempfile.TemporaryDirectory() as folder:
        args = config(output_dir=folder, use_cpu=True, bf16=False, report_to="none", **named, **case.settings)
    made = kind.__new__(kind)
    high = args.epsilon_high if args.epsilon_high is not None else args.epsilon
    made.__dict__ |= {
        "args": args,
        "accelerator": Accelerator(cpu=True),
        "model": SimpleNamespace(training=True),
        "epsilon_low": args.epsilon,
        "epsilon_high": high,
        "beta": args.beta,
        "aux_loss_enabled": False,
        "_metrics": defaultdict(lambda: defaultdict(list)),
        "_entropy_bonus_enabled": False,
        "_get_per_token_logps_and_entropies": lambda *_, **__: (new, -new.detach(), None),
        "max_completion_length": batch.max_tokens,
        "current_gradient_accumulation_steps": case.micro_batches,
        "use_vllm": case.sampler is not None,
        "vllm_importance_sampling_correction": True,
    }
    for name in ("loss_type", "importance_sampling_level", "top_entropy_quantile", "off_policy_mask_threshold"):
        made.__dict__[name] = getattr(args, name, None)
    return made


BATCH = Batch(json.loads(Path(sys.argv[1]).read_text())["inputs"])
FOUND = {name: loss_and_gradient(BATCH, case) for name, case in CASES.items()}
print(
    json.dumps(
        {
            "cases": {name: {"loss": loss, "gradient": gradient} for name, (loss, gradient) in FOUND.items()},
            "advantages": {kind: values.tolist() for kind, values in BATCH.advantages.items()},
        }
    )
)
