"""What MLX's CUDA build finds in its environment."""

import os
import sys
from pathlib import Path

import pytest

from parallm.device import blas
from parallm.device.settings import DeviceSettings


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with MLX's CUDA build."""
    monkeypatch.setattr(os, "environ", {"XDG_CACHE_HOME": str(tmp_path)})
    monkeypatch.setattr(blas, "_has_cuda_build", lambda: True)
    monkeypatch.setattr(sys, "platform", "linux")
    return tmp_path


def load() -> blas.BlasReport:
    return blas._load.__wrapped__(DeviceSettings().blas, is_strict=True)


def test_caches_are_large_and_never_an_error(home: Path) -> None:
    assert load().name == "cuda"
    assert os.environ["MLX_ENABLE_CACHE_THRASHING_CHECK"] == "0"
    assert os.environ["MLX_CUDA_GRAPH_CACHE_SIZE"] == "2000"
    assert os.environ["MLX_CUDA_SDPA_BACKWARD_CACHE_SIZE"] == "512"
    assert os.environ["MLX_ENABLE_TF32"] == "0"


def test_what_mlx_compiles_lies_in_a_folder_of_the_user(home: Path) -> None:
    load()
    folder = Path(os.environ["MLX_PTX_CACHE_DIR"])
    assert folder.parent == home / "parallm"
    assert folder.stat().st_mode & 0o777 == 0o700


def test_other_gpus_have_another_folder(home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folders = set()
    for model in ("NVIDIA H200", "NVIDIA L4"):
        gpu = tmp_path / model / "0"
        gpu.mkdir(parents=True)
        (gpu / "information").write_text(f"Model: {model}\nIRQ: 1\n")
        monkeypatch.setattr(blas, "GPUS", tmp_path / model)
        os.environ.pop("MLX_PTX_CACHE_DIR", None)
        load()
        folders.add(os.environ["MLX_PTX_CACHE_DIR"])
    assert len(folders) == 2


def test_what_is_set_stays(home: Path) -> None:
    os.environ |= {"MLX_PTX_CACHE_DIR": "/elsewhere", "MLX_CUDA_GRAPH_CACHE_SIZE": "7"}
    load()
    assert os.environ["MLX_PTX_CACHE_DIR"] == "/elsewhere"
    assert os.environ["MLX_CUDA_GRAPH_CACHE_SIZE"] == "7"
