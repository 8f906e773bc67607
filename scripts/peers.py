"""Environments of other people's programs: one venv each in a cache folder, never ours."""

import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path

DEFAULT_FOLDER = Path("~/.cache/parallm/peers").expanduser()


def peer_python(folder: Path, name: str, requirement: str) -> str:
    """The interpreter of a venv that has `requirement` and the MLX that we have; made on first use.

    Raises subprocess.CalledProcessError if pip cannot install it.
    """
    place = folder / name
    python = place / "bin" / "python"
    extra = "" if sys.platform == "darwin" else "[cpu]"
    wanted = [requirement, f"mlx{extra}=={metadata.version('mlx')}", f"mlx-lm=={metadata.version('mlx-lm')}"]
    stamp = place / "installed"
    if stamp.exists() and stamp.read_text().split() == wanted:
        return str(python)
    print(f"installing {requirement} into {place} (minutes the first time)", file=sys.stderr)
    venv.create(place, with_pip=True, clear=True)  # a half-made one of an earlier call is in the way
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *wanted], check=True, stdout=sys.stderr)
    stamp.write_text("\n".join(wanted))
    return str(python)
