"""The model and adapter that a user names, checked before anything slow is done."""

import dataclasses

from parallm.checkpoint.chosen_adapter import find_adapter
from parallm.model.load import check_local
from parallm.model.settings import ModelSettings


def find_given(settings: ModelSettings) -> ModelSettings:
    """`settings` with the adapter's own folder in place of the run, version or checkpoint that names it.

    Downloads nothing. Raises ModelError for a model folder that is not there or not whole, AdapterError.
    """
    check_local(settings.path)
    if settings.adapter is None:
        return settings
    return dataclasses.replace(settings, adapter=str(find_adapter(settings.adapter)))
