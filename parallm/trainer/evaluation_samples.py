"""EvaluationSettings -> what an evaluator samples."""

from parallm.rollout.evaluation import Samples
from parallm.trainer.settings import EvaluationSettings


def evaluation_samples(settings: EvaluationSettings, seed: int) -> Samples | None:
    """None where nothing is to be sampled."""
    if not settings.evaluate_samples:
        return None
    return Samples(
        count=settings.evaluate_samples,
        temperature=settings.evaluate_temperature,
        ks=settings.evaluate_k or tuple(sorted({1, settings.evaluate_samples})),
        seed=seed,
    )
