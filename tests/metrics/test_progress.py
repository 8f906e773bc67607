"""Progress is told seldom, and not where nothing is left."""

from parallm.metrics.eta import ThrottledProgress


def test_progress_is_told_every_ten_seconds() -> None:
    now = 100.0
    seldom = ThrottledProgress(lambda: now)
    assert seldom.text(1, 512) == ""
    now = 109.0
    assert seldom.text(60, 512) == ""
    now = 110.5
    assert seldom.text(70, 512) == "70 of 512"
    assert seldom.text(71, 512) == ""
    now = 121.0
    assert seldom.text(512, 512) == ""


def test_other_work_begins_anew() -> None:
    now = 0.0
    seldom = ThrottledProgress(lambda: now)
    seldom.text(5, 8)
    now = 60.0
    assert seldom.text(1, 8) == ""
    now = 71.0
    assert seldom.text(2, 8) == "2 of 8"
