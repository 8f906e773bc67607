import json
import subprocess
import sys

import pytest

SCRIPT = """
import json, resource
resource.setrlimit(resource.RLIMIT_NOFILE, {before})
from parallm.device.load_mlx import load_mlx
load_mlx()
import mlx_lm.utils
print(json.dumps(resource.getrlimit(resource.RLIMIT_NOFILE)))
"""


@pytest.mark.parametrize(
    ("before", "after"),
    [((4096, 4096), [4096, 4096]), ((1200, 4000), [4000, 4000])],
    ids=["a limit that mlx_lm would lower stays", "the soft limit is raised to the hard one"],
)
def test_importing_mlx_lm_takes_no_open_files_away(before: tuple[int, int], after: list[int]) -> None:
    """In a process of its own, since a hard limit never rises again."""
    script = SCRIPT.format(before=before)
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert json.loads(told.stdout) == after
