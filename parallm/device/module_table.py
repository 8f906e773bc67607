"""Makes the import of transformers shorter: it takes most of its time for a table of its modules.

The table comes from the text of all of its files. transformers 5 reads them twice, because its cache holds fewer
folders than there are, and splits each text into lines to find the last one that begins with `__all__`.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

MODULE = "transformers.utils.import_utils"
READ_FOLDER, FIND_NAMES = "create_import_structure_from_path", "fetch__all__"


@contextmanager
def quick_module_table() -> Iterator[None]:
    """Let the block import transformers in less time and with the same table. Other imports, also those of other
    threads, are as ever, and so is a version of transformers without the functions that this replaces."""
    finder = _Finder()
    sys.meta_path = [finder, *sys.meta_path]  # a new list: another thread may be in the middle of the old one
    try:
        yield
    finally:
        sys.meta_path = [one for one in sys.meta_path if one is not finder]


class _Finder(MetaPathFinder):
    """Finds `MODULE` alone, as the usual finder does, and improves it once it has run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != MODULE:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_improve(module: ModuleType) -> None:
                run(module)
                _improve(module)

            spec.loader.exec_module = run_and_improve  # type: ignore[method-assign]  # of this module's loader alone
        return spec


def _improve(module: ModuleType) -> None:
    """Replace both functions, where the module has both."""
    read_folder = getattr(getattr(module, READ_FOLDER, None), "__wrapped__", None)
    find_names = getattr(module, FIND_NAMES, None)
    if read_folder is not None and find_names is not None:
        setattr(module, READ_FOLDER, cache(read_folder))
        setattr(module, FIND_NAMES, _from_the_last_line(find_names))


def _from_the_last_line(find_names: Callable[[str], list[str]]) -> Callable[[str], list[str]]:
    """Give `find_names` only what follows the last line that begins with `__all__`, to which it goes anyway."""

    def find(text: str) -> list[str]:
        return find_names(text[text.rfind("\n__all__") + 1 :])

    return find
