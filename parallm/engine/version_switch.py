"""Sequences that switch versions in flight, to the one that their name means now."""

from collections.abc import Callable
from collections.abc import Sequence as Ordered

from parallm.engine.sequence import Sequence
from parallm.model.adapter_table import AdapterTable


def switch_versions(switching: Ordered[Sequence], adapters: AdapterTable, read: Callable[[], None]) -> None:
    """Move rows, and prompts not yet begun, to the newest version. `read` waits for the tokens in flight, which are of
    the versions before.

    A row keeps its keys and values, which the versions before have made.
    """
    newest = {name: adapters.resolve(name) for name in {one.request.model for one in switching}}
    moving = [one for one in switching if one.adapter is not newest[one.request.model]]
    if moving:
        read()
    for one in moving:
        if not one.has_left:
            adapter = newest[one.request.model]
            adapters.acquire(adapter)
            adapters.release(one.adapter)
            one.adapter = adapter
