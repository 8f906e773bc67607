"""Docstrings below fields."""

from dataclasses import dataclass

from pydantic import BaseModel, Field
from pydantic.json_schema import models_json_schema

from parallm.docstrings import DescribedJsonSchema, field_docstrings


@dataclass
class Place:
    row: int
    """From the
    top."""
    column: int


class Seat(BaseModel):
    place: Place
    """Where it is."""
    number: int = Field(default=0, alias="no")
    """Not the row."""
    name: str = Field(default="", description="As people say.")
    """For readers of the code."""


class Window(Seat):
    number: int = Field(default=0, alias="no")
    """Odd."""


def test_a_class_has_the_docstrings_of_its_own_fields() -> None:
    assert field_docstrings(Place) == {"row": "From the\ntop."}
    assert field_docstrings(Window) == {"number": "Odd."}

    class Inner:
        size: int
        """Of what is inside."""

    assert field_docstrings(Inner) == {"size": "Of what is inside."}


def test_a_class_without_source_has_none() -> None:
    assert field_docstrings(type("Made", (), {"__module__": "nowhere"})) == {}
    assert field_docstrings(int) == {}


def test_schemas_say_them_where_nothing_else_is_said() -> None:
    _, found = models_json_schema([(Window, "validation")], schema_generator=DescribedJsonSchema)
    window, place = (found["$defs"][name]["properties"] for name in ("Window", "Place"))
    assert {name: value.get("description") for name, value in window.items()} == {
        "place": "Where it is.",
        "no": "Odd.",
        "name": "As people say.",
    }
    assert [value.get("description") for value in place.values()] == ["From the\ntop.", None]
