"""`run-api` of atroposlib 0.4.0 as far as a trainer and its environments rely on it, traps included."""

import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.requests import Request

KEYS = (
    "tokens",
    "masks",
    "scores",
    "advantages",
    "ref_logprobs",
    "messages",
    "generation_params",
    "inference_logprobs",
    "overrides",
    "group_overrides",
    "images",
    "env_id",
    "distill_token_ids",
    "distill_logprobs",
)


class RunApi:
    """State is lost with `restart`. Batches are of groups of one size; `calls` are the paths in their order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.next_failure: int | None = None
        """Status of the next `/batch`, whose batch is lost."""
        self.on_reset: list[Mapping[str, Any]] = []
        """What environments post between the next resets and the registrations behind them."""
        self.state: dict[str, Any] = {}
        self.app = FastAPI()
        for path, method in (
            ("/register", self.register),
            ("/scored_data", self.scored_data),
            ("/register-env", self.register_env),
        ):
            self.app.post(path)(method)
        for path, method in (
            ("/info", self.info),
            ("/status", self.status),
            ("/batch", self.batch),
            ("/reset_data", self.reset_data),
            ("/latest_example", self.latest_example),
        ):
            self.app.get(path)(method)

    def restart(self) -> None:
        self.state = {}

    async def register(self, request: Request) -> Any:
        self.calls.append("/register")
        body = await request.json()
        if "queue" not in self.state:
            self.state |= {"queue": [], "step": body["starting_step"], "curr_batch": [], "started": False}
            self.state |= {"batch_size": body["batch_size"], "max_token_len": body["max_token_len"]}
        return {"uuid": 1}

    async def register_env(self) -> Any:
        return {"status": "success" if self.state.get("started") else "wait for trainer to start"}

    async def scored_data(self, request: Request) -> Any:
        self.post(await request.json())
        return {"status": "received"}

    def post(self, group: Mapping[str, Any]) -> None:
        posted = {name: group.get(name) for name in KEYS}
        self.state.setdefault("queue", []).append(posted)
        self.state["latest"] = posted

    async def info(self) -> Any:
        self.calls.append("/info")
        return {name: self.state.get(name, -1) for name in ("batch_size", "max_token_len")}

    async def status(self) -> Any:
        if "step" not in self.state:
            return {"current_step": 0, "queue_size": 0}
        return {"current_step": self.state["step"], "queue_size": len(self.state["queue"])}

    async def batch(self) -> Response:
        self.calls.append("/batch")
        if "started" not in self.state:
            message = "Trainer not registered. Call /register first."
            return JSONResponse({"status": "error", "message": message, "batch": []})
        if "queue" not in self.state:
            return PlainTextResponse("Internal Server Error", 500)
        self.state["started"] = True
        if not self.state["curr_batch"]:
            self._form()
        if not self.state["curr_batch"]:
            return JSONResponse({"batch": None})
        served = self.state["curr_batch"].pop()
        if self.next_failure is not None:
            status, self.next_failure = self.next_failure, None
            return PlainTextResponse("Internal Server Error", status)
        return JSONResponse({"batch": served})

    def _form(self) -> None:
        """Every batch that can be formed, at once."""
        queue = self.state["queue"]
        size = len(queue[0]["tokens"]) if queue else 0
        count = self.state["batch_size"] // size if size else 0
        while 0 < count <= len(queue):
            self.state["curr_batch"].append(queue[:count])
            del queue[:count]
            self.state["step"] += 1

    async def latest_example(self) -> Any:
        return self.state.get("latest", {"tokens": []})

    async def reset_data(self) -> Any:
        self.calls.append("/reset_data")
        self.state = {"step": 0, "curr_batch": [], "started": False, "batch_size": -1} | {
            name: self.state[name] for name in ("max_token_len",) if name in self.state
        }
        if self.on_reset:
            self.post(self.on_reset.pop(0))
        return PlainTextResponse("Reset successful")


@contextmanager
def served(api: RunApi) -> Iterator[str]:
    """The URL of an API on loopback."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(api.app, log_level="critical", ws="none")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
