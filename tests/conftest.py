"""What all tests share: a BLAS that is loaded before MLX, and small models with random weights in real folders."""

import asyncio
import gc
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
import uvicorn.server

from parallm.device.blas import load_blas, set_blas_threads
from parallm.device.settings import DeviceSettings

os.environ["PARALLM_CONFIG"] = "off"  # no test reads the user's configuration file
BLAS = load_blas(DeviceSettings())
CPU = Path("/proc/cpuinfo")
IS_INTEL = CPU.exists() and "GenuineIntel" in CPU.read_text()
"""Only there MKL computes products of one to three rows alike in any company."""
set_blas_threads(BLAS, 1)  # what the streams do, too: several threads on few, busy cores wait for each other

from mlx_lm.convert import convert  # noqa: E402  # only now: MLX takes the BLAS that is there when it loads

from parallm.device.streams import DeviceStreams  # noqa: E402
from parallm.device.thread import run_until_it_waits  # noqa: E402
from parallm.model.kernels.cuda import on_cuda  # noqa: E402
from parallm.model.load import load_shared_model  # noqa: E402
from parallm.model.settings import LoraSettings, ModelSettings  # noqa: E402
from parallm.model.shared_model import SharedModel  # noqa: E402
from parallm.run import runtime  # noqa: E402
from parallm.server.app import forget_applications  # noqa: E402
from tests.tiny_models import write_model  # noqa: E402


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cpu") is not None and on_cuda():
        pytest.skip("states a fact of a CPU")


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # of modules and tests, a million objects, which every full collection would look at


@pytest.fixture(scope="session", autouse=True)
def _heap_stays_frozen() -> Iterator[None]:
    """A run would look at the whole heap as it begins and thaw it at its end: most of the time of a run of 3 steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "frozen_heap", nullcontext)
        yield


@pytest.fixture(scope="session", autouse=True)
def _this_thread_is_scheduled_as_a_device_thread() -> Iterator[None]:
    """A third of the CPU time of tests that compute in it. Event loops and programs that they start are scheduled as
    those of users."""
    usual = get_policy()

    def as_usual(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            before = get_policy()
            set_policy(usual)
            try:
                return function(*arguments, **options)
            finally:
                set_policy(before)

        return call

    run_until_it_waits()
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((asyncio.Runner, "run"), (subprocess.Popen, "_execute_child")):
            patch.setattr(owner, name, as_usual(getattr(owner, name)))
        yield
    set_policy(usual)


def get_policy() -> int | None:
    """By which the system schedules this thread; None where Python does not know it."""
    return os.sched_getscheduler(0) if hasattr(os, "sched_getscheduler") else None


def set_policy(policy: int | None) -> None:
    if policy is not None and policy != os.sched_getscheduler(0):
        os.sched_setscheduler(0, policy, os.sched_param(0))


class _QuickLooks(ModuleType):
    """asyncio for uvicorn, which looks every 0.1 s whether it is to end and whether its connections have ended."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    @staticmethod
    async def sleep(seconds: float) -> None:
        await asyncio.sleep(seconds / 5)


@pytest.fixture(scope="session", autouse=True)
def _servers_end_soon() -> Iterator[None]:
    """Hundreds of tests start a server, and most of the time of many was its end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uvicorn.server, "asyncio", _QuickLooks("asyncio"))
        yield


@pytest.fixture(scope="session", autouse=True)
def _certificates_are_read_once() -> Iterator[None]:
    """Each client of HTTP reads all certificates of the world, for servers without any. Clients with settings for TLS
    read their own."""
    usual, make = httpx.create_ssl_context(), httpx.create_ssl_context

    def shared(*arguments: Any, **options: Any) -> Any:
        given = {**dict(zip(("verify", "cert"), arguments, strict=False)), **options}
        is_usual = given.get("verify", True) is True and given.get("cert") is None
        return usual if is_usual else make(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("httpx._transports.default.create_ssl_context", shared)
        yield


@pytest.fixture(autouse=True)
def _applications_are_garbage() -> Iterator[None]:
    yield
    forget_applications()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a small model of an architecture that mlx-lm knows, with random weights and the nano tokenizer."""

    @cache
    def make(architecture: str) -> Path:
        folder = tmp_path_factory.mktemp(architecture)
        write_model(folder, architecture)
        return folder

    return make


@pytest.fixture(scope="session")
def load_tiny(tiny_model: Callable[[str], Path]) -> Callable[..., SharedModel]:
    """`tiny_model` as the engine gets it, loaded once: `load_tiny("llama", rank=4, targets="experts")`."""

    @cache
    def load(architecture: str, rank: int = 4, targets: str | tuple[str, ...] | None = None) -> SharedModel:
        lora = LoraSettings(rank=rank, targets=targets)
        return load_shared_model(ModelSettings(path=str(tiny_model(architecture)), lora=lora))

    return load


@pytest.fixture(scope="session")
def tiny_quantized(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Folder of a small model as `mlx_lm.convert -q` makes it: `tiny_quantized("llama", bits=4)`."""

    @cache
    def make(architecture: str, *, bits: int, mode: str = "affine") -> Path:
        folder = tmp_path_factory.mktemp(f"{architecture}-{mode}-{bits}") / "model"
        source = str(tiny_model(architecture))
        convert(source, str(folder), quantize=True, q_bits=bits, q_group_size=32, q_mode=mode)
        return folder

    return make


@pytest.fixture(scope="session")
def nano() -> SharedModel:
    """The embedded model as the engine gets it."""
    return load_shared_model(ModelSettings())


@pytest.fixture(scope="session")
def streams() -> DeviceStreams:
    """The streams of the thread that runs the tests."""
    return DeviceStreams(partial(set_blas_threads, BLAS))
