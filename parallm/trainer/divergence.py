"""Signs of divergence while every number is finite. `Guard` calls it. Pure: numbers of a step in, signs out.

The thresholds come from runs of large models and are wrong for small ones alone: a healthy run of the embedded model
goes from an entropy of 0.06 to 0.03 a token while its reward doubles. So entropy is relative to the start's, and low
entropy, high entropy or missing signal end a run only if the reward has fallen as well.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from parallm.metrics.step import StepMetrics
from parallm.reports import UpdateReport
from parallm.trainer.settings import GuardSettings

PATIENCE = 5
"""Updates in a row that must show a sign before it counts."""
ENTROPY_GROWTH = 3.0
ENTROPY_LEFT = 0.2
"""Share of the entropy at the start above which a low entropy is no collapse."""
REWARD_WINDOW = 10
REWARD_FALL = 0.5
"""Standard deviations of a completion's reward, from the best window to the last; above the noise of a mean."""
SIGNAL_WINDOW = 50
MIN_SIGNAL = 0.02
PARITY_WARNS = 5e-3
PARITY_K3_WARNS = 1e-3
PARITY_STOPS = 5e-2


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """A new warning, or a reason to stop."""

    text: str
    stops: bool


@dataclass(slots=True, kw_only=True)
class History:
    """The rules' memory of earlier steps; JSON can hold it."""

    start_entropies: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    """Mean rewards of the last steps."""
    num_rewards: int = 0
    """Number of steps with rewards in the whole run."""
    deviation: float = 0.0
    """Mean standard deviation of a completion's reward within a step, over the whole run."""
    best_reward: float | None = None
    """The highest mean over a whole window."""
    signal: list[float] = field(default_factory=list)
    """Share of groups with signal in the last steps."""
    streaks: dict[str, int] = field(default_factory=dict)
    """Updates in a row that show a sign, by its name."""
    warned: list[str] = field(default_factory=list)
    """Reported signs that persist."""


class Divergence:
    """Watches a run. `compares`: whether engine and learner compute the same (false with dropout)."""

    def __init__(self, settings: GuardSettings, *, compares: bool) -> None:
        self._settings = settings
        self._compares = compares
        self._history = History()

    def observe(self, metrics: StepMetrics) -> list[Sign]:
        """Record one step. Returns new signs, and signs that stop the run."""
        self._remember(metrics)
        signs = [self._sign("signal", self._has_little_signal(), self._signal_text, self._reward_has_fallen())]
        update = metrics.update
        if update is not None and update.skipped is None and update.pairs is None:  # a policy's update
            signs += self._signs_of_update(update)
            signs.append(self._parity(update) if self._compares else None)
        return [sign for sign in signs if sign is not None]

    def counters(self) -> dict[str, Any]:
        """The history for a checkpoint, so that a resumed run judges as if uninterrupted."""
        return asdict(self._history)

    def resume(self, counters: Mapping[str, Any]) -> None:
        self._history = History(**counters)

    def _remember(self, metrics: StepMetrics) -> None:
        history = self._history
        if math.isfinite(metrics.reward_mean) and math.isfinite(metrics.reward_std):
            history.rewards = [*history.rewards, metrics.reward_mean][-REWARD_WINDOW:]
            history.num_rewards += 1
            history.deviation += (metrics.reward_std - history.deviation) / history.num_rewards
        if len(history.rewards) == REWARD_WINDOW:
            mean = fmean(history.rewards)
            history.best_reward = mean if history.best_reward is None else max(history.best_reward, mean)
        if metrics.groups_sampled:  # a supervised run samples none
            share = metrics.groups_with_signal / metrics.groups_sampled
            history.signal = [*history.signal, share][-SIGNAL_WINDOW:]

    def _signs_of_update(self, update: UpdateReport) -> list[Sign | None]:
        history, fallen = self._history, self._reward_has_fallen()
        if len(history.start_entropies) < PATIENCE and math.isfinite(update.entropy):
            history.start_entropies = [*history.start_entropies, update.entropy]
        start = fmean(history.start_entropies or [math.nan])
        low = min(self._settings.min_entropy, ENTROPY_LEFT * start)
        return [
            self._sign(
                "low entropy",
                self._lasts("low entropy", update.entropy < low),
                lambda: (
                    f"the entropy is {update.entropy:.3g} a token, at the start it was {start:.3g}: completions of "
                    "a problem are hardly different any more; lower learner.learning_rate or raise rollout.temperature"
                ),
                fallen,
            ),
            self._sign(
                "high entropy",
                self._lasts("high entropy", update.entropy > ENTROPY_GROWTH * start),
                lambda: (
                    f"the entropy is {update.entropy:.3g} a token, at the start it was {start:.3g}: the policy "
                    "loses what it knew; lower learner.learning_rate"
                ),
                fallen,
            ),
            self._sign(
                "kl",
                self._lasts("kl", update.kl_to_behaviour > self._settings.max_kl),
                lambda: (
                    f"the KL to the policy that sampled is {update.kl_to_behaviour:.3g} a token (k3), above "
                    f"trainer.guard.max_kl={self._settings.max_kl:g} for {PATIENCE} updates: what is trained on is "
                    "too far from what was sampled; lower learner.learning_rate or how old samples may be"
                ),
                stops=True,
            ),
        ]

    def _parity(self, update: UpdateReport) -> Sign | None:
        parity, k3 = update.parity, update.kl_to_behaviour
        mean = parity.mean_abs if parity.num_tokens else 0.0
        is_fresh = parity.num_tokens == update.num_tokens  # older samples differ by the updates since
        return self._sign(
            "parity",
            mean > PARITY_WARNS or (is_fresh and k3 > PARITY_K3_WARNS),
            lambda: (
                f"log-probs of engine and learner differ by {mean:.3g} on average (k3 {k3:.3g}): they should "
                f"compute the same; above {PARITY_STOPS:g} training stops. Try model.dtype=float32"
            ),
            stops=mean > PARITY_STOPS,
        )

    def _lasts(self, name: str, is_there: bool) -> bool:
        streaks = self._history.streaks
        streaks[name] = streaks.get(name, 0) + 1 if is_there else 0
        return streaks[name] >= PATIENCE

    def _sign(self, name: str, is_there: bool, text: Callable[[], str], stops: bool) -> Sign | None:
        warned = self._history.warned
        if not is_there:
            self._history.warned = [other for other in warned if other != name]
            return None
        stops = stops and self._settings.on_divergence == "stop"
        if name in warned and not stops:
            return None
        self._history.warned = [*warned, name]
        return Sign(text=text(), stops=stops)

    def _has_little_signal(self) -> bool:
        signal = self._history.signal
        return len(signal) == SIGNAL_WINDOW and fmean(signal) < MIN_SIGNAL

    def _signal_text(self) -> str:
        return (
            f"over the last {SIGNAL_WINDOW} steps {fmean(self._history.signal):.1%} of the groups had completions with "
            "different rewards: there is hardly anything to learn; choose problems that the model solves sometimes"
        )

    def _reward_has_fallen(self) -> bool:
        history = self._history
        if history.best_reward is None:
            return False
        return history.best_reward - fmean(history.rewards) > REWARD_FALL * history.deviation
