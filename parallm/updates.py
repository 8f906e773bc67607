"""Updates that clients request: the trajectories that they send, and the result."""

from dataclasses import dataclass

from parallm.types import FinishReason, WeightSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenTrajectory:
    """A completion with its reward. Programs that sampled elsewhere may not know its log-probs and versions."""

    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    reward: float
    group: str | None
    """Trajectories of the same group are compared; None: those of the same prompt."""
    logprobs: tuple[float, ...] | None
    """Log-probs of `tokens` when they were sampled; None: not known."""
    weight_versions: tuple[WeightSpan, ...]
    """Ranges of `tokens`, each with the version that sampled it; empty: not known."""
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
    """Whether the policy's bare name means this version."""
    has_moved: bool
    """False if the update left every weight what it was to the last bit: `version` is the one before it."""
    num_trajectories: int
    num_trained: int
    """Trajectories of groups whose rewards differ."""
    num_recomputed: int
    """Trajectories without log-probs, which count as samples of the version before this one."""
    num_tokens: int
    """Tokens that were trained on."""
    loss: float
    gradient_norm: float
    kl_to_behaviour: float
    """Mean of the k3 estimator between the policy before the update and the one that sampled; 0 where log-probs were
    computed anew."""
    skipped: str | None
    """Why nothing was changed, if it was not."""
    checkpoint: str | None
    """The folder that it was saved in, if that was asked for."""
