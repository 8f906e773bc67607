"""Machine and commit beside each figure."""

from parallm.metrics.machine import describe_commit, describe_machine, num_usable_cores, peak_memory_gb


def test_the_machine_names_its_cores_and_device() -> None:
    text = describe_machine("one GPU")
    assert f"{num_usable_cores()} cores" in text
    assert text.endswith(", one GPU")


def test_there_is_always_a_commit_or_a_version() -> None:
    assert describe_commit()


def test_this_process_has_used_between_ten_megabytes_and_a_terabyte() -> None:
    peak = peak_memory_gb()
    assert peak is None or 0.01 < peak < 1000
