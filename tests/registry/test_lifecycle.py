"""The decision function of the pool: tables of messages under a fake clock, and random sequences against rules."""

import random
from dataclasses import replace

import pytest

from parallm.errors import ModelError, NoMemory, Unavailable
from parallm.registry.lifecycle import (
    Effect,
    Grant,
    Leave,
    Loaded,
    LoadFailed,
    Message,
    PoolState,
    Refuse,
    Released,
    StartLoad,
    StartUnload,
    Tick,
    Unload,
    Unloaded,
    Want,
    decide,
    next_time,
)

BROKEN = ModelError("broken")
EMPTY = PoolState(budget=100, wait_seconds=30.0)


def want(key: str, number: int, num_bytes: int = 40, keep_alive: float = 10.0, *, pin: bool | None = None) -> Want:
    return Want(key, number, num_bytes, keep_alive, pin)


def played(*steps: tuple[float, Message, list[object]], state: PoolState = EMPTY) -> PoolState:
    """The state after all messages; the effects of each must be as the step says, refusals by their classes."""
    for now, message, expected in steps:
        state, effects = decide(state, message, now)
        assert [(one.number, type(one.error)) if isinstance(one, Refuse) else one for one in effects] == expected, (
            now,
            message,
        )
    return state


def loaded(*keys: str, state: PoolState = EMPTY, num_bytes: int = 40, keep_alive: float = 10.0) -> PoolState:
    """All of them in memory and idle, used one second after the other from 0 on."""
    for number, key in enumerate(keys):
        state, _ = decide(state, want(key, 900 + number, num_bytes, keep_alive), float(number))
        state, _ = decide(state, Loaded(key, num_bytes), float(number))
        state, _ = decide(state, Released(key), float(number))
    return state


def test_wants_for_one_model_share_its_load() -> None:
    state = played(
        (0, want("a", 1), [StartLoad("a")]),
        (1, want("a", 2), []),
        (2, Loaded("a", 40), [Grant(1), Grant(2)]),
        (3, want("a", 3), [Grant(3)]),
    )
    assert state.slots["a"].num_leases == 3


def test_the_time_to_stay_begins_when_the_last_lease_ends() -> None:
    state = played(
        (0, want("a", 1), [StartLoad("a")]),
        (1, Loaded("a", 40), [Grant(1)]),
        (2, want("a", 2), [Grant(2)]),
        (50, Released("a"), []),
        (60, Released("a"), []),
        (69.9, Tick(), []),
    )
    assert next_time(state) == 70
    state = played((70, Tick(), [StartUnload("a")]), (71, Unloaded("a"), []), state=state)
    assert dict(state.slots) == {}


@pytest.mark.parametrize(("keep_alive", "effects"), [(0.0, [StartUnload("a")]), (-1.0, []), (5.0, [])])
def test_keep_alive_of_the_newest_request_counts(keep_alive: float, effects: list[object]) -> None:
    state = loaded("a")
    played(
        (1, want("a", 1, keep_alive=keep_alive), [Grant(1)]),
        (2, Released("a"), effects),
        state=state,
    )
    stays = played((1, want("a", 1, keep_alive=-1.0), [Grant(1)]), (2, Released("a"), []), state=state)
    assert next_time(stays) is None
    played((1e9, Tick(), []), state=stays)


def test_a_request_while_it_drains_waits_for_the_reload() -> None:
    played(
        (0, want("a", 1), [StartLoad("a")]),
        (1, Loaded("a", 40), [Grant(1)]),
        (2, Unload("a", 7), []),
        (3, want("a", 2), []),
        (4, Released("a"), [StartUnload("a")]),
        (5, want("a", 3), []),
        (6, Unloaded("a"), [Grant(7), StartLoad("a")]),
        (7, Loaded("a", 40), [Grant(2), Grant(3)]),
    )


def test_an_unload_while_it_loads_lets_those_that_wait_answer_first() -> None:
    played(
        (0, want("a", 1), [StartLoad("a")]),
        (1, Unload("a", 7), []),
        (2, Loaded("a", 40), [Grant(1)]),
        (3, Released("a"), [StartUnload("a")]),
        (4, Unloaded("a"), [Grant(7)]),
    )


def test_the_least_recently_used_idle_models_make_room() -> None:
    state = loaded("a", "b")
    state = played((3, want("a", 1), [Grant(1)]), (4, Released("a"), []), state=state)
    played(
        (5, want("c", 2, 60), [StartUnload("b")]),
        (6, Unloaded("b"), [StartLoad("c")]),
        state=state,
    )


def test_among_equals_the_larger_one_goes() -> None:
    state = loaded("a", num_bytes=20)
    state = replace(state, slots={**state.slots, "b": replace(state.slots["a"], num_bytes=60)})
    played((5, want("c", 2, 50), [StartUnload("b")]), state=state)


def test_nothing_is_unloaded_in_vain() -> None:
    state = played((3, want("a", 1), [Grant(1)]), state=loaded("a", "b"))
    state = played((4, want("c", 2, 90), []), state=state)
    played((5, Released("a"), [StartUnload("b"), StartUnload("a")]), state=state)


def test_a_want_gives_up_when_others_stay_busy() -> None:
    state = played((3, want("a", 1), [Grant(1)]), (4, want("c", 2, 90), []), state=loaded("a"))
    assert next_time(state) == 34
    played((34, Tick(), [(2, NoMemory)]), state=state)


def test_what_can_never_fit_is_refused_at_once_with_both_numbers() -> None:
    state = played((0, want("a", 1, 101), [(1, Unavailable)]))
    _, (refusal,) = decide(state, want("a", 2, 101), 0)
    assert isinstance(refusal, Refuse)
    assert "101 bytes" in str(refusal.error)
    assert "=100" in str(refusal.error)


def test_only_an_operator_unloads_a_pinned_model() -> None:
    state = played(
        (0, want("a", 1, 60, pin=True), [StartLoad("a")]),
        (1, Loaded("a", 60), [Grant(1)]),
        (2, Released("a"), []),
        (1e6, Tick(), []),
        (1e6, want("b", 2, 50), [(2, Unavailable)]),
    )
    played((1e6, Unload("a", 3), [StartUnload("a")]), (1e6, Unloaded("a"), [Grant(3)]), state=state)


def test_a_failed_load_is_not_tried_again_for_a_while() -> None:
    state = played(
        (0, want("a", 1), [StartLoad("a")]),
        (1, want("a", 2), []),
        (2, LoadFailed("a", BROKEN), [(1, ModelError), (2, ModelError)]),
        (2.9, want("a", 3), [(3, ModelError)]),
        (3, want("a", 4), [StartLoad("a")]),
        (4, LoadFailed("a", BROKEN), [(4, ModelError)]),
        (5.9, want("a", 5), [(5, ModelError)]),
        (6, want("a", 6), [StartLoad("a")]),
    )
    played((7, Loaded("a", 40), [Grant(6)]), (8, Unload("a", 9), []), state=state)


def test_when_memory_runs_out_all_idle_models_make_room_and_the_load_is_tried_once_more() -> None:
    state = loaded("a", "b", num_bytes=10, keep_alive=-1.0)
    played(
        (2, want("c", 1), [StartLoad("c")]),
        (3, LoadFailed("c", BROKEN, is_memory=True), [StartUnload("a"), StartUnload("b")]),
        (4, Unloaded("a"), []),
        (5, Unloaded("b"), [StartLoad("c")]),
        (6, LoadFailed("c", BROKEN, is_memory=True), [(1, ModelError)]),
        state=state,
    )


def test_one_load_at_a_time_in_the_order_of_the_wants() -> None:
    played(
        (0, want("a", 1, 20), [StartLoad("a")]),
        (1, want("b", 2, 20), []),
        (1, want("c", 3, 20), []),
        (2, Loaded("a", 20), [Grant(1), StartLoad("b")]),
        (3, LoadFailed("b", BROKEN), [(2, ModelError), StartLoad("c")]),
    )


def test_a_small_model_does_not_wait_for_one_that_waits_for_memory() -> None:
    state = played((3, want("a", 1), [Grant(1)]), state=loaded("a"))
    played((4, want("b", 2, 90), []), (5, want("c", 3, 30), [StartLoad("c")]), state=state)


def test_a_client_that_leaves_takes_its_want_along_and_not_the_load() -> None:
    played(
        (0, want("a", 1), [StartLoad("a")]),
        (1, want("b", 2), []),
        (2, Leave(1), []),
        (3, Leave(2), []),
        (4, Loaded("a", 40), []),
        (14, Tick(), [StartUnload("a")]),
    )


def test_a_model_that_takes_more_than_was_thought_makes_others_leave() -> None:
    state = loaded("a", keep_alive=-1.0)
    played((1, want("b", 1), [StartLoad("b")]), (2, Loaded("b", 70), [Grant(1), StartUnload("a")]), state=state)


class World:
    """What must hold, told by messages and effects alone."""

    def __init__(self, seed: int) -> None:
        self.draws = random.Random(seed)
        self.state = PoolState(budget=100, wait_seconds=20.0)
        self.now = 0.0
        self.in_memory: dict[str, int] = {}
        self.loading: set[str] = set()
        self.unloading: set[str] = set()
        self.leases: dict[str, list[int]] = {}
        self.open: dict[int, str] = {}
        """Wants without an answer, by number."""
        self.asked_to_leave: dict[int, str] = {}
        self.pins: set[int] = set()
        """Wants that pin."""
        self.pinned: set[str] = set()
        self.sizes = {key: self.draws.choice((10, 30, 45, 60, 120)) for key in "abcdef"}
        self.number = 0

    def tell(self, message: Message) -> None:
        self.state, effects = decide(self.state, message, self.now)
        for effect in effects:
            self.check(effect)
        held = [self.sizes[key] for key in {*self.in_memory, *self.loading, *self.unloading}]
        assert sum(held) <= 100

    def check(self, effect: Effect) -> None:
        match effect:
            case StartLoad(key=key):
                assert not self.loading, "one at a time"
                assert key not in self.in_memory
                assert key not in self.unloading
                self.loading.add(key)
            case StartUnload(key=key):
                assert key in self.in_memory, "only what is there"
                assert not self.leases.get(key), "nobody uses it"
                assert key not in self.pinned, "no pin"
                del self.in_memory[key]
                self.unloading.add(key)
            case Grant(number=number) if number in self.asked_to_leave:
                key = self.asked_to_leave.pop(number)
                assert key not in self.in_memory
            case Grant(number=number):
                key = self.open.pop(number)
                assert key in self.in_memory, "never what is not loaded"
                self.leases.setdefault(key, []).append(number)
                is_leaving = key in self.asked_to_leave.values()
                self.pinned |= {key} if number in self.pins and not is_leaving else set()
            case Refuse(number=number):
                del self.open[number]

    def act(self) -> None:
        self.now += self.draws.choice((0.0, 0.1, 1.0, 7.0))
        self.number += 1
        key, chance = self.draws.choice("abcdef"), self.draws.random()
        if chance < 0.35:
            self.open[self.number] = key
            keep_alive = self.draws.choice((0.0, 5.0, -1.0))
            is_pinned = self.draws.choice((None, None, None, None, True))
            self.pins |= {self.number} if is_pinned else set()
            self.tell(Want(key, self.number, self.sizes[key], keep_alive, is_pinned))
        elif chance < 0.45 and self.loading:
            self.finish_load(is_broken=self.draws.random() < 0.3)
        elif chance < 0.6 and self.unloading:
            self.finish_unload()
        elif chance < 0.8 and any(self.leases.values()):
            self.release()
        elif chance < 0.86:
            self.asked_to_leave[self.number] = key
            self.pinned.discard(key)
            self.tell(Unload(key, self.number))
        elif chance < 0.92 and self.open:
            number = self.draws.choice(sorted(self.open))
            del self.open[number]
            self.tell(Leave(number))
        else:
            self.tell(Tick())

    def finish_load(self, *, is_broken: bool) -> None:
        key = self.loading.pop()
        if is_broken:
            self.tell(LoadFailed(key, BROKEN, is_memory=self.draws.random() < 0.5))
        else:
            self.in_memory[key] = 1
            self.tell(Loaded(key, self.sizes[key]))

    def finish_unload(self) -> None:
        key = self.draws.choice(sorted(self.unloading))
        self.unloading.remove(key)
        self.tell(Unloaded(key))

    def release(self) -> None:
        key = self.draws.choice(sorted(key for key, numbers in self.leases.items() if numbers))
        self.leases[key].pop()
        self.tell(Released(key))

    def end(self) -> None:
        """Let all that was begun end: every want has its answer then, and every operator."""
        for _ in range(1000):
            if self.loading:
                self.finish_load(is_broken=False)
            elif self.unloading:
                self.finish_unload()
            elif any(self.leases.values()):
                self.release()
            elif (time := next_time(self.state)) is not None:
                self.now = max(self.now, time)
                self.tell(Tick())
            else:
                break
        assert (self.open, self.asked_to_leave, any(self.leases.values())) == ({}, {}, False)


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_random_sequences_keep_the_rules(first: int) -> None:
    for seed in range(first, first + 50):
        world = World(seed)
        for _ in range(100):
            world.act()
        world.end()


def test_the_rules_find_a_model_that_leaves_while_it_answers() -> None:
    world = World(0)
    world.open[1] = "a"
    world.sizes["a"] = 10
    world.tell(Want("a", 1, 10, 0.0))
    world.finish_load(is_broken=False)
    world.state = replace(
        world.state, slots={key: replace(slot, num_leases=0, deadline=0.0) for key, slot in world.state.slots.items()}
    )
    with pytest.raises(AssertionError, match="nobody uses it"):
        world.tell(Tick())
