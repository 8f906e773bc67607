"""The Python examples of the documents run as they stand, with the small embedded model."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = ("README.md", "parallm/library/README.md")
MODEL = "Qwen/Qwen2.5-0.5B-Instruct"


def examples(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_the_python_examples_of_a_document_run_in_their_order(name: str, tmp_path: Path) -> None:
    blocks = examples((ROOT / name).read_text())
    assert blocks, "an example was moved elsewhere"
    program = tmp_path / "example.py"
    program.write_text("\n\n".join(blocks).replace(MODEL, "nano"))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "error", str(program)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
