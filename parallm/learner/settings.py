"""Settings of the learner. The defaults are DAPO's loss on strictly on-policy batches."""

from typing import Annotated, Literal

from pydantic import Field

from parallm.settings import settings
from parallm.types import Pooling

Preset = Literal["dapo", "grpo", "bnpo", "dr_grpo", "gspo", "cispo", "rloo", "reinforce_pp", "dppo", "sapo", "sft"]
Advantage = Literal[
    "group_mean", "group_std", "batch_std", "rloo", "reinforce_pp", "reinforce_pp_baseline", "max_rl", "reward"
]
PolicyTerm = Literal["ppo", "reinforce", "cispo", "dppo_tv", "ipo", "sapo", "vespo", "likelihood"]
RatioLevel = Literal["token", "sequence", "sequence_sum"]
Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant"]
KlEstimator = Literal["k1", "k2", "k3"]
KlPlacement = Literal["loss", "reward"]
KlTarget = Literal["base", "behaviour"]
Correction = Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


@settings
class LearnerSettings:
    trains: Literal["policy", "reward_model", "embedding", "classifier"] = "policy"
    """Purpose of the adapter: to write completions, to score them (learner=reward_model), to make vectors of texts
    (learner=embedding) or labels (learner=classifier)."""
    preset: Preset = "dapo"
    """A loss by its published name, see learner/loss/objective.py. Keys that are null are as the preset has them."""
    data: str | None = None
    """For learner=sft: a jsonl file with lines of prompt or messages, and completion; or the folder of a run, whose
    samples.jsonl counts. For learner=reward_model: a jsonl file with lines of prompt or messages, chosen, rejected. For
    learner=embedding: anchor, positive, perhaps negative or negatives. For learner=classifier: text, and label or
    labels."""
    data_reward_min: float = 1.0
    """Lines of `data` with a lower reward are left out; those without one count."""
    data_held_out: str | None = None
    """For runs with `data`: lines to evaluate on, of the same form as those of `data`; without it,
    those of one in ten prompts of `data`, unless trainer.evaluate_problems=0."""
    center_scores: float = Field(default=0.0, ge=0)
    """For learner=reward_model: weight of the square of a pair's summed scores, which holds scores near zero; 0.01 is
    what TRL recommends."""
    pooling: Pooling = "mean"
    """For learner=embedding: how the hidden states of a text become a vector."""
    scale: float = Field(default=20.0, gt=0)
    """For learner=embedding: factor of the cosines in the loss, one over its temperature."""
    dimensions: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """For learner=embedding: sizes that the vectors can be cut to (Matryoshka), trained beside the whole."""

    advantage: Advantage | None = None
    """How rewards become advantages; see learner/loss/advantage.py."""
    policy: PolicyTerm | None = None
    """The loss of a token for its ratio and advantage; see learner/loss/policy_loss.py."""
    ratio: RatioLevel | None = None
    """One ratio for each token, or one for a sequence: `sequence` is the geometric mean of its tokens', `sequence_sum`
    the product."""
    aggregation: Aggregation | None = None
    """How tokens are summed up; `constant` divides by completions x rollout.max_tokens."""
    clip_low: float | None = Field(default=None, ge=0, le=1)
    """Relative: ppo holds the ratio above 1 - clip_low where the advantage is negative."""
    clip_high: float | None = Field(default=None, ge=0)
    """Relative: ppo holds the ratio below 1 + clip_high where the advantage is positive."""
    dual_clip_ratio_max: float | None = Field(default=None, gt=1)
    """Absolute: ppo holds the ratio below it where the advantage is negative. No preset has one."""
    cispo_ratio_max: float | None = Field(default=None, gt=0)
    """Absolute: cispo weighs a token's gradient by its ratio up to this."""
    probability_fall_max: float | None = Field(default=None, ge=0, le=1)
    """Absolute: dppo_tv drops a bad token whose probability fell by more, ipo any token."""
    probability_rise_max: float | None = Field(default=None, ge=0, le=1)
    """Absolute: dppo_tv drops a good token whose probability rose by more, ipo any token."""
    sapo_temperature_positive: float | None = Field(default=None, gt=0)
    """How fast sapo's gate closes where the advantage is positive."""
    sapo_temperature_negative: float | None = Field(default=None, gt=0)
    """How fast sapo's gate closes where the advantage is not positive."""
    kl_coefficient: float | None = Field(default=None, ge=0)
    """0: no KL term, and no forward pass of the base for it."""
    kl_estimator: KlEstimator | None = None
    """Estimate of the KL per token: k1 is the log ratio, k2 half its square, k3 is never negative and has no bias."""
    kl_placement: KlPlacement | None = None
    """Added to each token's loss, or summed over a completion and taken off its reward."""
    kl_to: KlTarget | None = None
    """The policy to stay near: the base without an adapter, or the one that sampled."""
    kl_unbiased: bool | None = None
    """Multiply the KL in the loss by the ratio, as completions of an older policy need."""
    entropy_coefficient: float | None = Field(default=None, ge=0)
    """Bonus per nat of a token's entropy."""
    top_entropy_fraction: float | None = Field(default=None, gt=0, le=1)
    """Train only on this share of the step's tokens, those of most entropy. Below 1 it costs one more forward pass."""
    off_policy_kl_max: float | None = Field(default=None, ge=0)
    """Drop a bad completion whose mean log-prob has fallen by more since it was sampled. No preset has one."""
    correction: Correction | None = None
    """Weigh tokens or sequences by the learner's probability over the sampler's: truncated to the two limits, or
    dropped outside of them. Ratios are then taken to the learner's own policy at the start of the step."""
    correction_ratio_min: float | None = Field(default=None, ge=0)
    """Lower limit of the correction, absolute."""
    correction_ratio_max: float | None = Field(default=None, gt=0)
    """Upper limit of the correction, absolute."""

    learning_rate: float = Field(default=5e-5, ge=0)
    """Step size of AdamW after the warm-up."""
    lora_plus_ratio: float = Field(default=1.0, gt=0)
    """LoRA+: the learning rate of LoRA's B over that of everything else; its paper suggests 16."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Learning rate after the warm-up: unchanged, or a cosine that ends at zero after `trainer.steps`."""
    warmup_steps: int = Field(default=5, ge=0)
    """Steps in which the learning rate rises from zero."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of AdamW's two moments per step."""
    epsilon: float = Field(default=1e-8, gt=0)
    """Added to AdamW's denominator."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Share of each weight that AdamW takes off per step, times the learning rate."""
    max_gradient_norm: float = Field(default=1.0, gt=0)
    """The gradient is scaled down to this norm where it is longer."""
    micro_batch_tokens: Annotated[int, Field(ge=16)] | Literal["auto"] = "auto"
    """Tokens (padding included) of one forward and backward pass: the longest that decoding ever waits. `auto`: with
    CUDA what a fifth of the memory beside the base holds, for a mixture 45%, at most 65,536; else 1,024."""
    checkpoint_layers: Literal["auto", "all", "none"] = "auto"
    """Compute each layer again in the backward instead of keeping it. `auto`: where a pass would need more than half
    of the memory that the base leaves."""
    head_chunk_bytes: Annotated[int, Field(ge=1 << 16)] | Literal["auto"] = "auto"
    """Bytes of the logits that are computed at once; those of two such chunks may exist at the same time. `auto`: a
    forty-eighth of the logits of a whole pass, at least 64 MiB and at most 512."""
