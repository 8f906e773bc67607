"""Updates that are asked for from outside: the trajectories that somebody brings, and what became of them."""

from dataclasses import dataclass

from parallm.types import FinishReason, WeightSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenTrajectory:
    """A completion with its reward, of which somebody else may have kept less than we would."""

    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    reward: float
    group: str | None
    """What it is compared with: others of the same group; None: others of the same prompt."""
    logprobs: tuple[float, ...] | None
    """Of `tokens`, as they were sampled; None: not known."""
    weight_versions: tuple[WeightSpan, ...]
    """Empty: not known."""
    loss_mask: tuple[bool, ...]
    temperature: float
    text: str
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenUpdate:
    """One update on given trajectories, between two steps of training."""

    version: int
    """The newest version after it."""
    is_served: bool
    """Whether clients get this version by the policy's bare name."""
    num_trajectories: int
    num_trained: int
    """Those of groups whose rewards differ."""
    num_recomputed: int
    """Those whose log-probs were not known; they are taken for samples of the version before this one."""
    num_tokens: int
    """Trained on."""
    loss: float
    gradient_norm: float
    kl_to_behaviour: float
    """Mean of the k3 estimator between the policy before the update and the one that sampled; 0 where log-probs were
    computed anew."""
    skipped: str | None
    """Why nothing was changed, if it was not."""
    checkpoint: str | None
    """The folder that it was saved in, if that was asked for."""
