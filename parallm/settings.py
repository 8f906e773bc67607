"""The decorator for every settings class: a strict, frozen, keyword-only dataclass checked by pydantic."""

from typing import TypeVar, cast, dataclass_transform

import pydantic
from pydantic import ConfigDict

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def settings(cls: type[T]) -> type[T]:
    """Make `cls` a frozen dataclass that refuses unknown keys and wrong types with a `pydantic.ValidationError`.

    `--help` describes a field by the docstring below it, which pydantic does not read.
    """
    config = ConfigDict(extra="forbid", allow_inf_nan=False)
    return cast(type[T], pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=config)(cls))
