from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from parallm.server.openapi import DOCUMENTS, openapi_document
from parallm.server.operation.auth import ROLES

Call = Callable[..., httpx.Response]
TASK_PATHS = (
    *("/v1/embeddings", "/embeddings", "/embed", "/predict", "/similarity", "/pooling", "/v1/pooling"),
    *("/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score", "/classify", "/v1/classify", "/v1/classifications"),
)
"""Paths that need an encoder; see `test_tasks.py`."""
RL_PATHS = (
    *("/v1/rl/act", "/v1/rl/rollout", "/v1/predict"),
    *("/v2/models/{name}/infer", "/v2/models/{name}/versions/{version}/infer"),
)
"""Paths that need a policy net; see `test_rl.py` and `test_predict.py`."""
NEED_AN_ANSWER = (
    "POST /v1/batches",
    "POST /v1/rewards",
    "POST /v1/rewards/score",
    "POST /v1/trajectories/{trajectory_id}/reward",
    *(f"POST {path}" for path in (*TASK_PATHS, *RL_PATHS, "/api/embed", "/api/embeddings")),
)


def operations(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield f"{method.upper()} {path}", operation


def test_every_route_has_a_description_an_answer_and_typed_errors(app: FastAPI) -> None:
    document = openapi_document(app, has_keys=True)
    for row, operation in operations(document):
        assert operation["description"], row
        assert operation["responses"]["200"]["content"], row
        asked = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
        assert not DOCUMENTS[row].bodies or {"example", "examples"} & set(asked), row
        errors = {status: response for status, response in operation["responses"].items() if status != "200"}
        wanted = {"503"} if ROLES[row] == "public" else {"401", "403", "503"}
        assert wanted <= set(errors), row
        for response in errors.values():
            assert response["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/ErrorAnswer"}, (
                row
            )
    assert set(DOCUMENTS) == set(ROLES)


@pytest.mark.parametrize(
    "row", sorted(row for row, document in DOCUMENTS.items() if document.bodies and row not in NEED_AN_ANSWER)
)
def test_every_example_of_a_body_is_accepted(call_hermes: Call, row: str) -> None:
    method, path = row.split()
    for body in (DOCUMENTS[row].example, *DOCUMENTS[row].more_examples.values()):
        response = call_hermes(method, f"http://localhost{path}", json=body)
        # this process has no adapters and no training
        assert response.status_code in ((200,) if ROLES[row] == "inference" else (200, 404, 409)), response.text


def test_every_field_of_the_wire_types_is_in_the_document_and_no_other(app: FastAPI) -> None:
    schemas = openapi_document(app, has_keys=False)["components"]["schemas"]
    models = {model for document in DOCUMENTS.values() for model in document.bodies + document.answers}
    for model in models:
        fields = {field.alias or name for name, field in model.model_fields.items()}
        assert set(schemas[model.__name__]["properties"]) == fields, model


def test_every_reference_in_the_document_leads_somewhere(app: FastAPI) -> None:
    document = openapi_document(app, has_keys=True)
    references = set(found_in(document))
    assert references
    assert {reference.removeprefix("#/components/schemas/") for reference in references} <= set(
        document["components"]["schemas"]
    )


def test_the_document_is_made_once(app: FastAPI) -> None:
    assert app.openapi() is app.openapi()


def test_keys_are_in_the_document_where_there_are_keys(app: FastAPI) -> None:
    with_keys = dict(operations(openapi_document(app, has_keys=True)))
    assert with_keys["POST /v1/completions"]["security"] == [{"bearer": []}, {"x-api-key": []}]
    assert "security" not in with_keys["GET /health"]
    assert "security" not in dict(operations(openapi_document(app, has_keys=False)))["POST /v1/completions"]


def test_the_document_is_served_and_docs_leads_to_it(call: Call) -> None:
    assert call("GET", "/docs").headers["location"] == "/openapi.json"
    assert "swagger" in call("GET", "/docs/try").text
    document = call("GET", "/openapi.json").json()
    completion = document["components"]["schemas"]["CompletionBody"]["properties"]
    assert {"type": "string"} in completion["prompt"]["anyOf"]
    assert {"type": "null"} in completion["seed"]["anyOf"]
    assert completion["top_k"]["description"] == "-1 and 0 are off."
    assert "text/event-stream" in document["paths"]["/v1/completions"]["post"]["responses"]["200"]["content"]


def found_in(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from [item] if key == "$ref" else found_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from found_in(item)


def test_parameters_of_queries_are_in_the_document(app: FastAPI) -> None:
    paths = openapi_document(app, has_keys=False)["paths"]
    (mode,) = paths["/pause"]["post"]["parameters"]
    assert (mode["name"], mode["in"], mode["schema"]["enum"]) == ("mode", "query", ["abort", "wait", "keep"])
    assert [one["name"] for one in paths["/upload_adapter"]["post"]["parameters"]] == ["name"]
