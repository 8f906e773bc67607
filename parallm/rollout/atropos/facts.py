"""What a run with Atropos environments looks like from here, for figures and for the question why no batch comes."""

from collections.abc import Mapping
from dataclasses import dataclass

from parallm.rollout.atropos.api import Sizes
from parallm.rollout.atropos.trainer_client import ApiFacts


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
