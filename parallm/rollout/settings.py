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
    max_idle_steps: int = Field(default=50, ge=1)
    """Steps in a row without any group with signal, after which training stops and says so."""
