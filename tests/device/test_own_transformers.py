"""PyTorch is not imported for tokenizers; where it is not installed, a package of its name stands in for it."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
from parallm.device.load_mlx import load_mlx
load_mlx(hides_torch={hides})
from parallm.model.chat.tokenizer import ChatTokenizer
from parallm.model.load import NANO, _load_tokenizer
tokenizer = _load_tokenizer(NANO, {{}}, trusted=False)
assert tokenizer.decode(tokenizer.encode("3 + 4")) == "3 + 4"
print("torch" in sys.modules, "transformers" in sys.modules)
from transformers.utils import is_torch_available
print(is_torch_available())
"""
TORCH = """
__version__ = "2.11.0"
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})
"""


@pytest.fixture
def torch(tmp_path: Path) -> Path:
    """A folder with a package that looks like PyTorch to transformers."""
    for name, text in {
        "torch/__init__.py": TORCH,
        "torch-2.11.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: torch\nVersion: 2.11.0\n",
        "torch-2.11.0.dist-info/top_level.txt": "torch\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def lines_of(hides: bool, folder: Path) -> list[str]:
    script = f"import sys; sys.path.insert(0, {str(folder)!r})\n{SCRIPT.format(hides=hides)}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    return done.stdout.split("\n")[:-1] or [done.stderr]


def test_a_tokenizer_imports_no_pytorch_and_others_get_the_whole_of_transformers(torch: Path) -> None:
    assert lines_of(True, torch) == ["False False", "True"]


def test_without_it_transformers_would_import_pytorch(torch: Path) -> None:
    lines = lines_of(False, torch)
    assert lines != ["False False", "True"]
    assert lines[0].startswith("True") or "torch" in lines[0]
