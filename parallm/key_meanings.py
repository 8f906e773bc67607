"""Type, default and meaning of each key of a command, from the settings classes. Pure."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import TypeAdapter
from pydantic.dataclasses import is_pydantic_dataclass
from pydantic.fields import FieldInfo

WORDS = {int: "integer", float: "number", str: "text", bool: "true | false", type(None): "null", Any: "any value"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key that holds a value."""

    name: str
    """Dotted name; NAME stands for a name that users choose, [] for an entry of a list."""
    choice: str = ""
    """Name of the environment, for a key of an environment."""
    kind: str
    """Type, such as `integer, 1 or more`."""
    default: str | None
    """Default as on the command line; None for a key that must be given."""
    meaning: str


def keys_of(settings: type, above: str = "", choice: str = "") -> Iterator[Key]:
    """Yield every key of a settings class and of those inside of it, in the order of their definition."""
    for name, field in fields_of(settings).items():
        path = f"{above}.{name}" if above else name
        yield from _keys_of_field(field, path, choice, meaning_of(settings, name))


def fields_of(settings: type) -> Mapping[str, FieldInfo]:
    fields: Mapping[str, FieldInfo] = getattr(settings, "__pydantic_fields__")  # noqa: B009  (mypy cannot know it)
    return fields


def meaning_of(settings: type, name: str) -> str:
    """Return the docstring below a field, or below the field that it inherits from, in one line."""
    bases = (fields_of(base) for base in settings.__mro__ if hasattr(base, "__pydantic_fields__"))
    described = (fields[name].description for fields in bases if name in fields)
    return " ".join(next(filter(None, described), "").split())


def _keys_of_field(field: FieldInfo, path: str, choice: str, meaning: str) -> Iterator[Key]:
    inside = _settings_in(field.annotation)
    if get_origin(field.annotation) is Literal and len(get_args(field.annotation)) == 1:
        return  # the name of an environment, which is chosen as a whole
    if len(inside) > 1 and "." not in path:
        for name, settings in inside.items():
            yield from keys_of(settings, path, name)
    elif is_pydantic_dataclass(field.annotation):  # type: ignore[arg-type]  # any object may be asked
        yield from keys_of(next(iter(inside.values())), path, choice)
    else:
        kind = kind_of(field.annotation, field.metadata)
        yield Key(name=path, choice=choice, kind=kind, default=_default(field), meaning=meaning)
        if len(inside) == 1:
            place = ".NAME" if get_origin(field.annotation) is dict else "[]"
            yield from keys_of(next(iter(inside.values())), path + place, choice)


def _settings_in(annotation: Any) -> dict[str, type]:
    """Return the settings classes that a type allows or holds, by the name that chooses one of several."""
    if is_pydantic_dataclass(annotation):
        name = fields_of(annotation).get("name")
        values = get_args(name.annotation) if name is not None and get_origin(name.annotation) is Literal else ("",)
        return {str(values[0]): annotation}
    return {name: kind for part in get_args(annotation) for name, kind in _settings_in(part).items()}


def kind_of(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """Describe the values of a type in words."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return kind_of(arguments[0], [part for one in arguments[1:] for part in getattr(one, "metadata", [one])])
    if is_pydantic_dataclass(annotation):
        return f"{{{', '.join(fields_of(annotation))}}}"
    if origin is Literal:
        return " | ".join(map(str, arguments))
    if origin in (Union, UnionType):
        if len(_settings_in(annotation)) > 1:
            return "the keys of an environment, and its name"
        kinds = [kind_of(part, metadata if part is not type(None) else ()) for part in arguments]
        return " | ".join(dict.fromkeys(kinds))
    if origin is tuple:
        parts = [kind_of(part) for part in arguments if part is not Ellipsis]
        return f"list of {parts[0]}" if Ellipsis in arguments else f"[{', '.join(parts)}]"
    if origin is dict:
        inside = kind_of(arguments[1])
        return "mapping" if inside.startswith(("mapping", "any")) else f"mapping of names to {inside}"
    return ", ".join(filter(None, [WORDS[annotation], _bounds(metadata)]))


def _bounds(metadata: Sequence[Any]) -> str:
    limits = {name: getattr(one, name) for one in metadata for name in ("ge", "gt", "le", "lt") if hasattr(one, name)}
    words = {"ge": "{} or more", "gt": "above {}", "le": "at most {}", "lt": "below {}"}
    if limits.keys() == {"ge", "le"}:
        return f"{limits['ge']} to {limits['le']}"
    return ", ".join(words[name].format(limit) for name, limit in limits.items())


def _default(field: FieldInfo) -> str | None:
    if field.is_required():
        return None
    value = TypeAdapter(Any).dump_python(field.get_default(call_default_factory=True), mode="json")
    return value if isinstance(value, str) else json.dumps(value)
