import threading
import time
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

from parallm.device import usage
from parallm.device.governor import Governor
from parallm.device.usage import DeviceReport, UsageMonitor, accelerator_usage, machine_seconds


def test_the_monitor_tells_the_share_of_the_time_that_was_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "INTERVAL_SECONDS", 0.001)
    clock, process, machine = count(0, 10), count(0, 2), count(0, 12)  # at each look
    monkeypatch.setattr(usage, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(usage, "process_seconds", lambda: next(process))
    monkeypatch.setattr(usage, "machine_seconds", lambda: next(machine))
    monkeypatch.setattr(usage, "accelerator_usage", lambda: lambda: 0.5)
    monitor = UsageMonitor()
    assert monitor.usage == {}
    monitor.start()
    while not monitor.usage:
        time.sleep(0.001)
    monitor.stop()
    assert monitor.usage == {"process": 0.2, "machine": 1.0, "accelerator": 0.5}
    assert "usage" not in {thread.name for thread in threading.enumerate()}


def test_seconds_of_the_machine_are_those_of_its_cores_without_idle_ones(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 20 30 4000 50 6 7 8 900 1000\ncpu0 1 1\n")
    monkeypatch.setattr(usage, "KERNEL_TICKS", stat)
    monkeypatch.setattr("os.sysconf", lambda _: 10)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert machine_seconds() == (100 + 20 + 30 + 6 + 7 + 8) / 10 / 2
    monkeypatch.setattr(usage, "KERNEL_TICKS", tmp_path / "nothing")
    assert machine_seconds() is None


def test_what_the_system_does_not_tell_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "machine_seconds", lambda: None)
    monkeypatch.setattr(usage, "NVML", "no-such-library.so")
    assert set(UsageMonitor()._clocks) == {"process"}
    assert accelerator_usage()() is None


def test_shares_are_those_of_the_governor_and_change_one_by_one() -> None:
    governor = Governor(serving_share=0.7, engine_share=0.5)
    report = DeviceReport(governor, UsageMonitor())
    report.set_shares(serving_share=None, engine_share=0.25, serving_latency_target=None)
    assert report.shares() == {"serving_share": 0.7, "engine_share": 0.25}
    report.set_shares(serving_share=1.0, engine_share=None, serving_latency_target=1.5)
    assert (governor.serving_share, governor.engine_share, governor.serving_latency_target) == (1.0, 0.25, 1.5)
    assert report.shares() == {"serving_share": 1.0, "engine_share": 0.25, "serving_latency_target": 1.5}
    report.set_shares(serving_share=None, engine_share=None, serving_latency_target=0.0)
    assert governor.serving_latency_target is None
    assert set(report.memory()) == {"active", "peak", "cache"}
    assert set(report.seconds()) == {"serving", "rollout", "encoding", "loading", "learning"}
