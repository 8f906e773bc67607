import json
import subprocess
import sys

SCRIPT = """
import json, resource
resource.setrlimit(resource.RLIMIT_NOFILE, (1200, 4000))
from parallm.device.load_mlx import load_mlx
load_mlx()
import mlx_lm.utils
print(json.dumps(resource.getrlimit(resource.RLIMIT_NOFILE)))
"""


def test_importing_mlx_lm_takes_no_open_files_away() -> None:
    """In a process of its own, since a hard limit never rises again."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [4000, 4000]
