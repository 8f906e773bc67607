"""Updates that clients request: the trajectories that they send, and the result."""

from dataclasses import dataclass

from parallm.types import FinishReason, WeightSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenTrajectory:
    """A completion with its reward from a client, which may not know log-probs and versions.

    Example: `GivenTrajectory(prompt_tokens=(1, 27), tokens=(5, 2), reward=1.0, group=None, logprobs=None,
    weight_versions=(), loss_mask=(True, True), temperature=1.0, text="5", finish_reason="stop")`.
    """

    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    reward: float
    group: str | None
    """Trajectories of one group are compared with each other; None groups by prompt."""
    logprobs: tuple[float, ...] | None
    """Log-probs of `tokens` when they were sampled; None: unknown."""
    weight_versions: tuple[WeightSpan, ...]
    """Ranges of `tokens`, each with the version that sampled it; empty: unknown."""
    loss_mask: tuple[bool, ...]
    temperature: float
    text: str
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenUpdate:
    """The result of one update on a client's trajectories, between two steps of training.

    Example: `GivenUpdate(version=13, is_served=True, has_moved=True, num_trajectories=8, num_trained=4,
    num_recomputed=0, num_tokens=512, loss=0.1, gradient_norm=0.3, kl_to_behaviour=0.0, skipped=None, checkpoint=None)`.
    """

    version: int
    """The newest version after it."""
    is_served: bool
    """Whether the policy's bare name means this version."""
    has_moved: bool
    """False if no weight changed by a bit: `version` is then the one before the update."""
    num_trajectories: int
    num_trained: int
    """Trajectories of groups whose rewards differ."""
    num_recomputed: int
    """Trajectories without log-probs, which are recomputed as samples of the version before this one."""
    num_tokens: int
    """Tokens that were trained on."""
    loss: float
    gradient_norm: float
    kl_to_behaviour: float
    """Mean of the k3 estimator between the policy before the update and the one that sampled; 0 for recomputed
    log-probs."""
    skipped: str | None
    """Why the update changed nothing, if so."""
    checkpoint: str | None
    """Folder of the checkpoint, if one was asked for."""
