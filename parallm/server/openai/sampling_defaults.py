"""Sampling parameters that a client leaves to the server."""

from collections.abc import Mapping
from typing import TypeVar

from pydantic import BaseModel

Body = TypeVar("Body", bound=BaseModel)


def with_defaults(body: Body, defaults: Mapping[str, float]) -> Body:
    """The body with `defaults` for the fields that were not sent.

    Completions that a policy learns from are samples of the policy as it is, so they get none.
    """
    if getattr(body, "collect_trajectory", False):
        return body
    missing = defaults.keys() & type(body).model_fields.keys() - body.model_fields_set
    return body.model_copy(update={name: defaults[name] for name in missing}) if missing else body
