"""The table of transformers' modules, made in less time."""

import importlib.util
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import transformers

from parallm.device.module_table import FIND_NAMES, MODULE, READ_FOLDER, quick_module_table

MODELS = Path(transformers.__file__).parent / "models"
Table = Mapping[frozenset[str], Mapping[str, Iterable[str]]]


def loaded_anew() -> ModuleType:
    """`MODULE` as an import would find it now."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, MODULE)  # otherwise nothing is looked for
        spec = importlib.util.find_spec(MODULE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tables(module: ModuleType) -> tuple[Table, Table]:
    """Of the package and of its models, in the order in which an import makes them."""
    return module.define_import_structure(MODELS, prefix="models"), module.define_import_structure(
        str(MODELS / "__init__.py")
    )


def test_the_table_is_the_one_that_transformers_makes() -> None:
    with quick_module_table():
        quick = loaded_anew()
    assert getattr(quick, READ_FOLDER).cache_info().maxsize is None
    whole, own = tables(quick)
    assert (whole, own) == tables(loaded_anew())
    assert "LlamaConfig" in own[frozenset()]["llama.configuration_llama"]


def test_outside_of_the_block_nothing_changes() -> None:
    with quick_module_table():
        pass
    assert not [finder for finder in sys.meta_path if "module_table" in type(finder).__module__]
    assert getattr(loaded_anew(), READ_FOLDER).cache_info().maxsize == 128


@pytest.mark.parametrize("missing", [READ_FOLDER, FIND_NAMES])
def test_a_version_without_one_of_the_functions_stays_as_it_is(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find: Any = importlib.util.find_spec(MODULE)
    run = type(find.loader).exec_module

    def run_without(loader: Any, module: ModuleType) -> None:
        run(loader, module)
        delattr(module, missing)

    monkeypatch.setattr(type(find.loader), "exec_module", run_without)
    with quick_module_table():
        module = loaded_anew()
    assert not hasattr(module, missing)
    other = {READ_FOLDER, FIND_NAMES} - {missing}
    assert [getattr(module, name).__module__ for name in other] == [MODULE]
