"""Are broken requests counted as what they are? Against a made-up server, of which one route fails."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parent.parent / "scripts"

PROBE = """
import asyncio, json, os, sys
sys.path.insert(0, sys.argv[1])
from collections import Counter
from route_requests import operations_of, requests_over
from server_fuzz import fuzz_routes
from server_process import Server

body = {"content": {"application/json": {"example": {"model": "base", "prompt": "2 + 2"}}}}
document = {"paths": {
    "/good": {"post": {"requestBody": body}},
    "/bad": {"post": {"requestBody": body}},
    "/pause": {"post": {}},
    "/named/{name}": {"get": {"parameters": [{"name": "name", "in": "path"}, {"name": "mode", "in": "query"}]}},
}}
operations = operations_of(document)
first = list(requests_over(operations, [], 400, 1))
assert first == list(requests_over(operations, [], 400, 1)) != list(requests_over(operations, [], 400, 2))

async def answer(reader, writer):
    try:
        while True:
            head = (await reader.readuntil(b"\\r\\n\\r\\n")).lower()
            lines = [line.partition(b": ")[2] for line in head.split(b"\\r\\n") if line.startswith(b"content-length")]
            await reader.readexactly(int(lines[0]) if lines else 0)
            path = head.split(b" ")[1]
            status = 500 if path.startswith(b"/bad") else 504 if path.startswith(b"/pause") else 200
            if path.startswith(b"/named"):
                writer.write(b"HTTP/1.1 200 OK\\r\\nTransfer-Encoding: chunked\\r\\n\\r\\n2\\r\\nok\\r\\n0\\r\\n\\r\\n")
            else:
                writer.write(b"HTTP/1.1 %d X\\r\\nContent-Length: 2\\r\\n\\r\\nok" % status)
    except (asyncio.IncompleteReadError, ValueError, IndexError, ConnectionError):
        writer.close()

async def main():
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        found = await fuzz_routes(Server(url=f"http://127.0.0.1:{port}", process_id=os.getpid()), first)
    bad = [sent for sent in first if b" /bad" in sent.content.split(b"\\r\\n")[0] and sent.is_http]
    rows = Counter(sent.row for sent in first if sent.is_http)
    print(json.dumps({"requests": found.requests, "errors": found.server_errors, "bad": len(bad), "rows": rows}))

asyncio.run(main())
"""


def test_answers_of_500_are_found_and_deadlines_that_were_asked_for_are_not() -> None:
    command = [sys.executable, "-c", PROBE, str(SCRIPTS)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert (found["requests"], found["errors"]) == (400, found["bad"])
    assert set(found["rows"]) == {"POST /good", "POST /bad", "POST /pause", "GET /named/{name}"}
    assert min(found["rows"].values()) > 80
