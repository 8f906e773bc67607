"""How many modules a chat request passes through, from the socket to the engine and back."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

MAX_MODULES = 48
MAX_MODULES_BEFORE_ENGINE = 9
MONITOR = "parallm/device/usage.py"
"""Its thread looks at the machine once a second, whatever is asked."""

SERVE_AND_RECORD = """
import json, os, signal, sys, threading, time, urllib.error, urllib.request

port, report = int(sys.argv[1]), sys.argv[2]
is_recording, modules = False, {}

def record(frame, event, _):
    if is_recording and event == "call" and frame.f_code.co_name != "<module>":
        modules.setdefault(frame.f_code.co_filename)

def ask():
    message = {"role": "user", "content": "2 + 3?"}
    body = json.dumps({"model": "policy", "messages": [message], "max_tokens": 4}).encode()
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)

def client():
    global is_recording
    for _ in range(600):
        try:
            ask()
            break
        except urllib.error.URLError:
            time.sleep(0.1)
    time.sleep(0.3)  # the work after the first answer ends
    is_recording = True
    ask()
    is_recording = False
    with open(report, "w") as file:
        json.dump(list(modules), file)
    os.kill(os.getpid(), signal.SIGTERM)

threading.Thread(target=client, daemon=True).start()
threading.setprofile(record)
sys.setprofile(record)
sys.argv = ["parallm.serve", "model=nano", f"server.port={port}", "server.state=off", "metrics.display=off"]
from parallm.serve import main
main()
"""


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the modules of which a function runs during a second chat request, in the order of their first calls."""
    folder = tmp_path_factory.mktemp("serve")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [sys.executable, "-c", SERVE_AND_RECORD, str(port), str(folder / "modules.json")]
    package = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": str(package)}
    done = subprocess.run(words, cwd=folder, env=environment, timeout=120, capture_output=True, check=False)
    assert (folder / "modules.json").exists(), done.stderr.decode()[-2000:]
    paths = json.loads((folder / "modules.json").read_text())
    names = [path.removeprefix(f"{package}/") for path in paths if path.startswith(f"{package}/parallm/")]
    return [name for name in names if name != MONITOR]


def test_a_chat_request_passes_through_few_modules(modules: list[str]) -> None:
    assert len(modules) <= MAX_MODULES, modules


def test_a_chat_request_reaches_the_engine_soon(modules: list[str]) -> None:
    before = next(index for index, path in enumerate(modules) if path.startswith("parallm/engine/"))
    assert before <= MAX_MODULES_BEFORE_ENGINE, modules[: before + 1]


def test_the_application_loads_no_mlx() -> None:
    script = "import sys, parallm.server.app; sys.exit('mlx.core' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
