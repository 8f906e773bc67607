"""What a run with Atropos environments looks like from here, for figures and for the question why no batch comes."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from parallm.rollout.atropos.api import Sizes
from parallm.rollout.atropos.trainer_client import ApiFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """For groups to train on: from the last that a step took, or from a registration behind them, to the next.

    Counts are those at its begin, taken there: who looks later would miss what came first.
    """

    number: int = 0
    since: float | None = None
    """When a step began to wait; None: none does yet."""
    num_witnessed: int = 0
    refused: Mapping[str, int] = field(default_factory=dict)
    num_failed_batches: int = 0
    num_queued: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AtroposFacts:
    """A snapshot. Times are seconds of `time.monotonic`; counts are since the start of the process."""

    url: str
    sizes: Sizes
    """What this run registers."""
    api: ApiFacts
    num_groups: int
    """Received, as the next three."""
    num_sequences: int
    group_sizes: Mapping[int, int]
    """Groups by their number of sequences."""
    last_groups: Mapping[int, float]
    """When each environment's last group came, by its id."""
    refused: Mapping[str, int]
    """Groups that were not trained on, by reason."""
    ledger_completions: int
    ledger_tokens: int
    num_witnessed: int
    """Completions of the policy that were given to clients."""
    last_witnessed: float | None
    wait: Wait = Wait()
