"""Write tests/tasks/losses.json: losses and gradients of sentence-transformers and torch.

In an environment with torch and sentence-transformers, without ours:
    VENV/bin/python scripts/build_loss_references.py
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from sentence_transformers.sentence_transformer import losses

PLACE = Path(__file__).parents[1] / "tests" / "tasks" / "losses.json"
PAIRS, FEATURES, SIZE, DIMENSIONS = 5, 7, 6, (6, 4, 2)
LABELS = 3


class Linear(torch.nn.Module):
    """A model of one matrix, as the losses use one."""

    def __init__(self, weight_FD: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight_FD)

    def __getitem__(self, _: int) -> "Linear":
        return self  # its first and only module

    def get_embedding_dimension(self) -> int:
        return SIZE

    def forward(self, features: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {**features, "sentence_embedding": features["input_ids"] @ self.weight}


def main() -> None:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    weight_FD, columns = normal(FEATURES, SIZE), [normal(PAIRS, FEATURES) for _ in range(3)]
    found: dict[str, Any] = {"weight": weight_FD.tolist(), "columns": [column.tolist() for column in columns]}
    makers = {
        "info_nce": lambda model: losses.MultipleNegativesRankingLoss(model),
        "cached": lambda model: losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=2),
        "matryoshka": lambda model: losses.MatryoshkaLoss(
            model, losses.MultipleNegativesRankingLoss(model), matryoshka_dims=DIMENSIONS
        ),
    }
    for name, make in makers.items():
        model = Linear(weight_FD.clone())
        given = [{"input_ids": column, "attention_mask": torch.ones(len(column), 1)} for column in columns]
        loss = make(model)(given, None)
        loss.backward()
        assert model.weight.grad is not None
        found[name] = {"loss": loss.item(), "gradient": model.weight.grad.tolist()}
    logits_NL, targets_NL = normal(PAIRS, LABELS), torch.rand((PAIRS, LABELS), generator=generator, dtype=torch.float64)
    found |= {"logits": logits_NL.tolist(), "targets": targets_NL.tolist()}
    for name, function, target in (
        ("bce", torch.nn.functional.binary_cross_entropy_with_logits, targets_NL),
        ("cross_entropy", torch.nn.functional.cross_entropy, targets_NL.argmax(dim=1)),
    ):
        given_NL = logits_NL.clone().requires_grad_()
        loss = function(given_NL, target)
        loss.backward()
        assert given_NL.grad is not None
        found[name] = {"loss": loss.item(), "gradient": given_NL.grad.tolist()}
    PLACE.write_text(json.dumps(found, indent=None) + "\n")


if __name__ == "__main__":
    main()
