"""Groups of mixed sizes are trained on or named, old groups in their order, and bad groups cost themselves only."""

import gzip
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
import pytest

from tests.interop.atropos.stage import (
    Group,
    RunApi,
    Stage,
    Trainer,
    base_overrides,
    expect,
    run_api,
    sampled,
    trainer,
    wait_until,
)

MEGABYTES = 64.0
"""Memory of the process that refused groups may cost."""


@contextmanager
def both(stage: Stage, *overrides: str) -> Iterator[tuple[RunApi, Trainer]]:
    """A run-api and a trainer of eight sequences a step that has registered with it."""
    with run_api(stage) as api, trainer(stage, [*base_overrides(api.url), *overrides]) as one:
        api.register_environment(group_size=4)
        yield api, one


@pytest.mark.interop
def test_groups_of_mixed_sizes_are_trained_on_or_named(stage: Stage) -> None:
    """Sizes 2 and 8 train; sizes 3 and 9, and groups that wait in run-api's buffer, are named."""
    with both(stage) as (api, one):
        api.put(*(sampled(one, 2, seed=seed) for seed in range(3)), sampled(one, 8, seed=3))
        one.wait_for_step(1)
        expect(one.rows()[0]["groups/sampled"] == 1, "the group of 8 is a batch by itself")
        api.put(sampled(one, 2, seed=4))
        one.wait_for_step(2)
        expect(one.rows()[1]["groups/with_signal"] == 4, "four groups of 2, each with advantages of its own")
        api.put(*(sampled(one, 3, seed=seed) for seed in range(10, 14)))
        one.wait_for_message("groups of 3 can never fill a batch of exactly 8")
        again(api, one)
        api.put(sampled(one, 9, seed=20), sampled(one, 8, seed=21))
        one.wait_for_message("a group whose size does not divide it waits before them")
        again(api, one)
        env_id = api.register_environment(group_size=4)
        answer = api.post("/scored_data", sampled(one, 3, seed=30) | {"env_id": env_id}).json()
        expect(answer["status"] == "buffered", answer)
        sampled(one, 16, seed=31)
        one.wait_for_message("run-api keeps back groups of another size")
        expect(one.step() == 2, "what cannot be trained on was trained on")
        rows = one.rows()
        expect(rows[-1]["atropos/sequences"] == 16 and rows[-1]["atropos/refused"] == 0, rows[-1])


def again(api: RunApi, one: Trainer) -> None:
    """An empty run-api, a trainer that is registered anew, and an environment.

    In between, run-api takes environments that it forgets at the registration.
    """
    num_lost = one.log().count("registering again")
    api.reset()
    wait_until(lambda: one.log().count("registering again") > num_lost, "a trainer that has noticed")
    wait_until(lambda: api.get("/info")["batch_size"] == 8, "a trainer that is registered")
    api.register_environment(group_size=4)


@pytest.mark.interop
def test_batches_of_one_version_are_trained_in_their_order_older_and_older(stage: Stage) -> None:
    with both(stage.of("ledger")) as (api, one):
        lags = lags_of_three(api, one)
        expect(lags == [0, 1, 2], f"lags {lags}, not 0, 1, 2")
        rewards = [row["reward/mean"] for row in one.rows()]
        expect(rewards == [1.5, 2.5, 3.5], f"not oldest first: {rewards}")
        expect(one.rows()[2]["offpolicy/ratio_max"] != 1, "the ratio of an old token is 1")
    with both(stage.of("limit"), "trainer.max_off_policy_steps=1") as (api, one):
        hold(one, lambda: api.put(*three_batches(one)))
        one.wait_for_step(2)
        one.wait_for_message("stale: 2")
    with both(stage.of("control"), "rollout.atropos.unmatched=recompute", "rollout.atropos.ledger_tokens=1") as (
        api,
        one,
    ):
        forgotten = lags_of_three(api, one)
        expect(forgotten != [0, 1, 2], "without a ledger the lags are right, so this check sees nothing")


def three_batches(one: Trainer) -> list[Group]:
    """Six groups of four of one version; the scores tell the batches apart."""
    groups = [sampled(one, 4, seed=seed) for seed in range(6)]
    for number, group in enumerate(groups):
        group["scores"] = [score + number // 2 for score in group["scores"]]
    return groups


def lags_of_three(api: RunApi, one: Trainer) -> list[float | None]:
    hold(one, lambda: api.put(*three_batches(one)))
    one.wait_for_step(3)
    return [row["offpolicy/lag_max"] for row in one.rows()]


def hold(one: Trainer, act: Callable[[], None]) -> None:
    one.pause(on=True)
    act()
    one.pause(on=False)


@pytest.mark.interop
def test_bad_groups_cost_themselves_only(stage: Stage) -> None:
    """Groups that are too long, ragged, not finite or no gzip cost themselves only."""
    with both(stage) as (api, one):
        api.put(sampled(one, 4, seed=0), sampled(one, 4, seed=1))
        one.wait_for_step(1)
        before = one.server.resident_megabytes()
        for group in broken(one):
            api.put(group, group)
        one.wait_for_message("groups that came were not trained on (")
        api.put(nan := sampled(one, 4, seed=2) | {"scores": [0.0, float("nan"), 1.0, 2.0]}, nan)
        one.wait_for_message("batches were lost in an error of the API's")
        broken_gzip(api)
        api.put(sampled(one, 4, seed=3), sampled(one, 4, seed=4))
        one.wait_for_step(2)
        growth = one.server.resident_megabytes() - before
        expect(growth < MEGABYTES, f"{growth:.0f} MB more than before")
        row = one.rows()[-1]
        expect((row["atropos/refused/too_long"], row["atropos/refused/ragged"]) == (4, 2), row)
        expect(row["atropos/failed_batches"] >= 1, row)


def broken(one: Trainer) -> Iterator[Group]:
    """One sequence of the longest length that is trained on and one more, one of 20,000, and ragged masks."""
    good = sampled(one, 4, seed=9)
    for length in (257, 20_000):
        row = [[5] * length] * 4
        yield good | {"tokens": row, "masks": row, "inference_logprobs": [[-1.0] * length] * 4}
    yield good | {"masks": [mask[:-1] for mask in good["masks"]]}


def broken_gzip(api: RunApi) -> None:
    body = gzip.compress(json.dumps({"tokens": [[1]]}).encode())[:-6]
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    answer = httpx.post(f"{api.url}/scored_data", content=body, headers=headers, trust_env=False)
    expect(answer.status_code >= 400, answer.status_code)
