"""Why is there no batch? What is known of an Atropos run -> what stops it, and the way out. Pure.

run-api and its environments say nothing when groups vanish or a batch can never be filled; each of these traps is
named here by what shows from outside.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from parallm.integrations.atropos.api import UNKNOWN_SIZE
from parallm.integrations.atropos.source import AtroposFacts

DEFAULT_PORTS = (9004, 9005, 9006, 9007)
"""Where atroposlib looks for servers if it was given none in a list."""
DROPS = {
    "equal_scores": "all scores of a group were equal; nothing can be learned from those (easier or harder problems, a "
    "larger group_size, or a denser reward)",
    "too_long": "a sequence has reached rollout.atropos.max_token_len={max_token_len}; raise it, or lower the "
    "environment's max_token_length",
    "wrong_size": "a group had another number of sequences than group_size; the environment leaves out completions, "
    "such as those with fewer than 10 tokens",
    "nothing_collected": "its own code has given nothing for an item: scores that are all equal, or completions "
    "that are too short or cut off; the model may be too weak or too good for it, or rollout.max_tokens too low",
    "trajectories_failed": "its own code has failed: {example}",
    "not_sent": "run-api did not take it: {example}",
    "refused": "run-api has refused it: {example}",
    "timed_out": "it took longer than the environment's worker_timeout",
}
REFUSALS = {
    "stale": "older than trainer.max_off_policy_steps allows; raise it, or give environments "
    "--env.max_batches_offpolicy 1",
    "no_signal": "all scores equal in all groups of a batch",
}
"""What becomes of groups that are well-formed, so that quarantine.jsonl has none of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentFacts:
    """An environment that this run has started."""

    name: str
    log: str
    exit_code: int | None
    """None: it runs."""
    has_given_up: bool = False
    """No further restart."""
    log_tail: str = ""
    env_id: int | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    """Signs in its log since the last batch, by name."""
    examples: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What was seen since the last batch that was trained on, beside what the trainer's side knows itself."""

    num_completions: int
    """Of the policy, for anybody."""
    refused: Mapping[str, int] = field(default_factory=dict)
    """Groups that were not trained on, by reason."""
    sizes: frozenset[int] = frozenset()
    """Of groups in the queue of run-api."""
    num_registered: int | None = None
    """Environments that run-api has ever let in; None: not asked."""
    allocated: float = 0.0
    """Share of a batch that belongs to environments with a min_batch_allocation."""
    without_groups: Sequence[int] = ()
    """Ids of environments with nothing in the queue."""
    knocks: Sequence[int] = ()
    """Default ports at which somebody has asked for a completion."""
    taken_ports: Sequence[int] = ()
    """Default ports at which another program listens."""
    environments: Sequence[EnvironmentFacts] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """`name` stays the same while numbers in the text change."""

    name: str
    text: str


def causes_of(facts: AtroposFacts, observed: Observed) -> tuple[Cause, ...]:
    """Everything that may stop the run, the surest first; never empty."""
    found = [
        *_of_the_api(facts),
        *_of_processes(observed),
        *_of_the_queue(facts, observed),
        *_of_refusals(observed),
        *_of_silence(facts, observed),
        *_of_drops(facts, observed),
    ]
    if not found:
        text = (
            f"{observed.num_completions} completions were sampled since the last batch and a batch takes "
            f"{facts.sizes.batch_size} sequences of groups with different scores: it may only take time"
        )
        found.append(Cause(name="slow", text=text))
    return tuple(found)


def _of_the_api(facts: AtroposFacts) -> Iterator[Cause]:
    if facts.api.state == "unreachable":
        yield Cause(
            name="api_unreachable",
            text=f"nothing answers at {facts.url} ({facts.api.problem}); start it with `run-api --host 127.0.0.1 "
            "--port PORT`, or let this run do it with rollout.atropos.start.api=true",
        )
    elif facts.api.state == "poisoned":
        yield Cause(
            name="api_poisoned",
            text=f"{facts.url} knows no batch size (/info says {UNKNOWN_SIZE}) and will not learn one: an environment has "
            "posted before the trainer was registered, again and again; end the environments, start the API anew, "
            "then them",
        )
    elif facts.api.state == "unregistered" and facts.api.problem:
        yield Cause(
            name="api_unregistered",
            text=f"{facts.url} knows no trainer, and this one does not get in: {facts.api.problem}",
        )
    if num_failed := facts.api.num_failed_batches - facts.wait.num_failed_batches:
        yield Cause(
            name="batches_lost",
            text=f"{num_failed} batches were lost in an error of the API's: an environment posts NaN "
            "or infinity as a score or a log-prob",
        )


def _of_processes(observed: Observed) -> Iterator[Cause]:
    for one in observed.environments:
        if one.exit_code == 0:
            text = f"the environment {one.name} has ended by itself: its total_steps is over; "
            yield Cause(name=f"{one.name}_finished", text=text + "leave env.total_steps to this run")
        elif one.has_given_up:
            text = f"the environment {one.name} does not run: it ended with {one.exit_code} too often; "
            yield Cause(name=f"{one.name}_dead", text=text + f"{one.log} ends with: {one.log_tail}")


def _of_the_queue(facts: AtroposFacts, observed: Observed) -> Iterator[Cause]:
    batch_size = facts.sizes.batch_size
    if observed.allocated > 0 and observed.without_groups:
        ids = ", ".join(map(str, observed.without_groups))
        yield Cause(
            name="min_batch_allocation",
            text=f"{observed.allocated:.0%} of each batch belongs to environments with a min_batch_allocation, and no "
            f"batch is formed while one of them has no groups; those with id {ids} have none. If one is dead: curl -X "
            f"POST {facts.url}/disconnect-env -H 'content-type: application/json' -d '{{\"env_id\": ID}}'",
        )
    queued = facts.api.status.num_queued if facts.api.status else 0
    if not observed.sizes or not queued:
        return
    largest = max(observed.sizes)
    if largest > batch_size:
        yield Cause(
            name="group_too_large",
            text=f"a group of {largest} waits, and a batch has {batch_size} sequences: it can never leave the queue, "
            "and nothing behind it can; make rollout.problems_per_step x rollout.group_size a multiple of it, or "
            "start the API anew",
        )
    elif batch_size % largest:
        yield Cause(
            name="size_does_not_divide",
            text=f"groups of {largest} can never fill a batch of exactly {batch_size} sequences; make "
            f"rollout.problems_per_step x rollout.group_size a multiple of {largest}, or set the environment's "
            "group_size",
        )
    elif uneven := [size for size in sorted(observed.sizes) if largest % size]:
        yield Cause(
            name="sizes_do_not_divide",
            text=f"groups of {uneven} do not divide groups of {largest}, beside which they wait: run-api packs groups "
            "of one size up to the largest, so all sizes must divide it (powers of two do)",
        )


def _of_refusals(observed: Observed) -> Iterator[Cause]:
    if not observed.refused:
        return
    counted = ", ".join(f"{reason}: {count}" for reason, count in sorted(observed.refused.items()))
    told = [f"{reason}: {text}" for reason, text in REFUSALS.items() if reason in observed.refused]
    if set(observed.refused) - set(REFUSALS):
        told.append("see quarantine.jsonl")
    name = "_".join(["refused", *sorted(observed.refused)])  # one more reason is told anew
    yield Cause(name=name, text=f"groups that came were not trained on ({counted}); {'; '.join(told)}")


def _of_silence(facts: AtroposFacts, observed: Observed) -> Iterator[Cause]:
    if observed.knocks:
        ports = ", ".join(map(str, observed.knocks))
        yield Cause(
            name="wrong_servers",
            text=f"an environment asks localhost:{ports} for completions, not this server: atroposlib drops "
            "--openai.base_url where the environment's own default is no list (gsm8k_server.py is one). Give it "
            "--config with `openai:` as a list of two entries, both of this server, as "
            "rollout.atropos.start.environments does",
        )
        return
    queued = facts.api.status.num_queued if facts.api.status else 0
    if observed.num_completions or queued or facts.api.state in ("unreachable", "unregistered"):
        return
    if observed.taken_ports:
        ports = ", ".join(map(str, observed.taken_ports))
        yield Cause(
            name="other_servers",
            text=f"nobody has asked this server for a completion, and another program listens on {ports}, where "
            "atroposlib looks for servers if it drops --openai.base_url; give the environment --config with `openai:` "
            "as a list of two",
        )
    if observed.num_registered == 0:
        yield Cause(
            name="no_environment",
            text=f"no environment is connected to {facts.url}; start one with --env.rollout_server_url {facts.url}, or "
            "name it in rollout.atropos.start.environments (one that loads takes some seconds)",
        )
    elif not observed.taken_ports:
        yield Cause(
            name="silent_environment",
            text="nobody has asked this server for a completion since the last batch that was trained on: the "
            "environment is dead, hangs, or asks another server; see its log, and its --openai.base_url",
        )


def _of_drops(facts: AtroposFacts, observed: Observed) -> Iterator[Cause]:
    is_explained = False
    for one in observed.environments:
        for sign, text in DROPS.items():
            if count := one.counts.get(sign, 0):
                is_explained = True
                words = text.format(max_token_len=facts.sizes.max_token_len, example=one.examples.get(sign, ""))
                yield Cause(name=f"{one.name}_{sign}", text=f"{one.name} has dropped groups ({count}): {words}")
    queued = facts.api.status.num_queued if facts.api.status else 0
    if observed.num_completions >= 2 * facts.sizes.batch_size and not queued and not is_explained:
        yield Cause(
            name="groups_vanish",
            text=f"{observed.num_completions} completions were sampled and no group has come. Environments say nothing "
            "when they drop groups: all scores equal, a sequence of max_token_len, fewer than 10 tokens, or log-probs "
            "missing; and groups of another size than the registered group_size wait in a buffer of run-api until they "
            "add up to it",
        )
