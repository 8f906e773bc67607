"""The routes about adapters, with a list of cards in place of a table."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from parallm.errors import AdapterError, AdapterMissing, FolderInUse, NotStored, UnknownModel
from parallm.server.settings import ServerSettings
from parallm.types import AdapterCard
from tests.server.conftest import make_app

POET = AdapterCard(
    name="poet",
    version=1,
    parent=None,
    step=0,
    rank=2,
    alpha=4.0,
    aliases=(),
    digest="ab",
    num_running=0,
    is_served=True,
)


@dataclass
class FakeAdapters:
    """Remembers what it was asked for."""

    calls: list[tuple[Any, ...]] = field(default_factory=list)
    splits: dict[str, Mapping[str, float]] = field(default_factory=dict)
    refusal: Exception | None = None
    """Of everything that would have to outlive the process."""

    async def load(self, name: str, path: str) -> AdapterCard:
        if path == "missing":
            raise AdapterMissing("'missing' is not there")
        return self._made("load", name, path)

    async def upload(self, name: str, archive: bytes) -> AdapterCard:
        return self._made("upload", name, archive)

    async def update(self, name: str, weights: bytes) -> AdapterCard:
        return self._made("update", name, weights)

    async def unload(self, name: str, version: int | None = None) -> None:
        if name == "nobody":
            raise UnknownModel("nobody is not loaded")
        self.calls.append(("unload", name, version))

    async def promote(self, name: str, version: int) -> None:
        self.calls.append(("promote", name, version))

    async def roll_back(self, name: str) -> int:
        if name == "policy":
            raise AdapterError("no")
        return 4

    async def set_alias(self, alias: str, name: str, version: int) -> None:
        self.calls.append(("set_alias", alias, name, version))

    async def remove_alias(self, alias: str, name: str) -> None:
        self.calls.append(("remove_alias", alias, name))

    async def set_splits(self, splits: Mapping[str, Mapping[str, float]]) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.splits = dict(splits)

    def _made(self, *call: Any) -> AdapterCard:
        self.calls.append(call)
        return replace(POET, name=call[1], version=2)


@pytest.fixture
def adapters() -> FakeAdapters:
    return FakeAdapters()


@pytest.fixture
def client(engine: Any, tokenizer: Any, adapters: FakeAdapters) -> TestClient:
    return TestClient(
        make_app(
            engine,
            tokenizer,
            catalog=lambda: (POET,),
            status=lambda: pytest.fail("nobody asks"),
            settings=ServerSettings(max_adapter_bytes=2048),
            adapters=adapters,
        ),
        base_url="http://localhost",
    )


def test_every_version_in_memory_is_listed(client: TestClient) -> None:
    (entry,) = client.get("/v1/adapters").json()["data"]
    assert (entry["id"], entry["rank"], entry["is_served"], entry["digest"]) == ("poet@1", 2, True, "ab")


@pytest.mark.parametrize("path", ["/v1/adapters/load", "/load_adapter"])
def test_a_folder_is_loaded(client: TestClient, adapters: FakeAdapters, path: str) -> None:
    assert client.post(path, json={"name": "poet", "path": "p"}).json()["id"] == "poet@2"
    assert adapters.calls == [("load", "poet", "p")]


def test_an_upload_is_passed_on_and_cut_off_where_it_is_too_large(client: TestClient, adapters: FakeAdapters) -> None:
    assert client.put("/v1/adapters/poet", content=b"zip").json()["id"] == "poet@2"
    assert client.post("/upload_adapter?name=coder", content=b"zip").json()["id"] == "coder@2"
    assert client.post("/update_adapter_weights?name=poet", content=b"tensors").json()["version"] == 2
    assert [call[0] for call in adapters.calls] == ["upload", "upload", "update"]
    large = client.put("/v1/adapters/poet", content=bytes(2049))
    assert large.status_code == 413
    assert "server.max_adapter_bytes" in large.json()["error"]["message"]
    assert client.post("/upload_adapter", content=b"zip").json()["error"]["param"] == "name"


def test_vllm_is_answered_in_words_and_sglang_with_what_is_loaded(client: TestClient) -> None:
    body = {"lora_name": "poet", "lora_path": "/d/step_12", "load_inplace": True}
    assert client.post("/v1/load_lora_adapter", json=body).text == "Success: LoRA adapter 'poet' added successfully."
    for path in ("/load_lora_adapter", "/skyrl/v1/load_lora_adapter"):
        assert client.post(path, json=body).json() == {
            "status": "ok", "success": True, "error_message": None, "loaded_adapters": {"poet": "/d/step_12"},
        }  # fmt: skip
    assert client.post("/unload_lora_adapter", json={"lora_name": "poet"}).json()["success"] is True
    removed = client.post("/v1/unload_lora_adapter", json={"lora_name": "poet", "lora_int_id": None})
    assert removed.text == "Success: LoRA adapter 'poet' removed successfully."


def test_a_folder_that_is_not_there_yet_is_404_so_that_clients_try_again(client: TestClient) -> None:
    for path in ("/load_lora_adapter", "/v1/load_lora_adapter", "/v1/adapters/load"):
        assert client.post(path, json={"lora_name": "poet", "lora_path": "missing"} if "lora" in path else {
            "name": "poet", "path": "missing"}).status_code == 404  # fmt: skip


def test_versions_are_promoted_rolled_back_aliased_and_unloaded(client: TestClient, adapters: FakeAdapters) -> None:
    assert client.post("/v1/adapters/promote", json={"version": 3}).json() == {"name": "policy", "version": 3}
    assert client.post("/v1/adapters/rollback", json={"name": "poet"}).json() == {"name": "poet", "version": 4}
    client.post("/v1/adapters/aliases", json={"alias": "good", "name": "poet", "version": 1})
    client.delete("/v1/adapters/poet/aliases/good")
    client.delete("/v1/adapters/poet@3")
    client.delete("/v1/adapters/poet")
    client.post("/model/switch-lora", json={"adapter_name": "poet", "version": 1})
    client.post("/model/switch-lora", json={"adapter_name": "poet", "adapter_path": "p"})
    assert adapters.calls == [
        ("promote", "policy", 3),
        ("set_alias", "good", "poet", 1),
        ("remove_alias", "good", "poet"),
        ("unload", "poet", 3),
        ("unload", "poet", None),
        ("promote", "poet", 1),
        ("load", "poet", "p"),
    ]


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/v1/adapters/rollback", None, 400),
        ("POST", "/v1/adapters/promote", {"version": -1}, 400),
        ("POST", "/v1/adapters/load", {"name": "poet"}, 400),
        ("POST", "/load_lora_adapter", {"lora_name": "poet", "lora_path": "p", "pinned": True}, 400),
        ("POST", "/model/switch-lora", {}, 400),
        ("DELETE", "/v1/adapters/poet@x", None, 400),
        ("DELETE", "/v1/adapters/nobody", None, 404),
    ],
)
def test_what_cannot_be_done_is_told_with_its_status(
    client: TestClient, method: str, path: str, body: dict[str, Any] | None, status: int
) -> None:
    response = client.request(method, path, json=body)
    assert response.status_code == status
    assert response.json()["error"]["message"]


def test_a_split_holds_its_versions(client: TestClient, adapters: FakeAdapters) -> None:
    client.put("/v1/splits/ab", json={"weights": {"poet@1": 1, "base": 1}})
    assert adapters.splits == {"ab": {"poet@1": 0.5, "base": 0.5}}
    client.delete("/v1/splits/ab")
    assert adapters.splits == {}


@pytest.mark.parametrize(
    ("refusal", "status", "code"),
    [
        (NotStored("nothing was changed: no space"), 507, "not_stored"),
        (FolderInUse("serving is in use by process 7"), 409, "folder_in_use"),
    ],
)
def test_a_split_that_is_not_kept_does_not_count(
    client: TestClient, adapters: FakeAdapters, refusal: Exception, status: int, code: str
) -> None:
    client.put("/v1/splits/ab", json={"weights": {"poet@1": 1}})
    adapters.refusal = refusal
    for answer in (
        client.put("/v1/splits/ab", json={"weights": {"base": 1}}),
        client.put("/v1/splits/new", json={"weights": {"base": 1}}),
        client.delete("/v1/splits/ab"),
    ):
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert [(one["name"], one["shares"]) for one in client.get("/v1/splits").json()["data"]] == [
        ("ab", {"poet@1": 1.0})
    ]


def test_a_process_without_a_store_says_so(call: Callable[..., httpx.Response]) -> None:
    assert call("POST", "/v1/adapters/load", json={"name": "a", "path": "b"}).status_code == 409
    assert call("DELETE", "/v1/adapters/a").status_code == 409


def test_uploads_at_once_have_a_limit_together(engine: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one comes while the first one is loaded, and again later."""
    monkeypatch.setattr("parallm.server.service.MAX_UPLOADS", 1)
    adapters, content = FakeAdapters(), bytes(90_000)

    async def main() -> list[int]:
        loading, goes_on = asyncio.Event(), asyncio.Event()

        async def upload(name: str, archive: bytes) -> AdapterCard:
            loading.set()
            await goes_on.wait()
            return POET

        monkeypatch.setattr(adapters, "upload", upload)
        app = make_app(engine, tokenizer, adapters=adapters, settings=ServerSettings(max_adapter_bytes=100_000))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            first = asyncio.create_task(client.put("/v1/adapters/poet", content=content))
            await loading.wait()
            second = await client.put("/v1/adapters/poet", content=content)
            small = asyncio.create_task(client.put("/v1/adapters/poet", content=b"a"))
            goes_on.set()
            third = await client.put("/v1/adapters/poet", content=content) if (await first).is_success else second
            return [answer.status_code for answer in (await first, second, third, await small)]

    assert asyncio.run(main()) == [200, 429, 200, 200]
