"""Reads the docstrings below the fields of a class from its source, when help or OpenAPI shows them.

pydantic can read them as it makes a class (`use_attribute_docstrings`); every command would wait for that as it starts.
"""

import ast
import inspect
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core.core_schema import DataclassSchema, ModelSchema

Docstrings = Mapping[str, str]


def field_docstrings(cls: type) -> Docstrings:
    """Return the docstrings by the names of the fields that `cls` itself defines; none where it has no source."""
    return _of_module(cls.__module__).get(cls.__qualname__, {})


class DescribedJsonSchema(GenerateJsonSchema):
    """Describes fields of models and dataclasses by their docstrings."""

    def model_schema(self, schema: ModelSchema) -> JsonSchemaValue:
        return _described(super().model_schema(schema), schema["cls"])

    def dataclass_schema(self, schema: DataclassSchema) -> JsonSchemaValue:
        return _described(super().dataclass_schema(schema), schema["cls"])


def _described(json_schema: JsonSchemaValue, cls: type) -> JsonSchemaValue:
    """Describe the properties that no `Field(description=...)` describes, and return the schema."""
    properties, fields = json_schema.get("properties", {}), getattr(cls, "__pydantic_fields__", {})
    for base in cls.__mro__:
        for name, text in field_docstrings(base).items():
            key = fields[name].alias if name not in properties and name in fields else name
            if key in properties:
                properties[key].setdefault("description", text)
    return json_schema


@cache
def _of_module(name: str) -> Mapping[str, Docstrings]:
    try:
        tree = ast.parse(inspect.getsource(sys.modules[name]))
    except (KeyError, OSError, TypeError, SyntaxError):
        return {}
    return dict(_of_classes(tree, ""))


def _of_classes(tree: ast.AST, above: str) -> Iterator[tuple[str, Docstrings]]:
    """Yield qualified names of classes with the docstrings of their fields."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield f"{above}{node.name}", dict(_of_fields(node.body))
            yield from _of_classes(node, f"{above}{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _of_classes(node, f"{above}{node.name}.<locals>.")
        else:
            yield from _of_classes(node, above)


def _of_fields(body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    for field, below in pairwise(body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
            and isinstance(below.value.value, str)
        ):
            yield field.target.id, inspect.cleandoc(below.value.value)
