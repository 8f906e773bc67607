"""One row of documents.py."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

Example = Mapping[str, Any]
FORM = "multipart/form-data"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """Of the query, where a route reads it by hand."""

    name: str
    description: str
    choices: tuple[str, ...] = ()
    """None: any text."""
    default: str | None = None
    is_required: bool = False

    def shown(self) -> dict[str, Any]:
        """As OpenAPI has it."""
        schema: dict[str, Any] = {"type": "string"}
        schema |= {"enum": list(self.choices)} if self.choices else {}
        schema |= {} if self.default is None else {"default": self.default}
        return {
            "name": self.name,
            "in": "query",
            "required": self.is_required,
            "description": self.description,
            "schema": schema,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """Of one route. Its description is the docstring of its function; its errors follow from its role."""

    query: tuple[Parameter, ...] = ()
    bodies: tuple[type[BaseModel], ...] = ()
    """What it reads, one of them; none: no body."""
    body_type: str = "application/json"
    """Type of the body. A file, or a form (`FORM`) with one, has no `bodies`."""
    example: Example | None = None
    """A body that works."""
    answers: tuple[type[BaseModel], ...] = ()
    """None: an object without a fixed form."""
    others: Mapping[str, Example] = field(default_factory=dict)
    """More bodies that work, by what they show."""
    answer: Example = field(default_factory=dict)
    """An example of an answer."""
    media_type: str = "application/json"
    errors: tuple[int, ...] = ()
    """Beside those that follow from its role and its bodies."""
    events: str = "events `data: JSON`, the last one `data: [DONE]`"
    """What a stream is, for a body that can ask for one."""
    is_stored: bool = False
    """Whether what it changes outlives the process, as what admins change does."""


def usage(num_prompt: int, num_answered: int) -> Mapping[str, object]:
    """What an answer's `usage` looks like."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_answered,
        "total_tokens": num_prompt + num_answered,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
