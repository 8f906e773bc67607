"""Pull, create, copy, delete and blobs over a real catalogue in a folder of its own. Nothing asks a network."""

import asyncio
import hashlib
import json
import os
import resource
import signal
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import OfflineModeIsEnabled

from parallm.errors import InvalidRequest, Unavailable
from parallm.registry.catalogue import Catalogue
from parallm.registry.records import Loaded, Named, Overlay
from parallm.server.ollama import pull
from parallm.server.ollama.blobs import SECONDS_TO_CREATE, sweep
from parallm.server.ollama.create import _gguf_file
from parallm.server.ollama.pull import Progress, Pulls, hub_id_of
from parallm.server.settings import ServerSettings
from tests.registry.folders import write_folder
from tests.server.conftest import BASE_MODEL, CharacterTokenizer, EchoEngine, card, make_app, send_to

Call = Callable[..., httpx.Response]


class CatalogueModels(Catalogue):
    """A catalogue without a pool: its models are never loaded."""

    async def describe(self, name: str) -> Named:
        return await self.find(name)

    in_memory: tuple[Loaded, ...] = ()

    def loaded(self) -> tuple[Loaded, ...]:
        return self.in_memory

    async def load(self, name: str, *, keep_alive: float | None = None, is_pinned: bool | None = None) -> None: ...
    async def unload(self, name: str) -> None: ...


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CatalogueModels]:
    monkeypatch.setattr("parallm.registry.discovery.HF_HUB_CACHE", str(tmp_path / "hub"))
    write_folder(tmp_path / "folders" / "qwen3", template="{{ tools }}<think>")
    catalogue = CatalogueModels(tmp_path / "registry", (str(tmp_path / "folders"),))
    asyncio.run(catalogue.scan())
    yield catalogue
    catalogue.close()


@pytest.fixture
def call(models: CatalogueModels) -> Call:
    settings = ServerSettings(ollama=True, max_blob_bytes=5000)
    catalog = lambda: (card(3),)  # noqa: E731
    return partial(
        send_to, make_app(EchoEngine(), CharacterTokenizer(), models=models, settings=settings, catalog=catalog)
    )


def statuses(response: httpx.Response) -> list[str]:
    assert response.status_code == 200, response.text
    return [json.loads(line)["status"] for line in response.text.splitlines()]


def error_of(response: httpx.Response) -> str:
    """The error of a response that failed before its first line, or as its last one."""
    error: str = json.loads(response.text.splitlines()[-1])["error"]
    return error


def names(call: Call) -> list[str]:
    return [model["name"] for model in call("GET", "/api/tags").json()["models"]]


def upload(call: Call, content: bytes) -> str:
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    assert call("HEAD", f"/api/blobs/{digest}").status_code == 404
    headers = {"content-type": "application/json"}  # as Ollama's client
    assert call("POST", f"/api/blobs/{digest}", content=content, headers=headers).status_code == 201
    assert call("HEAD", f"/api/blobs/{digest}").status_code == 200
    return digest


def create(call: Call, **fields: Any) -> httpx.Response:
    return call("POST", "/api/create", json={"model": "poet"} | fields)


OWN = ["policy:latest", "base:latest", "policy:3"]


def test_names_of_the_catalogue_are_listed_and_shown(call: Call, tmp_path: Path) -> None:
    assert names(call) == [*OWN, "qwen3:latest"]
    page = call("POST", "/api/show", json={"model": "Qwen3", "verbose": True}).json()
    assert (page["template"], page["capabilities"]) == ("{{ tools }}<think>", ["completion", "tools", "thinking"])
    assert page["model_info"]["llama.context_length"] == 128
    assert page["tensors"] == [{"name": "model.embed_tokens.weight", "type": "F32", "shape": [32, 8]}]


def test_what_is_in_memory_is_listed_until_it_expires(call: Call, models: CatalogueModels) -> None:
    def loaded(state: str, expires_at: float | None) -> Loaded:
        return Loaded(
            name="qwen3:latest",
            names=("qwen3:latest",),
            state=state,
            num_bytes=77,
            expires_at=expires_at,
            is_pinned=False,
            num_leases=0,
        )

    models.in_memory = (loaded("ready", 1_800_000_000.0),)
    *own, last = call("GET", "/api/ps").json()["models"]
    assert [model["name"] for model in own] == OWN[:2]
    assert (last["name"], last["size"], last["context_length"]) == ("qwen3:latest", 77, 128)
    assert last["expires_at"] == "2027-01-15T08:00:00.000000Z"
    models.in_memory = (loaded("ready", None),)
    assert call("GET", "/api/ps").json()["models"][-1]["expires_at"].startswith("9999")
    for state in ("loading", "unloading"):
        models.in_memory = (loaded(state, None),)
        assert len(call("GET", "/api/ps").json()["models"]) == 2


def test_a_name_is_made_of_another(call: Call) -> None:
    fields = {
        "system": "Answer in verse.",
        "parameters": {"temperature": 1, "stop": ["\n\n"]},
        "messages": [{"role": "user", "content": "hi"}],
        "license": ["MIT"],
    }
    made = statuses(create(call, **{"from": "qwen3"}, **fields))
    assert made == ["reading model metadata", "creating system layer", "writing manifest", "success"]
    page = call("POST", "/api/show", json={"model": "poet"}).json()
    assert (page["system"], page["license"], page["messages"]) == ("Answer in verse.", "MIT", fields["messages"])
    assert page["parameters"].splitlines() == [f"{'temperature':<30} 1", f"{'stop':<30} {json.dumps(chr(10) * 2)}"]
    again = create(call, model="louder", modelfile="FROM poet\nPARAMETER temperature 0.5", stream=False)
    assert again.json() == {"status": "success"}
    louder = call("POST", "/api/show", json={"model": "louder"}).json()
    assert (louder["system"], louder["parameters"].split()[1]) == ("Answer in verse.", "0.5")
    assert louder["details"]["family"] == "llama"


def test_both_routes_create_the_same(call: Call) -> None:
    fields: dict[str, Any] = {
        "system": "S",
        "parameters": {"seed": 7},
        "messages": [{"role": "user", "content": "hi"}],
        "license": ["MIT", "and more"],
    }
    statuses(create(call, **{"from": "qwen3"}, **fields))
    post = partial(call, "POST", "/v1/models/create")
    assert post(json={"model": "own", "source": "qwen3"} | fields).json() == {"status": "ok"}
    assert post(json={"model": "louder", "source": "poet", "parameters": {"temperature": 1}}).status_code == 200
    pages = [call("POST", "/api/show", json={"model": name}).json() for name in ("poet", "own", "louder")]
    for name in ("system", "license", "messages"):
        assert len({json.dumps(page[name]) for page in pages}) == 1
    assert pages[0]["parameters"] == pages[1]["parameters"]
    assert [line.split() for line in pages[2]["parameters"].splitlines()] == [["seed", "7"], ["temperature", "1"]]
    for wrong, message in (
        ({"parameters": {"heat": 1}}, "unknown field 'heat'"),
        ({"model": "policy"}, "is a name of this process"),
        ({"source": "nobody"}, "nobody"),
        ({"messages": [{"role": "robot", "content": ""}]}, "role"),
    ):
        answer = post(json={"model": "x", "source": "qwen3"} | wrong)
        assert answer.is_client_error
        assert message in answer.json()["error"]["message"]


def test_a_modelfile_of_a_name_makes_it_again(call: Call) -> None:
    create(call, **{"from": "qwen3"}, system='Say "no".', parameters={"seed": 7})
    page = call("POST", "/api/show", json={"model": "poet"}).json()
    assert statuses(create(call, model="twin", modelfile=page["modelfile"]))[-1] == "success"
    twin = call("POST", "/api/show", json={"model": "twin"}).json()
    assert (twin["system"], twin["parameters"]) == (page["system"], page["parameters"])


def test_the_process_s_own_base_may_be_named_again(models: CatalogueModels, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "elsewhere")
    base = replace(BASE_MODEL, model=replace(BASE_MODEL.model, folder=str(folder)))
    app = make_app(EchoEngine(), CharacterTokenizer(), models=models, base=base, settings=ServerSettings(ollama=True))
    own = partial(send_to, app)
    assert statuses(create(own, **{"from": "base:latest"}, system="S"))[-1] == "success"
    assert own("POST", "/api/show", json={"model": "poet"}).json()["details"]["format"] == "safetensors"
    own("DELETE", "/api/delete", json={"model": "poet"})
    assert list((models.folder / "models").iterdir()) == []
    assert (folder / "config.json").is_file()


def test_a_model_is_made_of_files(call: Call, models: CatalogueModels, tmp_path: Path) -> None:
    files = {path.name: path.read_bytes() for path in (tmp_path / "folders" / "qwen3").iterdir()}
    digests = {name: upload(call, content) for name, content in files.items()}
    made = statuses(create(call, files=digests))
    assert made[-2:] == ["writing manifest", "success"]
    assert {line.split()[-1] for line in made if line.startswith("using")} == set(digests.values())
    (folder,) = (models.folder / "models").iterdir()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == files
    asyncio.run(models.scan())  # finds nothing that is not named yet
    assert names(call) == [*OWN, *sorted(names(call)[3:])]
    assert len(names(call)) == 5
    assert call("DELETE", "/api/delete", json={"model": "poet"}).status_code == 200
    assert list((models.folder / "models").iterdir()) == []
    assert "poet:latest" not in names(call)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "neither 'from' or 'files' was specified"),
        ({"from": "nobody"}, "nobody"),
        ({"from": "qwen3", "template": "{{ .Prompt }}"}, "template is not supported"),
        ({"from": "qwen3", "quantize": "q4_0"}, "quantize is not supported"),
        ({"from": "qwen3", "parameters": {"heat": 1}}, "unknown field 'heat'"),
        ({"from": "qwen3", "parser": "harmony"}, "parser is not supported"),
        ({"from": "qwen3", "adapters": {"a.gguf": f"sha256:{'0' * 64}"}}, "of PEFT; it has a.gguf"),
        ({"from": "qwen3", "form": "x"}, "unknown field 'form'"),
        ({"from": "qwen3", "model": "policy"}, "is a name of this process"),
        ({"modelfile": "FROM qwen3\nTEMPLATE x"}, "TEMPLATE of a Modelfile is not supported"),
        ({"files": {"config.json": f"sha256:{'0' * 64}"}}, "no blob"),
        ({"files": {"config.json": "md5:1"}}, "invalid digest format"),
        *(
            ({"files": {name: f"sha256:{'0' * 64}"}}, "file path must be relative")
            for name in ("../config.json", "/etc/passwd", "a\\b", "a/../b", "", "./a")
        ),
    ],
)
def test_what_cannot_be_made_is_refused(
    call: Call, models: CatalogueModels, fields: dict[str, Any], message: str
) -> None:
    before = names(call)
    assert message in error_of(create(call, **fields))
    assert names(call) == before
    assert not any((models.folder / "models").glob("*"))


def test_a_model_in_gguf_is_one_file_or_all_its_parts() -> None:
    parts = [f"a-0000{number}-of-00002.gguf" for number in (1, 2)]
    assert _gguf_file(dict.fromkeys(reversed(parts), "")) == parts[0]
    assert (_gguf_file({"a.gguf": ""}), _gguf_file({"config.json": ""})) == ("a.gguf", "")
    for names in (parts[:1], parts[1:], ["a.gguf", "b.gguf"], [*parts, "config.json"]):
        with pytest.raises(InvalidRequest, match=r"one file, or NAME-00001-of-0000N.gguf and all its other parts"):
            _gguf_file(dict.fromkeys(names, ""))


def test_files_that_are_no_model_leave_nothing(call: Call, models: CatalogueModels) -> None:
    digest = upload(call, b"{}")
    assert error_of(create(call, files={"config.json": digest}))
    assert not any((models.folder / "models").glob("*"))
    assert call("HEAD", f"/api/blobs/{digest}").status_code == 200  # the client corrects its files


def test_a_file_called_as_its_folder_is_refused_and_other_models_stay(call: Call, models: CatalogueModels) -> None:
    other = write_folder(models.folder / "models" / "other")
    digest = upload(call, b"no model")
    assert "must be relative" in error_of(create(call, files={".": digest}))
    assert other.is_dir()


def test_a_disk_that_takes_a_part_of_a_blob_does_not_keep_it(call: Call, models: CatalogueModels) -> None:
    content = b"a" * 4000
    path = f"/api/blobs/sha256:{hashlib.sha256(content).hexdigest()}"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        assert call("POST", path, content=content).status_code == 507
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert list((models.folder / "blobs").iterdir()) == []


def test_an_adapter_is_kept_as_long_as_its_name(call: Call, models: CatalogueModels) -> None:
    files = {"adapter_config.json": upload(call, b"{}"), "adapter_model.safetensors": upload(call, b"weights")}
    assert statuses(create(call, **{"from": "qwen3"}, adapters=files))[-1] == "success"
    overlay = asyncio.run(models.describe("poet")).overlay
    assert overlay is not None
    assert overlay.adapter is not None
    assert (Path(overlay.adapter) / "adapter_model.safetensors").read_bytes() == b"weights"
    call("POST", "/api/copy", json={"source": "poet", "destination": "twin"})
    call("DELETE", "/api/delete", json={"model": "poet"})
    assert Path(overlay.adapter).is_dir()
    call("DELETE", "/api/delete", json={"name": "twin"})
    assert not Path(overlay.adapter).exists()


def test_names_are_copied_and_deleted(call: Call, tmp_path: Path) -> None:
    copied = call("POST", "/api/copy", json={"source": "qwen3", "destination": "me/mine:v1"})
    assert (copied.status_code, copied.content) == (200, b"")
    assert names(call)[3:] == ["me/mine:v1", "qwen3:latest"]
    deleted = call("DELETE", "/api/delete", json={"model": "me/mine:v1"})
    assert (deleted.status_code, deleted.content) == (200, b"")
    assert names(call)[3:] == ["qwen3:latest"]
    assert (tmp_path / "folders" / "qwen3").is_dir()
    for method, path, body in (
        ("POST", "/api/copy", {"source": "nobody", "destination": "a"}),
        ("DELETE", "/api/delete", {"model": "nobody"}),
    ):
        assert error_of(call(method, path, json=body)).startswith("model 'nobody' not found")
    assert "is not deleted here" in error_of(call("DELETE", "/api/delete", json={"model": "policy:3"}))
    assert "is not copied here" in error_of(call("POST", "/api/copy", json={"source": "base", "destination": "a"}))


def test_a_blob_is_what_its_digest_says(call: Call, models: CatalogueModels) -> None:
    digest = f"sha256:{hashlib.sha256(b'right').hexdigest()}"
    assert "digest mismatch" in error_of(call("POST", f"/api/blobs/{digest}", content=b"wrong"))
    assert "invalid digest format" in error_of(call("POST", "/api/blobs/sha256:..", content=b""))
    assert list((models.folder / "blobs").iterdir()) == []
    assert upload(call, b"right") == digest
    assert call("POST", f"/api/blobs/{digest}", content=b"right").status_code == 200
    long = f"sha256:{hashlib.sha256(bytes(5001)).hexdigest()}"
    refused = call("POST", f"/api/blobs/{long}", content=bytes(5001))
    assert (refused.status_code, "raise server.max_blob_bytes" in refused.text) == (413, True), refused.text
    assert len(list((models.folder / "blobs").iterdir())) == 1


def test_blobs_of_no_model_are_removed_when_they_are_old(call: Call, models: CatalogueModels) -> None:
    path = models.folder / "blobs" / upload(call, b"alone").replace(":", "-")
    sweep(models.folder, ())
    assert path.exists()
    then = time.time() - 2 * SECONDS_TO_CREATE
    os.utime(path, (then, then))
    (path.parent / "link").hardlink_to(path)
    sweep(models.folder, ())
    assert path.exists()
    (path.parent / "link").unlink()
    sweep(models.folder, ())
    assert not path.exists()


def test_without_a_catalogue_the_way_to_one_is_told() -> None:
    app = make_app(EchoEngine(), CharacterTokenizer(), settings=ServerSettings(ollama=True))
    for method, path, body in (
        ("POST", "/api/copy", {"source": "a", "destination": "b"}),
        ("DELETE", "/api/delete", {"model": "a"}),
        ("POST", "/api/create", {"model": "a", "from": "base"}),
        ("POST", "/api/pull", {"model": "a"}),
        ("POST", f"/api/blobs/sha256:{'0' * 64}", {}),
    ):
        assert "registry.enabled=true" in error_of(send_to(app, method, path, json=body))
    assert statuses(send_to(app, "POST", "/api/pull", json={"model": "base:latest"})) == ["pulling manifest", "success"]


# pull -----------------------------------------------------------------------------------------------------------------


def test_what_is_here_is_pulled_at_once(call: Call) -> None:
    assert statuses(call("POST", "/api/pull", json={"name": "qwen3"})) == ["pulling manifest", "success"]
    assert call("POST", "/api/pull", json={"model": "qwen3", "stream": False}).json() == {"status": "success"}


def test_without_a_network_the_way_out_is_told(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    class OfflineApi:
        def model_info(self, *words: object, **options: object) -> None:
            raise OfflineModeIsEnabled("offline mode is enabled")

    monkeypatch.setattr(pull, "HfApi", OfflineApi)
    for name in ("Qwen/Qwen3-0.6B", "qwen3:0.6b"):
        error = error_of(call("POST", "/api/pull", json={"model": name}))
        assert error.startswith("pull model manifest: Qwen/Qwen3-0.6B: offline mode is enabled; without network put")
    assert "registry.folders" in error
    assert "no hub id is known" in error_of(call("POST", "/api/pull", json={"model": "nobody"}))
    whole = call("POST", "/api/pull", json={"model": "owner/model", "stream": False})
    assert (whole.status_code, list(whole.json())) == (409, ["error"])


@pytest.mark.parametrize(
    ("name", "hub_id"),
    [
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("hf.co/Qwen/Qwen3-0.6B:latest", "Qwen/Qwen3-0.6B"),
        ("qwen3", "Qwen/Qwen3-8B"),
        ("qwen3:latest", "Qwen/Qwen3-8B"),
        ("qwen3:999b", None),
        ("a/b/c", None),
        ("a/b:q4", None),
    ],
)
def test_names_mean_hub_ids(name: str, hub_id: str | None) -> None:
    assert hub_id_of(name) == hub_id


class Hub:
    """A hub with one model of one file, which comes in two halves."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.num_downloads = 0

    def fetch(self, hub_id: str, download: Any) -> None:
        self.num_downloads += 1
        file = pull._File("model.safetensors", "ab" * 32, 10)
        download.files.append(file)
        for _ in range(2):
            time.sleep(0.15)
            if download.is_given_up.is_set():
                return
            file.completed += 5
        download.is_verifying = True
        reference = self.folder / f"models--{hub_id.replace('/', '--')}"
        write_folder(reference / "snapshots" / "1")
        (reference / "refs").mkdir()
        (reference / "refs" / "main").write_text("1")


def test_a_pull_shows_how_far_it_is_and_names_the_model(
    models: CatalogueModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(tmp_path / "hub")
    monkeypatch.setattr(pull, "fetch_model", hub.fetch)
    app = make_app(EchoEngine(), CharacterTokenizer(), models=models, settings=ServerSettings(ollama=True))
    response = send_to(app, "POST", "/api/pull", json={"model": "qwen3:0.6b"})
    lines = [json.loads(line) for line in response.text.splitlines()]
    assert lines[0] == {"status": "pulling manifest"}
    assert [line["status"] for line in lines[-3:]] == ["verifying sha256 digest", "writing manifest", "success"]
    parts = lines[1:-3]
    assert {line["status"] for line in parts} == {"pulling abababababab"}
    completed = [line["completed"] for line in parts]
    assert (completed, parts[0]["total"]) == (sorted(set(completed)), 10)
    assert completed[-1] == 10
    assert {"qwen3:0.6b", "qwen/qwen3-0.6b:latest"} <= {name.lower() for name in names(partial(send_to, app))}
    assert statuses(send_to(app, "POST", "/api/pull", json={"model": "Qwen/Qwen3-0.6B"}))[-1] == "success"
    assert hub.num_downloads == 1


FILES = {"config.json": b"{}", "model.safetensors": bytes(300_000), "model.py": b"exit()", "README.md": b"no"}


class HubHandler(BaseHTTPRequestHandler):
    """The hub's routes for one model; `model.safetensors` comes with a letter in it that its digest lacks."""

    wrong = False

    def log_message(self, *_: object) -> None: ...

    def do_HEAD(self) -> None:
        self.answer(has_body=False)

    def do_GET(self) -> None:
        self.answer(has_body=True)

    def answer(self, *, has_body: bool) -> None:
        name = self.path.rpartition("/")[2]
        if self.path.startswith("/api/models/a/b"):
            content = json.dumps({"id": "a/b", "sha": "c" * 40, "siblings": list(map(sibling, FILES))}).encode()
        elif name in FILES:
            content = FILES[name]
            if self.wrong and name == "model.safetensors":
                content = b"x" + content[1:]
        else:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", "c" * 40)
        self.end_headers()
        if has_body:
            self.wfile.write(content)


def sibling(name: str) -> dict[str, Any]:
    content = FILES[name]
    large = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 1}
    return {"rfilename": name, "size": len(content)} | ({"lfs": large} if name == "model.safetensors" else {})


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Let the hub's library ask a server of this process, and return its cache."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), HubHandler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield tmp_path / "cache" / "models--a--b"
    server.shutdown()
    thread.join()
    server.server_close()


async def watched(hub_id: str) -> list[Progress]:
    return [progress async for progress in Pulls().watch(hub_id)]


def test_the_library_of_the_hub_downloads_what_is_used(hub_cache: Path) -> None:
    lines = asyncio.run(watched("a/b"))
    assert lines[-1].status == "verifying sha256 digest"
    ends = {line.status: (line.completed, line.total) for line in lines[:-1]}
    digest = hashlib.sha256(FILES["model.safetensors"]).hexdigest()
    assert ends == {"pulling config.json": (2, 2), f"pulling {digest[:12]}": (300_000, 300_000)}
    commit = (hub_cache / "refs" / "main").read_text()
    assert {path.name for path in (hub_cache / "snapshots" / commit).iterdir()} == {"config.json", "model.safetensors"}


def test_a_file_with_another_digest_is_not_kept(hub_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HubHandler, "wrong", True)
    with pytest.raises(Unavailable, match=r"digest mismatch: model\.safetensors of a/b"):
        asyncio.run(watched("a/b"))
    commit = (hub_cache / "refs" / "main").read_text()
    assert {path.name for path in (hub_cache / "snapshots" / commit).iterdir()} == {"config.json"}
    monkeypatch.setattr(HubHandler, "wrong", False)
    assert asyncio.run(watched("a/b"))[-1].status == "verifying sha256 digest"


def test_requests_for_one_model_share_its_download(tmp_path: Path) -> None:
    hub = Hub(tmp_path)

    async def both() -> Sequence[list[Progress]]:
        pulls = Pulls(hub.fetch)

        async def one() -> list[Progress]:
            return [progress async for progress in pulls.watch("a/b")]

        return await asyncio.gather(one(), one())

    first, second = asyncio.run(both())
    assert hub.num_downloads == 1
    assert first[-2].completed == second[-2].completed == 10


def test_a_download_ends_when_nobody_watches(tmp_path: Path) -> None:
    hub = Hub(tmp_path)

    async def leave() -> None:
        pulls = Pulls(hub.fetch)
        watching: AsyncGenerator[Progress, None] = pulls.watch("a/b")
        await anext(watching)
        await watching.aclose()

    asyncio.run(leave())
    assert not (tmp_path / "models--a--b").exists()


def test_a_failed_download_may_be_tried_again(tmp_path: Path) -> None:
    def fail(hub_id: str, download: Any) -> None:
        raise Unavailable("the hub is gone")

    async def twice() -> None:
        pulls = Pulls(fail)
        for _ in range(2):
            with pytest.raises(Unavailable, match="gone"):
                _ = [progress async for progress in pulls.watch("a/b")]

    asyncio.run(twice())


def test_an_overlay_alone_changes_the_digest(call: Call) -> None:
    create(call, **{"from": "qwen3"}, system="S")
    digests = {model["name"]: model["digest"] for model in call("GET", "/api/tags").json()["models"]}
    assert digests["poet:latest"] != digests["qwen3:latest"]
    assert Overlay() == Overlay(system=None)
