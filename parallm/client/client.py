"""`Client`, and `AsyncClient`, whose methods are the same to be awaited."""

import ssl
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from functools import partial, wraps
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, cast, overload
from urllib.parse import quote

import httpx

from parallm.client.calls import (
    Call,
    Generated,
    read_card,
    read_generated,
    read_record,
    read_split,
    read_status,
)
from parallm.reports import SplitReport, TrainingStatus, TrajectoryReport
from parallm.types import POLICY, AdapterCard, GivenUpdate

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Http = TypeVar("Http", httpx.Client, httpx.AsyncClient)
Prompt = str | Sequence[int]
"""A text or token ids."""
Reward = float | Mapping[str, float]
"""One number, or parts by name."""
DEFAULT_SECONDS = 600.0
UNIX = "unix:"
"""Beginning of the address of a server on a unix socket: `unix:PATH`."""


class Method(Generic[Parameters, Result]):
    """Type of a method that returns its result in `Client`, and has to be awaited for it in `AsyncClient`."""

    @overload
    def __get__(self, client: "Client", kind: Any) -> Callable[Parameters, Result]: ...
    @overload
    def __get__(self, client: "AsyncClient", kind: Any) -> Callable[Parameters, Coroutine[Any, Any, Result]]: ...
    def __get__(self, client: Any, kind: Any) -> Any:
        raise NotImplementedError("only a type")


def method(make: Callable[Concatenate[Any, Parameters], Call[Result]]) -> Method[Parameters, Result]:
    """Let a method that makes a request send it, and return the meaning of its answer."""

    @wraps(make)
    def send(client: Any, *arguments: Parameters.args, **options: Parameters.kwargs) -> Any:
        return client.send(make(client, *arguments, **options))

    return cast(Method[Parameters, Result], send)


class Requests(Generic[Http]):
    """The methods of both clients. One that makes a `Call[X]` returns an `X`, or is awaited for it.

    Every method raises ApiError for what the server refuses, and httpx.HTTPError for what does not reach it.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        timeout: float | None = None,
        verify: ssl.SSLContext | bool | None = None,
        http: Http | None = None,
    ) -> None:
        """`base_url` without `/v1`, or `unix:PATH` of a unix socket.

        `verify` is a context of ssl, or False to trust any certificate.
        `http` is an HTTP client of your own, with its timeout, certificates and proxies; `api_key` is sent beside its
        headers. Raises ValueError for arguments that contradict it.
        """
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {_checked_key(api_key)}"}
        if http is None:
            if not base_url:
                raise ValueError("base_url is empty; give the server's address, such as http://localhost:8000")
            path = base_url.removeprefix(UNIX) if base_url.startswith(UNIX) else None
            self._base_url = base_url.rstrip("/") if path is None else "http://localhost"
            self._http: Http = self._new(
                path, DEFAULT_SECONDS if timeout is None else timeout, True if verify is None else verify
            )
            return
        for name, value in (("timeout", timeout), ("verify", verify)):
            if value is not None:
                raise ValueError(
                    f"{name} belongs to the client that is given as http; make that with it, or leave http out"
                )
        own = str(http.base_url).rstrip("/")
        if own and base_url and own != base_url.rstrip("/"):
            raise ValueError(f"base_url is {base_url}, and that of http is {own}; leave one of them out")
        if api_key is not None and http.headers.get("authorization") not in (None, self._headers["Authorization"]):
            raise ValueError("api_key differs from the key in the headers of http; leave one of them out")
        if not own and not base_url:
            raise ValueError("neither base_url nor http says where the server is; give base_url")
        self._base_url = own or base_url.rstrip("/")
        self._http = http

    def _new(self, path: str | None, timeout: float, verify: ssl.SSLContext | bool) -> Http:
        """Make an HTTP client, which connects to the unix socket `path` if there is one."""
        raise NotImplementedError

    def _request(self, call: Call[Any]) -> dict[str, Any]:
        """Return arguments for httpx's `request`."""
        url, body = self._base_url + call.path, {} if call.fields is None else {"json": dict(call.fields)}
        return {"method": call.method, "url": url, "headers": self._headers, "content": call.content, **body}

    @method
    def generate(
        self, /, prompt: Prompt, *, policy_version: int | None = None, step_id: int | str | None = None, **fields: Any
    ) -> Call[Generated]:
        """Sample one completion, with its tokens and log-probs.

        `policy_version` is the version that you believe to be served; the answer repeats it beside the version that
        sampled.
        `fields` are those of `/v1/completions`: `max_tokens`, `temperature` and others.
        """
        if fields.get("n", 1) != 1:
            raise ValueError(f"n is {fields['n']}; several completions are for generate_all")
        asked = _completion_fields(_prompt(prompt), policy_version, step_id, fields)
        return Call("POST", "/generate", partial(read_generated, asked), asked)

    @method
    def generate_all(
        self,
        /,
        prompts: Sequence[Prompt],
        *,
        policy_version: int | None = None,
        step_id: int | str | None = None,
        **fields: Any,
    ) -> Call[list[Generated]]:
        """Sample completions of several prompts in one request; with `n`, prompt by prompt."""
        asked = _completion_fields(list(map(_prompt, prompts)), policy_version, step_id, fields)
        return Call("POST", "/generate", lambda answers: [read_generated(asked, answer) for answer in answers], asked)

    @method
    def adapters(self) -> Call[tuple[AdapterCard, ...]]:
        """Return every version in memory."""
        return Call("GET", "/v1/adapters", lambda answer: tuple(map(read_card, answer["data"])))

    @method
    def load_adapter(self, path: str, *, name: str = POLICY) -> Call[AdapterCard]:
        """Serve a folder below the server's `server.adapters_root` as the next version of `name`.

        The policy moves to it in a process that does not train it.
        """
        return Call("POST", "/v1/adapters/load", read_card, {"name": name, "path": path})

    @method
    def upload_adapter(self, name: str, archive: bytes) -> Call[AdapterCard]:
        """Serve a zip archive of adapter_config.json and safetensors as the next version of `name`."""
        return Call("PUT", f"/v1/adapters/{_quoted(name)}", read_card, content=archive)

    @method
    def update_adapter(self, name: str, weights: bytes) -> Call[AdapterCard]:
        """Serve the present version with these tensors (safetensors) in place of its own as the next one."""
        return Call("POST", f"/update_adapter_weights?name={_quoted(name)}", read_card, content=weights)

    @method
    def unload_adapter(self, model: str) -> Call[None]:
        """Forget `poet`, or one version `poet@3`. Requests that run finish first."""
        return Call("DELETE", f"/v1/adapters/{quote(model, safe='@')}", _read_nothing)

    @method
    def adapter_archive(self, model: str) -> Call[bytes]:
        """Return `poet`, `poet@3` or `poet@alias` as a zip archive, which `upload_adapter` takes."""
        return Call("GET", f"/v1/adapters/{quote(model, safe='@')}/archive", bytes, is_file=True)

    @method
    def promote(self, version: int, name: str = POLICY) -> Call[None]:
        """Let the bare name mean this version."""
        return Call("POST", "/v1/adapters/promote", _read_nothing, {"name": name, "version": version})

    @method
    def roll_back(self, name: str = POLICY) -> Call[int]:
        """Let the bare name mean the version below. Returns that version."""
        return Call("POST", "/v1/adapters/rollback", lambda answer: int(answer["version"]), {"name": name})

    @method
    def set_alias(self, alias: str, version: int, name: str = POLICY) -> Call[None]:
        """Let `name@alias` mean a version."""
        fields = {"alias": alias, "name": name, "version": version}
        return Call("POST", "/v1/adapters/aliases", _read_nothing, fields)

    @method
    def remove_alias(self, alias: str, name: str = POLICY) -> Call[None]:
        return Call("DELETE", f"/v1/adapters/{_quoted(name)}/aliases/{_quoted(alias)}", _read_nothing)

    @method
    def training_status(self) -> Call[TrainingStatus]:
        return Call("GET", "/v1/training/status", read_status)

    @method
    def pause_training(self, policy: str | None = None) -> Call[TrainingStatus]:
        """Begin no further step."""
        return Call("POST", "/v1/training/pause", read_status, _given(policy=policy))

    @method
    def resume_training(self, policy: str | None = None) -> Call[TrainingStatus]:
        return Call("POST", "/v1/training/resume", read_status, _given(policy=policy))

    @method
    def train_on(
        self,
        trajectories: Sequence[Mapping[str, Any]],
        *,
        policy: str | None = None,
        update_inference: bool | None = None,
        checkpoint_name: str | None = None,
    ) -> Call[GivenUpdate]:
        """Make one update on trajectories, which `Generated.rewarded` returns, after the present step.

        `update_inference` says whether clients get the new version; `checkpoint_name` saves it under that name.
        """
        fields = _given(
            policy=policy,
            trajectories=[dict(trajectory) for trajectory in trajectories],
            update_inference=update_inference,
            checkpoint_name=checkpoint_name,
        )
        return Call("POST", "/v1/training/update", lambda answer: read_record(GivenUpdate, answer["update"]), fields)

    @method
    def train_step(self, policy: str | None = None) -> Call[TrainingStatus]:
        """Wait for one more step: a new one where training is paused, else the one at work."""
        return Call("POST", "/v1/training/update", read_status, _given(policy=policy))

    @method
    def checkpoint(self, policy: str | None = None) -> Call[dict[str, str]]:
        """Save after the present step. Returns the folder of each policy's checkpoint, on the server's disk."""
        return Call("POST", "/v1/training/checkpoint", lambda answer: dict(answer["folders"]), _given(policy=policy))

    @method
    def evaluate(self, policy: str | None = None) -> Call[dict[str, dict[str, Any]]]:
        """Evaluate the newest version after the present step, unless it was. Returns a row of `evaluations.jsonl` for
        each policy."""
        return Call("POST", "/v1/training/evaluate", lambda answer: dict(answer["evaluations"]), _given(policy=policy))

    @method
    def stop_training(self, policy: str | None = None) -> Call[TrainingStatus]:
        """End training after the present step and save. The server goes on serving."""
        return Call("POST", "/v1/training/stop", read_status, _given(policy=policy))

    @method
    def reward(self, trajectory_id: str, value: Reward) -> Call[float]:
        """Set the reward of a completion with a `trajectory_id`. Returns the sum of its parts."""
        path = f"/v1/trajectories/{_quoted(trajectory_id)}/reward"
        sent = dict(value) if isinstance(value, Mapping) else value
        return Call("POST", path, lambda answer: float(answer["reward"]), {"reward": sent})

    @method
    def trajectories(self) -> Call[dict[str, TrajectoryReport]]:
        """Return what became of these completions, by policy."""
        return Call(
            "GET",
            "/v1/trajectories",
            lambda answer: {name: read_record(TrajectoryReport, report) for name, report in answer["data"].items()},
        )

    @method
    def splits(self) -> Call[dict[str, SplitReport]]:
        """Return each name that clients have asked for: its shares, if it is split, and counts of its versions."""
        return Call("GET", "/v1/splits", lambda answer: {split["name"]: read_split(split) for split in answer["data"]})

    @method
    def set_split(self, name: str, weights: Mapping[str, float]) -> Call[SplitReport]:
        """Let these models answer requests for `name`, by their weights."""
        return Call("PUT", f"/v1/splits/{_quoted(name)}", read_split, {"weights": dict(weights)})

    @method
    def remove_split(self, name: str) -> Call[None]:
        return Call("DELETE", f"/v1/splits/{_quoted(name)}", _read_nothing)

    @method
    def score(self, texts: Sequence[str], *, model: str | None = None) -> Call[list[float]]:
        """Rate texts by the reward model `model`, or by the only one that is loaded."""
        return Call("POST", "/v1/rewards/score", _read_scores, _given(input=list(texts), model=model))

    @method
    def score_completions(
        self, prompt: str | Sequence[Mapping[str, str]], completions: Sequence[str], *, model: str | None = None
    ) -> Call[list[float]]:
        """Rate completions of a prompt, or of the messages of a chat."""
        asked = {"prompt": prompt} if isinstance(prompt, str) else {"messages": [dict(message) for message in prompt]}
        fields = _given(**asked, completions=list(completions), model=model)
        return Call("POST", "/v1/rewards/score", _read_scores, fields)

    @method
    def act(self, /, model: str, observations: Any, **fields: Any) -> Call[dict[str, Any]]:
        """Act on rows of observations by a policy net, `agent` or `agent@3`.

        `observations` are a nested list, a tensor (`{"shape", "datatype", "b64"}`) or tensors by name; `fields` are
        those of `/v1/rl/act`: `hidden_states`, `episode_start`, `deterministic`, `seed`, `encoding`. Returns
        the answer.
        """
        return Call("POST", "/v1/rl/act", dict, {"model": model, "observations": observations, **fields})

    @method
    def publish_policy(self, name: str, weights: bytes) -> Call[str]:
        """Serve a safetensors file as the next version of a policy net; its metadata may have the text of a config.json
        as `config`. Returns the version, such as `agent@4`."""
        return Call("PUT", f"/v1/rl/policies/{_quoted(name)}", lambda answer: str(answer["id"]), content=weights)

    @method
    def shares(self) -> Call[dict[str, float]]:
        """Return `serving_share`, `engine_share` and, if there is one, `serving_latency_target` of the device."""
        return Call("GET", "/v1/shares", dict)

    @method
    def set_shares(
        self,
        *,
        serving_share: float | None = None,
        engine_share: float | None = None,
        serving_latency_target: float | None = None,
    ) -> Call[dict[str, float]]:
        """Change shares or the latency target, until the process ends; a target of 0 ends it. Returns all."""
        fields = {
            "serving_share": serving_share,
            "engine_share": engine_share,
            "serving_latency_target": serving_latency_target,
        }
        return Call("PUT", "/v1/shares", dict, _given(**fields))

    @method
    def cancel(self, request_id: str) -> Call[int]:
        """End the requests of this id, which answer with what they have. Returns their number."""
        path = f"/v1/requests/{_quoted(request_id)}/cancel"
        return Call("POST", path, lambda answer: int(answer["aborted"]))


class Client(Requests[httpx.Client]):
    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def _new(self, path: str | None, timeout: float, verify: ssl.SSLContext | bool) -> httpx.Client:
        if path is None:
            return httpx.Client(timeout=timeout, verify=verify)
        return httpx.Client(transport=httpx.HTTPTransport(verify=False, uds=path), timeout=timeout, trust_env=False)

    def send(self, call: Call[Result]) -> Result:
        """Make a request of your own."""
        return call.result(self._http.request(**self._request(call)))

    def events(self, call: Call[Result]) -> Iterator[Result]:
        """Make a request that is answered by a stream, and yield its events as they come. Leaving the loop ends it.

        Raises ApiError for an error in the stream, too.
        """
        with self._http.stream(**self._request(call)) as response:
            if not response.is_success:
                response.read()
                call.result(response)
            for line in response.iter_lines():
                if call.is_event(line):
                    yield call.event(line, response.status_code)


class AsyncClient(Requests[httpx.AsyncClient]):
    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    def _new(self, path: str | None, timeout: float, verify: ssl.SSLContext | bool) -> httpx.AsyncClient:
        if path is None:
            return httpx.AsyncClient(timeout=timeout, verify=verify)
        transport = httpx.AsyncHTTPTransport(verify=False, uds=path)
        return httpx.AsyncClient(transport=transport, timeout=timeout, trust_env=False)

    async def send(self, call: Call[Result]) -> Result:
        """Make a request of your own."""
        return call.result(await self._http.request(**self._request(call)))

    async def events(self, call: Call[Result]) -> AsyncIterator[Result]:
        """As `Client.events`."""
        async with self._http.stream(**self._request(call)) as response:
            if not response.is_success:
                await response.aread()
                call.result(response)
            async for line in response.aiter_lines():
                if call.is_event(line):
                    yield call.event(line, response.status_code)


def _checked_key(api_key: str) -> str:
    """Refuse a wrong key here, since the error of the HTTP client would show it."""
    if not api_key.strip():
        raise ValueError("api_key is empty; leave it out for a server without keys")
    if api_key != api_key.strip():
        raise ValueError("api_key has white space around it, as a line of a file has its end; give api_key.strip()")
    return api_key


def _completion_fields(
    prompt: object, policy_version: int | None, step_id: int | str | None, fields: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the body. The key `policy_version`, even as null, asks for the answer that `read_generated` reads."""
    return {**fields, "prompt": prompt, "policy_version": policy_version, **_given(step_id=step_id)}


def _given(**fields: Any) -> dict[str, Any]:
    """Return the fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


def _prompt(prompt: Prompt) -> str | list[int]:
    return prompt if isinstance(prompt, str) else list(prompt)


def _quoted(name: str) -> str:
    return quote(name, safe="")


def _read_nothing(_: Any) -> None: ...


def _read_scores(answer: Any) -> list[float]:
    return [float(entry["score"]) for entry in answer["data"]]
