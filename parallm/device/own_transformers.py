"""A copy of transformers for our tokenizers that takes PyTorch for not installed.

Where PyTorch is installed, transformers imports it with the first tokenizer, and with it scikit-learn and sympy: 10 s
on the machine of an H200. Tokenizers need none of it. Code of users may, in an environment of their own: so `import
transformers` finds the copy only inside of `own_transformers`, and elsewhere the whole package.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType

PACKAGE, HIDDEN = "transformers", "torch"

_own: dict[str, ModuleType] = {}


def is_worthwhile() -> bool:
    """Whether a package to hide is installed, and this process has imported neither it nor transformers yet."""
    return PACKAGE not in sys.modules and HIDDEN not in sys.modules and find_spec(HIDDEN) is not None


@contextmanager
def hidden_torch() -> Iterator[None]:
    """Make the copy of what the block imports. No other thread may import PyTorch meanwhile."""
    sys.modules[HIDDEN] = None  # type: ignore[assignment]  # the import system's mark of what is not there
    try:
        yield
    finally:
        del sys.modules[HIDDEN]
        _own.update(_taken())


@contextmanager
def own_transformers() -> Iterator[None]:
    """Let the block import from the copy, if there is one."""
    if not _own:
        yield
        return
    theirs = _taken()
    sys.modules.update(_own)
    try:
        yield
    finally:
        _own.update(_taken())
        sys.modules.update(theirs)


def _taken() -> dict[str, ModuleType]:
    """The modules of the package, which are no longer imported."""
    names = [name for name in sys.modules if name.partition(".")[0] == PACKAGE]
    return {name: sys.modules.pop(name) for name in names}
