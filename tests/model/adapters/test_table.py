import threading
import time

import mlx.core as mx
import pytest

from parallm.errors import AdapterError, UnknownModel
from parallm.model.adapters.adapter import Adapter, make_adapter
from parallm.model.adapters.table import AdapterTable

TARGET = "model.layers.0.self_attn.q_proj"


def arrays(value: float = 1.0) -> dict[str, mx.array]:
    return {f"{TARGET}.lora_a": mx.full((6, 2), value), f"{TARGET}.lora_b": mx.zeros((2, 4))}


def adapter(version: int, name: str = "policy") -> Adapter:
    return make_adapter(arrays(version), name=name, version=version, parent=version - 1, step=version, rank=2, alpha=4)


def table_of(*versions: int, keep: int = 8) -> AdapterTable:
    table = AdapterTable(keep=keep)
    for version in versions:
        table.publish(adapter(version))
    return table


def version_of(table: AdapterTable, model: str) -> int:
    found = table.resolve(model)
    return 0 if found is None else found.version


def test_policy_is_the_base_before_anything_is_published() -> None:
    table = AdapterTable()
    assert [table.resolve(model) for model in ("base", "policy", "policy@0", "latest")] == [None] * 4


def test_policy_and_latest_are_the_newest_version_and_base_stays_the_base() -> None:
    table = table_of(1, 2)
    assert [version_of(table, model) for model in ("policy", "latest", "policy@1", "base")] == [2, 2, 1, 0]


def test_a_card_knows_the_bytes_of_its_adapter() -> None:
    (card,) = table_of(1).cards()
    assert card.num_bytes == 4 * (6 * 2 + 2 * 4)


def test_published_arrays_are_the_same_objects() -> None:
    published = adapter(1)
    table = AdapterTable()
    table.publish(published)
    assert table.resolve("policy") is published


@pytest.mark.parametrize("version", [1, 2])
def test_a_duplicate_or_lower_version_is_refused_and_changes_nothing(version: int) -> None:
    table = table_of(1, 2)
    with pytest.raises(AdapterError, match="policy is at version 2; publish version 3 or above"):
        table.publish(adapter(version))
    assert version_of(table, "policy") == 2


def test_an_older_version_can_be_served_again_and_newer_ones_go_on_from_the_newest() -> None:
    table = table_of(1, 2, 3)
    table.promote(1)
    assert [version_of(table, model) for model in ("policy", "latest", "policy@3")] == [1, 3, 3]
    assert [card.version for card in table.cards() if card.is_served] == [1]
    with pytest.raises(AdapterError, match="publish version 4 or above"):
        table.publish(adapter(2))
    table.publish(adapter(4))
    assert version_of(table, "policy") == 4


def test_a_version_that_is_not_served_yet_can_be_asked_for_by_number_and_as_latest() -> None:
    table = AdapterTable()
    table.publish(adapter(1), serve=False)
    assert [version_of(table, model) for model in ("policy", "latest", "policy@1")] == [0, 1, 1]
    table.promote(1)
    assert version_of(table, "policy") == 1
    table.promote(0)
    assert table.resolve("policy") is None


def test_the_served_version_stays_in_memory_however_many_newer_ones_there_are() -> None:
    table = table_of(1, keep=2)
    for version in range(2, 9):
        table.publish(adapter(version), serve=False)
    assert (version_of(table, "policy"), version_of(table, "latest")) == (1, 8)
    table.promote(8)
    with pytest.raises(UnknownModel, match="policy@1 was dropped"):
        table.promote(1)
    assert version_of(table, "policy") == 8


def test_a_sequence_of_a_version_that_is_not_served_any_more_keeps_it_until_it_ends() -> None:
    table = table_of(1, 2, keep=1)
    table.publish(adapter(3), serve=False)
    running = table.resolve("policy")
    table.acquire(running)
    table.promote(3)
    assert [version_of(table, model) for model in ("policy", "policy@2")] == [3, 2]
    table.release(running)
    with pytest.raises(UnknownModel, match="policy@2 was dropped"):
        table.resolve("policy@2")


def test_an_unknown_name_lists_what_there_is() -> None:
    with pytest.raises(UnknownModel, match=r"no model 'gpt-4'; there are base, policy, latest, policy@1, policy@2$"):
        table_of(1, 2).resolve("gpt-4")


@pytest.mark.parametrize("model", ["policy@9", "policy@-1", "policy@x", "policy@", "other@1", ""])
def test_a_version_that_never_was_is_unknown(model: str) -> None:
    with pytest.raises(UnknownModel, match="there are base, policy, latest, policy@1"):
        table_of(1).resolve(model)


def test_only_the_newest_versions_are_kept_and_a_dropped_one_says_so() -> None:
    table = table_of(1, 2, 3, keep=2)
    assert [card.version for card in table.cards()] == [3, 2]
    with pytest.raises(UnknownModel, match="policy@1 was dropped"):
        table.resolve("policy@1")


def test_a_version_in_use_stays_until_its_last_sequence_ends() -> None:
    table = table_of(1, keep=1)
    running = table.resolve("policy")
    table.acquire(running)
    table.acquire(running)
    table.publish(adapter(2))
    table.publish(adapter(3))
    table.release(running)
    assert [(card.version, card.num_running) for card in table.cards()] == [(3, 0), (1, 1)]
    table.release(running)
    assert [card.version for card in table.cards()] == [3]


def test_a_version_stays_as_long_as_a_client_may_rely_on_it() -> None:
    table = table_of(*range(1, 31))
    assert [card.version for card in table.cards()] == [*range(30, 22, -1)]
    table.promote(23)
    table.set_alias("best", 24)
    table.hold(["policy@25"])
    table.acquire(table.resolve("policy@26"))
    for version in range(31, 61):
        table.publish(adapter(version), serve=False)
    assert [card.version for card in table.cards()] == [*range(60, 52, -1), 26, 25, 24, 23]
    told = (
        r"policy@27 was dropped: the newest 8 versions stay, and those that an alias, a split or a request uses; there"
    )
    with pytest.raises(UnknownModel, match=told):
        table.resolve("policy@27")


def test_running_versions_do_not_count_against_the_bound() -> None:
    table = AdapterTable(keep=2)
    for version in (1, 2, 3, 4):
        table.publish(adapter(version))
        table.acquire(table.resolve("policy"))
    assert [card.version for card in table.cards()] == [4, 3, 2, 1]


def test_an_aliased_version_stays_until_the_alias_moves() -> None:
    table = table_of(1, 2, keep=1)
    table.set_alias("best", 2)
    table.publish(adapter(3))
    assert version_of(table, "best") == 2
    table.set_alias("best", 3)
    assert [(card.version, card.aliases) for card in table.cards()] == [(3, ("latest", "best"))]


@pytest.mark.parametrize("name", ["base", "latest", "best"])
def test_what_trainers_and_rollouts_ask_for_is_no_name_of_an_adapter(name: str) -> None:
    with pytest.raises(AdapterError, match=f"'{name}' cannot be a name here"):
        table_of(1).publish(adapter(1, name))
    with pytest.raises(AdapterError, match=f"'{name}' cannot be a name here"):
        AdapterTable(policies=(name,))


@pytest.mark.parametrize("alias", ["", "base", "policy", "latest", "a@1", "12"])
def test_an_alias_cannot_hide_another_name(alias: str) -> None:
    with pytest.raises(AdapterError, match="cannot be a name here"):
        table_of(1).set_alias(alias, 1)


@pytest.mark.parametrize("version", [0, 7])
def test_an_alias_of_a_version_that_is_not_in_memory_is_refused(version: int) -> None:
    with pytest.raises(UnknownModel, match=f"policy@{version}"):
        table_of(1).set_alias("best", version)


def test_an_adapter_of_another_name_has_versions_of_its_own() -> None:
    table = table_of(5)
    table.publish(adapter(1, name="helper"))
    assert [version_of(table, model) for model in ("helper", "helper@1", "policy")] == [1, 1, 5]


def table_of_poets() -> AdapterTable:
    table = AdapterTable(keep=1, policies=("poet", "coder"))
    for version, name in ((1, "poet"), (2, "poet"), (7, "coder")):
        table.publish(adapter(version, name=name))
        table.set_alias("best", version, name=name)
    return table


def test_each_name_has_its_newest_version_and_aliases_of_its_own() -> None:
    table = table_of_poets()
    names = ["poet", "poet@latest", "poet@2", "poet@best", "coder", "coder@7", "coder@best", "poet@0", "coder@0"]
    assert [version_of(table, name) for name in names] == [2, 2, 2, 2, 7, 7, 7, 0, 0]
    assert [(card.name, card.version, card.aliases) for card in table.cards()] == [
        ("coder", 7, ("coder@latest", "coder@best")),
        ("poet", 2, ("poet@latest", "poet@best")),
    ]


@pytest.mark.parametrize("model", ["policy", "latest", "best", "policy@0", "poet@9", "coder@2", "poet@worst", "poet@"])
def test_what_stands_alone_is_about_policy_and_unknown_without_one(model: str) -> None:
    with pytest.raises(UnknownModel, match="there are base, poet, coder, coder@latest"):
        table_of_poets().resolve(model)


def test_an_unknown_name_lists_the_names_of_all_cards_with_their_aliases() -> None:
    for table in (table_of_poets(), table_of(1, 2)):
        with pytest.raises(UnknownModel) as unknown:
            table.resolve("other")
        listed = {"base", *table.policies, *(f"{card.name}@{card.version}" for card in table.cards())}
        listed |= {name for card in table.cards() for name in card.aliases}
        assert set(str(unknown.value).partition("there are ")[2].split(", ")) == listed


def test_the_alias_of_policy_has_a_short_and_a_long_name() -> None:
    table = table_of(1, 2, 3)
    table.set_alias("best", 2)
    assert [version_of(table, name) for name in ("best", "policy@best", "policy@latest")] == [2, 2, 3]


def test_every_name_keeps_its_newest_versions() -> None:
    table = AdapterTable(keep=2)
    for version in (1, 2, 3):
        table.publish(adapter(version, name="poet"))
    for version in (11, 12, 13):
        table.publish(adapter(version, name="coder"))
    assert [(card.name, card.version) for card in table.cards()] == [
        ("coder", 13),
        ("coder", 12),
        ("poet", 3),
        ("poet", 2),
    ]


@pytest.mark.parametrize("name", ["", "base", "latest", "poet@1", "3"])
def test_a_policy_cannot_have_a_name_that_means_something_else(name: str) -> None:
    with pytest.raises(AdapterError, match="cannot be a name here"):
        AdapterTable(policies=(name,))


def test_the_base_can_be_acquired_and_released_like_an_adapter() -> None:
    table = AdapterTable()
    table.acquire(None)
    table.release(None)
    assert table.cards() == ()


def test_other_threads_see_only_whole_states_while_versions_are_published() -> None:
    table = table_of(1, keep=2)
    stop = threading.Event()
    seen: list[int] = []

    def read() -> None:
        while not stop.is_set():
            seen.append(version_of(table, "policy"))
            assert len(table.cards()) <= 2

    reader = threading.Thread(target=read)
    reader.start()
    shared = arrays()
    for version in range(2, 1001):
        table.publish(make_adapter(shared, version=version, rank=2, alpha=4))
    while seen[-1:] != [1000] and reader.is_alive():
        time.sleep(0.001)
    stop.set()
    reader.join()
    assert seen == sorted(seen)


def test_an_unloaded_version_finishes_what_runs_on_it_and_is_gone_then() -> None:
    table = AdapterTable()
    for version in (1, 2):
        table.publish(adapter(version, name="poet"))
    table.set_alias("good", 2, name="poet")
    running = table.resolve("poet")
    table.acquire(running)
    table.unload("poet")
    for model in ("poet", "poet@1", "poet@good", "poet@latest"):
        with pytest.raises(UnknownModel):
            table.resolve(model)
    with pytest.raises(UnknownModel, match="poet@2 was unloaded"):
        table.resolve("poet@2")
    assert table.cards() == ()
    table.acquire(running)  # another completion of the same request
    table.release(running)
    table.release(running)
    with pytest.raises(UnknownModel, match="poet@2 was dropped"):
        table.acquire(running)
    with pytest.raises(UnknownModel, match="poet is not loaded"):
        table.unload("poet")


def test_a_name_that_comes_back_gets_versions_that_it_never_had() -> None:
    table = AdapterTable()
    table.publish(adapter(table.next_version("poet"), name="poet"))
    table.unload("poet")
    with pytest.raises(AdapterError, match="publish version 2 or above"):
        table.publish(adapter(1, name="poet"))
    table.publish(adapter(table.next_version("poet"), name="poet"))
    assert version_of(table, "poet") == 2


def test_one_version_is_unloaded_and_the_others_stay() -> None:
    table = table_of(1, 2, 3)
    table.unload("policy", 2)
    assert [card.version for card in table.cards()] == [3, 1]
    with pytest.raises(AdapterError, match="policy means policy@3; promote another version first"):
        table.unload("policy", 3)
    table.promote(1)
    table.unload("policy", 3)
    assert [version_of(table, model) for model in ("policy", "latest")] == [1, 1]
    table.unload("policy")
    assert table.resolve("policy") is None


def test_rolling_back_serves_the_next_older_version_and_at_last_the_base() -> None:
    table = table_of(1, 2, 5)
    assert [table.roll_back() for _ in range(3)] == [2, 1, 0]
    assert table.resolve("policy") is None
    with pytest.raises(UnknownModel, match="policy has no version to go back from"):
        table.roll_back()
    table.publish(adapter(4, name="poet"))
    with pytest.raises(UnknownModel, match="poet@4 is the oldest version of poet"):
        table.roll_back(name="poet")


def test_held_versions_stay_in_memory_until_others_are_held() -> None:
    table = table_of(1, 2, keep=1)
    table.hold(["policy@2", "base", "policy@0"])
    table.publish(adapter(3))
    table.publish(adapter(4))
    assert [card.version for card in table.cards()] == [4, 2]
    table.hold([])
    assert [card.version for card in table.cards()] == [4]


def test_a_removed_alias_is_unknown() -> None:
    table = table_of(1)
    table.set_alias("best", 1)
    table.remove_alias("best")
    with pytest.raises(UnknownModel):
        table.resolve("best")
    with pytest.raises(UnknownModel, match="no alias 'best'"):
        table.remove_alias("best")


def test_changes_of_what_a_name_means_are_counted() -> None:
    table = table_of(1, 2)
    table.publish(adapter(3), serve=False)
    table.promote(1)
    table.promote(1)
    table.roll_back()
    assert table.num_swaps() == {"policy": 4}
