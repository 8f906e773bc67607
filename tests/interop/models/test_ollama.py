"""Real clients of Ollama, unmodified, work with `python -m parallm.serve server.ollama=true` on loopback.

They are installed and run as those of `tests/interop/clients`. Open WebUI, a huge package, and continue.dev, which is
TypeScript, are their requests, recorded from their sources.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from bench.measurement import request_of_tests
from bench.processes import running

from tests.interop.clients.test_clients import LITELLM, PROGRAMS, Client, ask
from tests.interop.clients.tool_model import write_tool_model

CALLING = Path(__file__).parent / "calling_server.py"
RECORDED = "recorded_requests.py"
OLLAMA = ("ollama==0.6.3", "langchain-ollama==1.1.0", "llama-index-llms-ollama==0.11.0")
CLIENTS = (
    Client(name="ollama", program="ollama_calls.py", requirements=OLLAMA),
    Client(name="langchain-ollama", program="langchain_ollama_calls.py", requirements=OLLAMA),
    Client(name="llama-index-llms-ollama", program="llama_index_calls.py", requirements=OLLAMA),
    Client(name="litellm", program="litellm_ollama_calls.py", requirements=LITELLM),
    Client(name="open_webui", program=RECORDED, requirements=OLLAMA),
    Client(name="continue", program=RECORDED, requirements=OLLAMA),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    url: str
    calling_url: str
    """URL of a server whose model thinks and calls functions."""
    model: Path


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    model = folder / "model"
    write_tool_model(model)
    words = [f"model.path={model}", "tasks.pooling=mean", "server.ollama=true"]
    words += ["registry.enabled=true", f"registry.folder={folder / 'registry'}"]
    with ExitStack() as servers:
        server = servers.enter_context(running("parallm.serve", words, folder))
        calling = servers.enter_context(running(str(CALLING), [], folder))
        yield Served(url=server.url, calling_url=calling.url, model=model)


def words_for(client: Client, served: Served) -> Sequence[str]:
    recorded = [f"{client.name}.json"] if client.program == RECORDED else []
    return [served.url, str(served.model), "", json.dumps({"calls": served.calling_url}), *recorded]


@pytest.mark.interop
@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_all_checks_of_a_client_pass(
    client: Client, served: Served, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    python = client.python(request_of_tests().peers)
    found = ask(python, PROGRAMS / client.program, words_for(client, served), tmp_path)
    record_property("models.clients_passed", int(found["passed"] == found["total"]))
    record_property("models.clients_total", 1)
    record_property("remark", f"{client.name} {found['version']}: {found['passed']} of {found['total']}")
    assert found["failed"] == []
    assert found["passed"] == found["total"] > 0
