"""Is anything lost that a person gave, when the process is killed? kill -9 at random points, and the account after it.

Live traffic: clients ask for completions, rate them, and send again what a kill has left unanswered. No rating that was
answered may be lost, none may be trained on twice, and what is sent again must be answered right. Two controls change
the run's file before each start, as if reserved trajectories were trained on, and as if nothing were reserved: the
account must find what is lost, and what is trained on twice.

Serving: an operator loads adapters, sets aliases, splits and what names mean. After each kill all of it must be as it
was before or after the change under way; a control that forgets one change must be found.
"""

import asyncio
import json
import random
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from killed_process import KilledProcess
from operator_acts import serve_and_kill
from rating_clients import Crowd, Outcome
from report import print_figures, print_table

LIVE = (
    "+recipe=live_traffic",
    "rollout.problems_per_step=2",
    "rollout.group_size=4",
    "rollout.max_tokens=16",
    "rollout.live.wait_seconds=1",
    "rollout.live.max_trajectories=100000",
    "trainer.steps=1000000",
    "trainer.max_off_policy_steps=1000000",
    "trainer.guard.on_divergence=warn",
    "learner.learning_rate=1e-5",
    "metrics.samples_per_step=1000000",
    "checkpoint.every=3",
)
"""Steps by the second, of which two in three are in no checkpoint yet; no rating becomes too old."""
CONTROL_KILLS = 5
LONGEST = 2.0
"""Seconds from the first answer of a process to its end."""
EARLY = 0.2
"""Share of the kills before the first answer."""
START = 3.0
"""Seconds, in which an early kill comes."""
SHOWN = 5

Change = Callable[[Path], None]


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50, help="of live traffic (default: %(default)s)")
    parser.add_argument("--serve-kills", type=int, default=20, help="of a server (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    arguments = parser.parse_args()
    kills, seed = arguments.kills, arguments.seed
    control_kills = min(kills, CONTROL_KILLS)
    live = asyncio.run(rate_and_kill(kills, seed, lambda _: None))
    lossy = asyncio.run(rate_and_kill(control_kills, seed + 1, as_trained))
    forgetful = asyncio.run(rate_and_kill(control_kills, seed + 2, as_waiting))
    show_live({"live": live, "control: reserved is trained": lossy, "control: nothing is reserved": forgetful})
    served = asyncio.run(serve_and_kill(arguments.serve_kills, seed))
    control = asyncio.run(serve_and_kill(1, seed, forgets=True))
    rows = [("", "kills", "changes", "other states")]
    for name, one in (("serve", served), ("control: one change is forgotten", control)):
        rows.append((name, str(one.num_kills), str(one.num_changes), str(len(one.wrong))))
    print_table("Operators", rows)
    for text in served.wrong[:SHOWN]:
        print(f"  {text}")
    print_figures(
        {
            "live.kills": float(kills),
            "live.ratings": float(live.num_ratings),
            "live.ratings_lost": float(len(live.lost)),
            "live.trained_twice": float(len(live.twice)),
            "live.resent": float(live.num_resent),
            "live.wrong_answers": float(len(live.wrong)),
            "live.control_lost": float(len(lossy.lost)),
            "live.control_twice": float(len(forgetful.twice)),
            "serve.kills": float(served.num_kills),
            "serve.changes": float(served.num_changes),
            "serve.wrong_states": float(len(served.wrong)),
            "serve.control_wrong_states": float(len(control.wrong)),
        }
    )


async def rate_and_kill(kills: int, seed: int, change: Change) -> Outcome:
    """Kill a run `kills` times while clients rate; `change` is done to its file before each start but the first."""
    source = random.Random(seed)
    with TemporaryDirectory() as name:
        process = KilledProcess("parallm.train", list(LIVE), Path(name))
        crowd = Crowd(process, seed)
        await process.start()
        asking = asyncio.create_task(crowd.run())
        for place in range(kills):
            if place and source.random() < EARLY:
                await asyncio.sleep(source.uniform(0, START))  # it was spawned and may not answer yet
            else:
                await process.answers()
                await asyncio.sleep(source.uniform(0, LONGEST))
            process.kill()
            runs = (Path(name) / "checkpoints" / "live_traffic").iterdir()
            run = max(path for path in runs if not path.is_symlink())  # `latest` is one
            change(run / "trajectories.jsonl")
            process.spawn()
        await process.answers()
        crowd.stop()
        await asking
        outcome = await crowd.judge(run)
        await process.stop()
        return outcome


def as_trained(file: Path) -> None:
    """What a step took counts as trained on, whatever checkpoint there is."""
    change_lines(file, lambda line: {"gone": line["reserved"], "reason": "trained"} if "reserved" in line else line)


def as_waiting(file: Path) -> None:
    """What a step took waits."""
    change_lines(file, lambda line: {} if "reserved" in line or line.get("reason") == "trained" else line)


def change_lines(file: Path, change: Callable[[dict[str, object]], dict[str, object]]) -> None:
    lines = []
    for text in file.read_text().splitlines():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue  # half a line
        lines.append(json.dumps(change(line)) + "\n")
    file.write_text("".join(lines))


def show_live(outcomes: dict[str, Outcome]) -> None:
    rows = [("", "ratings", "sent again", "trained on", "lost", "trained twice", "wrong answers")]
    for name, one in outcomes.items():
        counts = (one.num_ratings, one.num_resent, one.num_trained, len(one.lost), len(one.twice), len(one.wrong))
        rows.append((name, *map(str, counts)))
    print_table("Ratings of clients", rows)
    live = next(iter(outcomes.values()))
    for text in (*live.lost[:SHOWN], *live.twice[:SHOWN], *live.wrong[:SHOWN]):
        print(f"  {text}")


if __name__ == "__main__":
    main()
