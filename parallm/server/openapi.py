"""The OpenAPI document of `/openapi.json`.

Routes come from FastAPI, wire types and examples from `route_documents.py`, errors and keys from the roles in
`operation/auth.py`. `create_app` makes it once.
"""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from parallm import __version__
from parallm.server.operation.auth import ROLES, Role
from parallm.server.route_documents import DOCUMENTS, FORM, RouteDocument
from parallm.server.schemas import ErrorAnswer

DESCRIPTION = """A language model that is served while it learns. Fields are honoured or refused by name, never ignored.
Every error has the form of `ErrorAnswer`; `/generate` has those of the dialect that asks.

**Models.** `base`, `policy` (the version that is served), `policy@12`, `latest`, and aliases such as `best`; of another
adapter `poet`, `poet@3`, `poet@best`. `GET /v1/models` has them all. `model` in an answer is the exact version, and
`weight_versions` says which tokens came from which.

**Headers.** `x-request-id` comes back in the answer and stands in the log; `x-request-timeout` is the seconds by which
an answer must be complete, else 504; `traceparent` makes the request a part of a trace. A 429 or 503 says when to come
back in `Retry-After`.

**Roles.** The tag of a route is the role that its key needs, which is sent as `Authorization: Bearer KEY` or
`x-api-key: KEY`; each role may do what those before it may: `public`, `inference`, `training`, `admin`. Without keys
every route is open to this machine.
"""
REF = "#/components/schemas/{model}"
JSON = "application/json"

ERRORS: Mapping[int, str] = {
    400: "A field is wrong, unknown or not supported; `param` names it.",
    401: "No API key or a wrong one.",
    403: "The key's role does not allow this route, the route is switched off, or a page of another origin asks.",
    404: "No such model, version, alias or request.",
    408: "The body came too slowly.",
    409: "This process does not do that, or not any more: it trains nothing, takes no such weights, or another process "
    "keeps what operators set. "
    "In vLLM's dialect of `/generate`: the request was aborted.",
    413: "The body is larger than `server.max_body_bytes`.",
    429: "The queue is full, or too many large bodies come at once; `Retry-After` says when to try again.",
    503: "The engine has stopped, or the server is about to end.",
    504: "The answer was not complete by its deadline.",
    507: "The disk does not take it. Nothing has changed, but that a reward counts until the process ends.",
}


def openapi_document(app: FastAPI, *, has_keys: bool) -> dict[str, Any]:
    """Make the document anew. Each route must have rows in `ROLES` and `DOCUMENTS`."""
    openapi = get_openapi(title=app.title, version=__version__, description=DESCRIPTION, routes=app.routes)
    schemas = _schemas()
    for path, operations in openapi["paths"].items():
        for method, operation in operations.items():
            row = f"{method.upper()} {path}"
            _describe(operation, DOCUMENTS[row], ROLES[row], has_keys=has_keys)
    components = openapi.setdefault("components", {})
    components["schemas"] = schemas
    if has_keys:
        components["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
    return openapi


def _schemas() -> dict[str, Any]:
    bodies = {body for document in DOCUMENTS.values() for body in document.bodies}
    answers = {answer for document in DOCUMENTS.values() for answer in document.answers} | {ErrorAnswer}
    models = sorted(bodies | answers, key=lambda model: model.__name__)
    _, definitions = models_json_schema([(model, "validation") for model in models], ref_template=REF)
    schemas: dict[str, Any] = definitions["$defs"]
    for body in bodies:
        _allow_null(schemas[body.__name__])
    return schemas


def _allow_null(schema: dict[str, Any]) -> None:
    """Allow null for each optional field, as `checked` in `schemas.py` does."""
    for name, field in schema["properties"].items():
        if name not in schema.get("required", ()) and {"type": "null"} not in field.get("anyOf", ()):
            kept = {key: field[key] for key in ("title", "default", "description") if key in field}
            kind = {key: value for key, value in field.items() if key not in kept}
            schema["properties"][name] = {"anyOf": [kind, {"type": "null"}], **kept}


def _describe(operation: dict[str, Any], document: RouteDocument, role: Role, *, has_keys: bool) -> None:
    operation["tags"] = [role]
    if document.parameters:
        operation["parameters"] = [*operation.get("parameters", ()), *document.parameters]
    if document.bodies:
        content = {"schema": _any_of(document.bodies), **_examples(document)}
        operation["requestBody"] = {"required": True, "content": {JSON: content}}
    elif document.body_type != JSON:
        file = {"type": "string", "format": "binary"}
        form = {"type": "object", "required": ["file"], "properties": {"file": file, "name": {"type": "string"}}}
        content = {"schema": form if document.body_type == FORM else file}
        operation["requestBody"] = {"required": True, "content": {document.body_type: content}}
    operation["responses"] = _responses(document, role, has_keys=has_keys)
    if has_keys and role != "public":
        operation["security"] = [{"bearer": []}, {"x-api-key": []}]


def _examples(document: RouteDocument) -> dict[str, Any]:
    """Use the field for one example or the one for several."""
    if not document.more_examples:
        return {"example": document.example}
    named = {"usual": document.example, **document.more_examples}
    return {"examples": {name: {"value": value} for name, value in named.items()}}


def _responses(document: RouteDocument, role: Role, *, has_keys: bool) -> dict[str, Any]:
    statuses = {403, 503, *document.errors}
    if role != "public":
        statuses |= {401} if has_keys else set()
    if role == "admin" or document.is_stored:
        statuses |= {507}
    if role in ("training", "admin"):
        statuses |= {400, 404, 408, 409, 413}
    elif document.bodies:
        statuses |= {400, 404, 408, 409, 413, 429, 504}
    error = {"schema": _any_of((ErrorAnswer,))}
    errors = {str(status): {"description": ERRORS[status], "content": {JSON: error}} for status in sorted(statuses)}
    return {"200": {"description": "The answer.", "content": _answer_content(document)}, **errors}


def _answer_content(document: RouteDocument) -> dict[str, Any]:
    if document.media_type != JSON:
        return {document.media_type: {"schema": {"type": "string"}}}
    example = {} if document.answer_example is None else {"example": document.answer_example}
    content: dict[str, Any] = {JSON: {"schema": _any_of(document.answers), **example}}
    if any("stream" in body.model_fields for body in document.bodies):
        events = {"type": "string", "description": f"With `stream`: {document.events}."}
        content["text/event-stream"] = {"schema": events}
    return content


def _any_of(models: tuple[type[BaseModel], ...]) -> dict[str, Any]:
    refs = [{"$ref": REF.format(model=model.__name__)} for model in models]
    return refs[0] if len(refs) == 1 else {"anyOf": refs} if refs else {"type": "object"}
