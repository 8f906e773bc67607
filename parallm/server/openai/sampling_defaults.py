"""Sampling parameters of requests that do not set them."""

from collections.abc import Mapping
from typing import TypeVar

from pydantic import BaseModel

Body = TypeVar("Body", bound=BaseModel)


def with_defaults(body: Body, defaults: Mapping[str, float]) -> Body:
    """Return the body with `defaults` for the fields that were not sent.

    A body with `collect_trajectory` stays as it is, since the policy learns from its own samples.
    """
    if getattr(body, "collect_trajectory", False):
        return body
    missing = defaults.keys() & type(body).model_fields.keys() - body.model_fields_set
    return body.model_copy(update={name: defaults[name] for name in missing}) if missing else body
