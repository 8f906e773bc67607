"""Environments of other people's programs: one venv each in a cache folder, never ours."""

import subprocess
import sys
import venv
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

DEFAULT_FOLDER = Path("~/.cache/parallm/peers").expanduser()
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def peer_python(folder: Path, name: str, requirement: str) -> str:
    """The interpreter of a venv that has `requirement` and the MLX that we have; made on first use.

    Raises subprocess.CalledProcessError if pip cannot install it.
    """
    extra = "" if sys.platform == "darwin" else "[cpu]"
    mlx = [f"mlx{extra}=={metadata.version('mlx')}", f"mlx-lm=={metadata.version('mlx-lm')}"]
    return _python_with(folder / name, [[requirement, *mlx]])


def plain_python(folder: Path, name: str, requirements: Sequence[str]) -> str:
    """The interpreter of a venv that has `requirements` and nothing of ours; made on first use.

    Raises subprocess.CalledProcessError if pip cannot install them.
    """
    return _python_with(folder / name, [requirements])


def torch_python(folder: Path, name: str, torch_version: str, requirements: Sequence[str]) -> str:
    """The interpreter of a venv that has `requirements` and torch without a GPU; made on first use.

    Raises subprocess.CalledProcessError if pip cannot install it.
    """
    if sys.platform == "darwin":
        return _python_with(folder / name, [[f"torch=={torch_version}", *requirements]])
    # by its local version: PyPI's build for Linux would bring gigabytes of CUDA along
    torch = [f"torch=={torch_version}+cpu", f"--extra-index-url={TORCH_CPU_INDEX}"]
    return _python_with(folder / name, [torch, requirements])


def _python_with(place: Path, installs: Sequence[Sequence[str]]) -> str:
    """The interpreter of the venv at `place` after one `pip install` for each of `installs`."""
    python = place / "bin" / "python"
    stamp = place / "installed"
    wanted = [word for words in installs for word in words]
    if stamp.exists() and stamp.read_text().split() == wanted:
        return str(python)
    print(f"installing {' '.join(wanted)} into {place} (minutes the first time)", file=sys.stderr)
    venv.create(place, with_pip=True, clear=True)  # a half-made one of an earlier call is in the way
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for words in installs:
        subprocess.run([*pip, *words], check=True, stdout=sys.stderr)
    stamp.write_text("\n".join(wanted))
    return str(python)
