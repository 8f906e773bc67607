"""The client alone: built without network, installed where neither MLX nor parallm is, and talking to a server."""

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

import parallm

ROOT = Path(__file__).parent.parent.parent
OF_HTTPX = ("httpx", "httpcore", "h11", "anyio", "idna", "certifi", "sniffio", "typing_extensions.py")
PROGRAM = """
import asyncio, importlib.util, sys
from parallm_client import ApiError, AsyncClient, Client

assert [name for name in ("mlx", "parallm", "pydantic", "numpy") if importlib.util.find_spec(name)] == []


async def main(url):
    async with AsyncClient(url) as client:
        return await client.generate(prompt="1 + 1 =", policy_version=1, step_id=100, max_tokens=3)


with Client(sys.argv[1]) as client:
    one = client.generate("1 + 1 =", max_tokens=3)
    two = asyncio.run(main(sys.argv[1]))
    assert (len(one.logprobs), two.policy_version, two.step_id) == (len(one.completion_ids), 1, 100)
    assert client.training_status().state == "serving"
    try:
        client.load_adapter("nowhere", name="poet")
    except ApiError as error:
        print(error.status, sys.modules["parallm_client"].__file__)
"""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the wheel of the client, httpx, and nothing else."""
    folder = tmp_path_factory.mktemp("client")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "--wheel-dir", str(folder), str(ROOT / "parallm" / "client")], check=True)
    (wheel,) = folder.glob("parallm_client-*.whl")
    assert parallm.__version__ in wheel.name
    venv.create(folder / "venv", with_pip=False)
    python = folder / "venv" / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*install, str(wheel)], check=True)
    (packages,) = (folder / "venv" / "lib").glob("python*/site-packages")
    for name in OF_HTTPX:
        source = Path(sysconfig.get_path("purelib")) / name
        if source.exists():
            (packages / name).symlink_to(source)
    return python


def test_the_wheel_of_the_client_talks_to_a_server_where_mlx_is_missing(alone: Path, tmp_path: Path) -> None:
    with parallm.load() as model, model.serve(port=0) as server:
        command = [str(alone), "-I", "-c", PROGRAM, server.url]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    status, place = done.stdout.split()
    assert status == "400"
    assert place.startswith(str(alone.parent.parent))


def test_the_wheel_has_everything_that_the_client_has(alone: Path) -> None:
    script = "import parallm_client as it; print(*it.__all__, *sorted(n for n in dir(it.Client) if n[0] != '_'))"
    found = subprocess.run([str(alone), "-I", "-c", script], capture_output=True, text=True, check=True).stdout.split()
    from parallm import client  # noqa: PLC0415

    assert found == [*client.__all__, *sorted(name for name in dir(client.Client) if not name.startswith("_"))]
