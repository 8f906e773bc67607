"""Who remembers what a policy was sampled for clients, whoever they are: for what comes back without its log-probs."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from parallm.server.catalog import resolved
from parallm.types import AdapterCard, Completion, GenerationRequest


class Witness(Protocol):
    """The face of `rollout.atropos.ledger.SampleStore` that the server uses."""

    def record(self, request: GenerationRequest, completions: Sequence[Completion]) -> None: ...


def told_to(
    witnesses: Mapping[str, Witness],
    catalog: Callable[[], tuple[AdapterCard, ...]],
    policies: Sequence[str],
    count: Callable[[GenerationRequest, list[Completion]], None],
) -> Callable[[GenerationRequest, list[Completion]], None]:
    """`count`, and each request that has ended is told to the witness of the policy that has answered it, too."""

    def tell(request: GenerationRequest, completions: list[Completion]) -> None:
        count(request, completions)
        policy = resolved(request.model, catalog(), policies).partition("@")[0]
        if policy in witnesses:
            witnesses[policy].record(request, completions)

    return tell if witnesses else count
