"""Settings of rollouts: how many completions of how many problems make one step."""

from pydantic import Field

from parallm.settings import settings


@settings
class RolloutSettings:
    problems_per_step: int = Field(default=16, ge=1)
    group_size: int = Field(default=8, ge=2)
    max_tokens: int = Field(default=256, ge=1)
    temperature: float = Field(default=1.0, gt=0)
    """top_p, top_k and min_p stay off: with them the sampled distribution is not the policy that is trained."""
    refill_rounds: int = Field(default=3, ge=0)
    """How often groups without signal (all rewards equal) are replaced by groups of the next problems."""
    switch_in_flight: bool = False
    """Move running completions to a new version from their next token on; else they end on the one they began with.
    Matters only where trainer.max_off_policy_steps is above 0."""
    max_idle_steps: int = Field(default=50, ge=1)
    """Steps in a row without any group with signal, after which training stops and says so."""
