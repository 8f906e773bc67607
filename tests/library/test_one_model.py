"""Opening and closing: one model at a time, keys, ends of programs, and nothing that stays behind."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import httpx
import mlx.core as mx
import pytest

import parallm
from parallm.config.compose import compose
from parallm.config.schema import RunConfig, ServeConfig
from parallm.errors import ConfigError, ModelError, Unavailable

ROOT = Path(__file__).parent.parent.parent
SECONDS = 60.0
KEYS = "server.api_keys=[{name: one, role: admin, env: PARALLM_TEST_KEY}]"


def test_a_closed_model_says_so_and_leaves_no_thread_and_no_memory() -> None:
    gc.collect()
    threads, memory = set(threading.enumerate()), mx.get_active_memory()
    model = parallm.load()
    server = model.serve(port=0)
    model.chat("x", temperature=0, max_tokens=1)
    assert mx.get_active_memory() > memory + 1_000_000
    model.close()
    model.close()
    server.close()
    with pytest.raises(Unavailable, match="the model nano is closed"):
        model.chat("x")
    with pytest.raises(Unavailable, match="closed"):
        asyncio.run(model.achat("x"))
    assert set(threading.enumerate()) <= threads
    assert mx.get_active_memory() < memory + 1_000_000
    with pytest.raises(httpx.ConnectError):
        httpx.get(server.url, trust_env=False)


def test_a_model_that_was_dropped_or_could_not_be_loaded_makes_room_for_the_next(tmp_path: Path) -> None:
    dropped = parallm.load()
    first = dropped.chat("x", temperature=0, max_tokens=4)
    del dropped
    gc.collect()
    with pytest.raises(ModelError, match="nowhere"):
        parallm.load(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"engine\.max_contexts: unknown key, did you mean max_context"):
        parallm.load(overrides=["engine.max_contexts=3"])
    with pytest.raises(ConfigError, match=r"metrics\.display=lines: .*shows nothing"):
        parallm.load(overrides=["metrics.display=lines"])
    with parallm.load() as model:
        assert model.chat("x", temperature=0, max_tokens=4) == first


def test_calls_under_way_when_a_model_is_closed_end_with_an_error() -> None:
    model = parallm.load()
    errors: list[BaseException] = []
    begun = threading.Event()

    def ask() -> None:
        begun.set()
        try:
            model.generate(["1 + 1 ="], n=64, max_tokens=200, ignore_eos=True)
        except Unavailable as error:
            errors.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    begun.wait(SECONDS)
    model.close()
    asking.join(SECONDS)
    assert [str(error) for error in errors] == ["the model nano is closed; open it again"]


def test_keys_are_for_clients_and_not_for_the_program_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARALLM_TEST_KEY", "secret-secret-secret")
    with parallm.load(overrides=[KEYS]) as model, model.serve(port=0) as server:
        assert model.chat("x", temperature=0, max_tokens=1).finish_reason == "length"
        url = f"{server.url}/v1/adapters"
        assert httpx.get(url, trust_env=False).status_code == 401
        keyed = {"Authorization": "Bearer secret-secret-secret"}
        assert httpx.get(url, headers=keyed, trust_env=False).status_code == 200


def test_the_model_of_a_finalizer_is_not_kept_alive_by_its_runtime() -> None:
    with parallm.load() as model:
        seen = weakref.ref(model)
    del model
    gc.collect()
    assert seen() is None


def run_program(text: str, folder: Path) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", text],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_importing_loads_neither_mlx_nor_anything_slow() -> None:
    script = (
        "import sys, parallm; dir(parallm); slow = {'mlx.core', 'hydra', 'fastapi', 'pydantic', 'httpx'};"
        "assert not slow & set(sys.modules), slow & set(sys.modules);"
        "parallm.load; assert 'mlx.core' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_the_names_of_the_package_are_there_and_documented() -> None:
    for name in parallm.__all__:
        assert getattr(parallm, name).__doc__
    with pytest.raises(AttributeError, match=r"'parallm' has no attribute 'serv'; it has load"):
        getattr(parallm, "serv")  # noqa: B009
    stub = (ROOT / "parallm" / "__init__.pyi").read_text()
    assert [name for name in parallm.__all__ if f" {name} as {name}\n" not in stub] == []


def test_a_program_may_end_without_closing_its_model(tmp_path: Path) -> None:
    program = run_program("import parallm; m = parallm.load(); m.serve(port=0); print(m.chat('x').version)", tmp_path)
    out, err = program.communicate(timeout=SECONDS)
    assert (program.returncode, out, err) == (0, "0\n", "")


@pytest.mark.slow
def test_ctrl_c_in_a_program_is_a_keyboard_interrupt_that_closes_the_model(tmp_path: Path) -> None:
    text = "\n".join(
        (
            "import parallm",
            "with parallm.load() as model:",
            "    print('ready', flush=True)",
            "    model.generate(['x'] * 64, n=64, max_tokens=400, ignore_eos=True)",
        )
    )
    program = run_program(text, tmp_path)
    assert program.stdout is not None
    assert program.stdout.readline() == "ready\n"
    program.send_signal(signal.SIGINT)
    _, err = program.communicate(timeout=SECONDS)
    assert program.returncode == -signal.SIGINT
    assert err.splitlines()[-1] == "KeyboardInterrupt"


@pytest.mark.slow
def test_overrides_are_composed_beside_a_program_that_uses_hydra(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("own: 1\n")
    program = "\n".join(
        (
            "import hydra",
            "from hydra.core.hydra_config import HydraConfig",
            "from parallm.config.compose import compose",
            "from parallm.config.schema import ServeConfig",
            f"@hydra.main(config_path={str(tmp_path)!r}, config_name='mine', version_base='1.3')",
            "def main(config):",
            "    found = compose('serve', ServeConfig, ['engine.max_context=64']).config",
            "    assert found.engine.max_context == 64 and config.own == 1",
            "    assert HydraConfig.get().job.config_name == 'mine'",
            "main()",
        )
    )
    (tmp_path / "program.py").write_text(program)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "program.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ("trainer.steps=2", "must be a list"),
        (["-m"], "an option of the command line"),
        (["seed=1,2"], "seed"),
        (["+recipe=nope"], "recipe: 'nope' is unknown"),
        (["model.path=here"], "model.path is given twice"),
        (["trainer.steps"], "trainer.steps: a key needs a value"),
        (["trainer.steps=x"], "trainer.steps: 'x' must be a valid integer"),
    ],
)
def test_overrides_that_cannot_be_meant_are_told_as_on_the_command_line(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        compose("train", RunConfig, overrides, {"model.path": "nano"})


def test_a_path_is_taken_as_it_is_given() -> None:
    path = "/a folder/with=signs,[and] 'quotes'"
    assert compose("serve", ServeConfig, [], {"model.path": path}).config.model.path == path
