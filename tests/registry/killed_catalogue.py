"""A program that changes a catalogue in child processes, kills each at a random point, and compares what is there.

Prints a JSON object: kills, changes that were made, and the states that were neither before nor after the change under
way. `--forget` leaves one change out of the account, which must be found.
"""

import asyncio
import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

from parallm.registry.catalogue import OWN_MODELS, Catalogue
from parallm.registry.records import Overlay
from tests.registry.folders import write_folder

KILLS = 50
State = dict[str, tuple[str, str]]


def changed(state: State, act: list[str]) -> State:
    """The state after an act: names with the folder and the system message of each."""
    kind, *words = act
    if kind == "create":
        return state | {words[0]: (words[1], words[2])}
    if kind == "copy":
        return state | {words[1]: state[words[0]]}
    return {name: value for name, value in state.items() if kind != "delete" or name != words[0]}


def next_act(state: State, number: int, draws: random.Random) -> list[str]:
    names = sorted(state)
    kind = draws.choice(("create", "copy", "delete", "load")) if len(names) > 2 else "create"
    if kind == "create":
        return [kind, f"name{number}:latest", f"model{number}", f"system {number}"]
    if kind == "copy":
        return [kind, draws.choice(names), f"name{number}:latest"]
    return [kind, draws.choice(names)]


async def act_for_ever(folder: Path, state: State, number: int, pipe: int) -> None:
    """Make one act after the other; each is written to the pipe before it and after it."""
    draws, catalogue = random.Random(number), Catalogue(folder)
    while True:
        number += 1
        act = next_act(state, number, draws)
        os.write(pipe, (json.dumps(["begin", act]) + "\n").encode())
        if act[0] == "create":
            path = write_folder(folder / "building" / act[2], hidden_size=number)
            path.rename(folder / OWN_MODELS / act[2])
            overlay = Overlay(system=act[3])
            await catalogue.create(act[1], str(folder / OWN_MODELS / act[2]), overlay)
        elif act[0] == "copy":
            await catalogue.copy(act[1], act[2])
        elif act[0] == "delete":
            await catalogue.delete(act[1])
        else:
            await catalogue.note_load((await catalogue.find(act[1])).model, 0.1, num_bytes=number)
        state = changed(state, act)
        os.write(pipe, (json.dumps(["end", act]) + "\n").encode())


async def read_state(folder: Path) -> State:
    """What a new process sees. Raises for a broken file."""
    catalogue = Catalogue(folder)
    try:
        assert catalogue._connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert catalogue._connection.execute("PRAGMA foreign_key_check").fetchall() == []
        named = await catalogue.names()
        assert all(Path(one.model.folder).is_dir() for one in named)
        return {one.name: (Path(one.model.folder).name, (one.overlay or Overlay()).system or "") for one in named}
    finally:
        catalogue.close()


def main() -> None:
    folder, forgets = Path(sys.argv[1]), "--forget" in sys.argv
    (folder / OWN_MODELS).mkdir(parents=True)
    draws, state, number = random.Random(7), State(), 0
    wrong: list[str] = []
    kills = 5 if forgets else KILLS
    for kill in range(kills):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            asyncio.run(act_for_ever(folder, state, number, writing))
        os.close(writing)
        with os.fdopen(reading) as lines:
            events = [json.loads(lines.readline()) for _ in range(draws.randint(1, 12))]
            time.sleep(draws.uniform(0, 0.003))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            events += [json.loads(line) for line in lines]
        number += len(events)
        possible = [state]
        for word, act in events:
            possible = [state, changed(state, act)] if word == "begin" else [changed(state, act)]
            state = possible[-1] if word == "end" else state
        if forgets and kill == kills - 1:
            possible = [changed(one, ["create", "forgotten:latest", "none", ""]) for one in possible]
        found = asyncio.run(read_state(folder))
        if found not in possible:
            wrong.append(f"after kill {kill}: {found} instead of {possible}")
        state = found
        shutil.rmtree(folder / "building", ignore_errors=True)
    sys.stdout.write(json.dumps({"kills": kills, "changes": number // 2, "wrong": wrong}))


main()
