"""Why no batch comes from Atropos, in words. Pure; called by `Launcher`.

run-api and its environments say nothing when groups vanish or a batch can never be filled. Each cause that shows on the
trainer's side, or in how an environment ended, is named with its way out.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from parallm.integrations.atropos.source import AtroposFacts

REFUSALS = {
    "stale": "older than trainer.max_off_policy_steps allows; raise it, or give environments "
    "--env.max_batches_offpolicy 1",
    "no_signal": "all scores equal in all groups of a batch",
}
"""Reasons of well-formed groups, which quarantine.jsonl does not hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentState:
    """An environment that this run has started."""

    name: str
    log: str
    """Path of its log."""
    exit_code: int | None
    """None: it runs."""
    has_given_up: bool = False
    """Whether it is started no more."""
    log_tail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    name: str
    """Stays the same while numbers in the text change, such as `api_unreachable`."""
    text: str


def causes_of(facts: AtroposFacts, environments: Sequence[EnvironmentState]) -> tuple[Cause, ...]:
    """Return everything that may stop the run, the surest first; never empty."""
    causes = (
        *_causes_in_api(facts),
        *_causes_in_processes(environments),
        *_causes_in_queue(facts),
        *_causes_in_refusals(facts),
        *_causes_in_traffic(facts, environments),
    )
    text = (
        f"{facts.num_completions} completions were sampled since the last batch and a batch takes "
        f"{facts.sizes.batch_size} sequences of groups with different scores: it may only take time"
    )
    return causes or (Cause(name="slow", text=text),)


def _causes_in_api(facts: AtroposFacts) -> Iterator[Cause]:
    match facts.api.state:
        case "unreachable":
            yield Cause(
                name="api_unreachable",
                text=f"nothing answers at {facts.url} ({facts.api.problem}); start it with `run-api --host 127.0.0.1 "
                "--port PORT`, or let this run do it with rollout.atropos.start.api=true",
            )
        case "poisoned":
            yield Cause(
                name="api_poisoned",
                text=f"{facts.url} takes no trainer: an environment has posted before the trainer was registered, "
                "again and again; end the environments, start the API anew, then them",
            )
        case "unregistered" if facts.api.problem:
            yield Cause(
                name="api_unregistered",
                text=f"{facts.url} knows no trainer, and this one does not get in: {facts.api.problem}",
            )
    if facts.num_failed_batches:
        yield Cause(
            name="batches_lost",
            text=f"{facts.num_failed_batches} batches were lost in an error of the API's: an environment posts NaN "
            "or infinity as a score or a log-prob",
        )


def _causes_in_processes(environments: Sequence[EnvironmentState]) -> Iterator[Cause]:
    for state in environments:
        if state.exit_code == 0:
            yield Cause(
                name=f"{state.name}_finished",
                text=f"the environment {state.name} has ended by itself: its total_steps is over; leave "
                "env.total_steps to this run",
            )
        elif state.has_given_up:
            yield Cause(
                name=f"{state.name}_dead",
                text=f"the environment {state.name} does not run: it ended with {state.exit_code} too often; "
                f"{state.log} ends with: {state.log_tail}",
            )


def _causes_in_queue(facts: AtroposFacts) -> Iterator[Cause]:
    size, batch_size = facts.api.last_group_size, facts.sizes.batch_size
    num_queued = facts.api.status.num_queued if facts.api.status else 0
    if not size or not num_queued:
        return
    if batch_size % size:
        yield Cause(
            name="size_does_not_divide",
            text=f"groups of {size} can never fill a batch of exactly {batch_size} sequences, and no other group "
            "passes a larger one in the queue; make rollout.problems_per_step x rollout.group_size a multiple of "
            f"{size}, or set the environment's group_size",
        )
    elif num_queued * size >= batch_size:
        yield Cause(
            name="queue_blocked",
            text=f"{num_queued} groups wait in run-api and form no batch of {batch_size} sequences: a group whose size "
            "does not divide it waits before them, or an environment with a min_batch_allocation has no groups; if "
            f"that one is dead: curl -X POST {facts.url}/disconnect-env -H 'content-type: application/json' "
            "-d '{\"env_id\": ID}'",
        )


def _causes_in_refusals(facts: AtroposFacts) -> Iterator[Cause]:
    if not facts.refused:
        return
    counts = ", ".join(f"{reason}: {count}" for reason, count in sorted(facts.refused.items()))
    hints = [f"{reason}: {text}" for reason, text in REFUSALS.items() if reason in facts.refused]
    if set(facts.refused) - set(REFUSALS):
        hints.append("see quarantine.jsonl")
    name = "_".join(["refused", *sorted(facts.refused)])  # a further reason is a cause of its own
    yield Cause(name=name, text=f"groups that came were not trained on ({counts}); {'; '.join(hints)}")


def _causes_in_traffic(facts: AtroposFacts, environments: Sequence[EnvironmentState]) -> Iterator[Cause]:
    if facts.api.state in ("unreachable", "unregistered") or (facts.api.status and facts.api.status.num_queued):
        return
    logs = f"; their logs: {', '.join(state.log for state in environments)}" if environments else ""
    if facts.num_completions == 0:
        yield Cause(
            name="no_requests",
            text="no environment has asked this server for a completion since the last batch that was trained on: "
            f"none is connected to {facts.url} yet, it hangs, or it asks another server, since atroposlib drops "
            "--openai.base_url where the environment's own default is no list: give it --config with `openai:` as a "
            f"list of two entries, as rollout.atropos.start.environments does{logs}",
        )
    if facts.num_completions >= 2 * facts.sizes.batch_size:
        yield Cause(
            name="groups_vanish",
            text=f"{facts.num_completions} completions were sampled and no group has come. Environments drop groups "
            "whose scores are all equal, with a sequence of max_token_len or of fewer than 10 tokens, or without "
            f"log-probs; run-api keeps back groups of another size than group_size until they add up to it{logs}",
        )
