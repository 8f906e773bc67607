"""Why no batch comes from Atropos, in words. Called by `Launcher`.

run-api and its environments say nothing when groups vanish or a batch can never be filled. Each cause that shows on the
trainer's side, or in how an environment ended, is named with its way out.
"""

from collections.abc import Iterator, Sequence
from itertools import chain

from parallm.integrations.atropos.scored_group import WELL_FORMED
from parallm.integrations.atropos.source import AtroposFacts
from parallm.integrations.atropos.supervisor import SupervisedProcess


def causes_of(facts: AtroposFacts, environments: Sequence[SupervisedProcess]) -> dict[str, str]:
    """Return everything that may stop the run, the surest first; never empty.

    Texts by name: a name such as `api_unreachable` stays the same while numbers in its text change. `environments` are
    those that this run has started.
    """
    causes = dict(
        chain(
            _causes_in_api(facts),
            _causes_in_processes(environments),
            _causes_in_queue(facts),
            _causes_in_refusals(facts),
            _causes_in_traffic(facts, environments),
        )
    )
    return causes or {
        "slow": f"{facts.num_completions} completions were sampled since the last batch and a batch takes "
        f"{facts.sizes.batch_size} sequences of groups with different scores: it may only take time"
    }


def _causes_in_api(facts: AtroposFacts) -> Iterator[tuple[str, str]]:
    match facts.api.state:
        case "unreachable":
            yield (
                "api_unreachable",
                f"nothing answers at {facts.url} ({facts.api.problem}); start it with `run-api --host 127.0.0.1 "
                "--port PORT`, or let this run do it with rollout.atropos.start.api=true",
            )
        case "poisoned":
            yield (
                "api_poisoned",
                f"{facts.url} takes no trainer: an environment has posted before the trainer was registered, again and "
                "again; end the environments, start the API anew, then them",
            )
        case "unregistered" if facts.api.problem:
            yield (
                "api_unregistered",
                f"{facts.url} knows no trainer, and this one does not get in: {facts.api.problem}",
            )
    if facts.num_failed_batches:
        yield (
            "batches_lost",
            f"{facts.num_failed_batches} batches were lost in an error of the API's: an environment posts NaN or "
            "infinity as a score or a log-prob",
        )


def _causes_in_processes(environments: Sequence[SupervisedProcess]) -> Iterator[tuple[str, str]]:
    for environment in environments:
        name, code = environment.name, environment.exit_code
        if code == 0:
            yield (
                f"{name}_finished",
                f"the environment {name} has ended by itself: its total_steps is over; leave env.total_steps to this "
                "run",
            )
        elif environment.has_given_up:
            yield (
                f"{name}_dead",
                f"the environment {name} does not run: it ended with {code} too often; {environment.log} ends with: "
                f"{environment.log_tail()}",
            )


def _causes_in_queue(facts: AtroposFacts) -> Iterator[tuple[str, str]]:
    size, batch_size, num_queued = facts.api.last_group_size, facts.sizes.batch_size, facts.api.num_queued
    if not size or not num_queued:
        return
    if batch_size % size:
        yield (
            "size_does_not_divide",
            f"groups of {size} can never fill a batch of exactly {batch_size} sequences, and no other group passes a "
            "larger one in the queue; make rollout.problems_per_step x rollout.group_size a multiple of "
            f"{size}, or set the environment's group_size",
        )
    elif num_queued * size >= batch_size:
        yield (
            "queue_blocked",
            f"{num_queued} groups wait in run-api and form no batch of {batch_size} sequences: a group whose size does "
            "not divide it waits before them, or an environment with a min_batch_allocation has no groups; if that "
            f"one is dead: curl -X POST {facts.url}/disconnect-env -H 'content-type: application/json' "
            "-d '{\"env_id\": ID}'",
        )


def _causes_in_refusals(facts: AtroposFacts) -> Iterator[tuple[str, str]]:
    if not facts.refused:
        return
    counts = ", ".join(f"{reason}: {count}" for reason, count in sorted(facts.refused.items()))
    hints = [f"{reason}: {text}" for reason, text in WELL_FORMED.items() if reason in facts.refused]
    if set(facts.refused) - set(WELL_FORMED):
        hints.append("see quarantine.jsonl")
    name = "_".join(["refused", *sorted(facts.refused)])  # a further reason is a cause of its own
    yield name, f"groups that came were not trained on ({counts}); {'; '.join(hints)}"


def _causes_in_traffic(facts: AtroposFacts, environments: Sequence[SupervisedProcess]) -> Iterator[tuple[str, str]]:
    if facts.api.state in ("unreachable", "unregistered") or facts.api.num_queued:
        return
    logs = f"; their logs: {', '.join(str(one.log) for one in environments)}" if environments else ""
    if facts.num_completions == 0:
        yield (
            "no_requests",
            "no environment has asked this server for a completion since the last batch that was trained on: none is "
            f"connected to {facts.url} yet, it hangs, or it asks another server, since atroposlib drops "
            "--openai.base_url where the environment's own default is no list: give it --config with `openai:` as a "
            f"list of two entries, as rollout.atropos.start.environments does{logs}",
        )
    if facts.num_completions >= 2 * facts.sizes.batch_size:
        yield (
            "groups_vanish",
            f"{facts.num_completions} completions were sampled and no group has come. Environments drop groups whose "
            "scores are all equal, with a sequence of max_token_len or of fewer than 10 tokens, or without log-probs; "
            f"run-api keeps back groups of another size than group_size until they add up to it{logs}",
        )
