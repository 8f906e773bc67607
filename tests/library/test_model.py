"""A model in the hands of a Python program: scripts, notebooks, threads, mistakes, and what is left behind."""

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import mlx.core as mx
import pytest

import parallm
from parallm.errors import (
    AdapterError,
    ConfigError,
    ContextTooLong,
    InvalidRequest,
    ParallmError,
    Unavailable,
    UnknownModel,
)
from parallm.library.answer import Answer, Prompt
from parallm.model.adapters.adapter import make_adapter
from parallm.model.adapters.files import write_mlx
from parallm.model.adapters.initial import initial_arrays
from parallm.model.shared_model import SharedModel

QUESTION = "Tom has 12 apples and buys 3 bags of 4. How many apples does Tom have now?"
CHAT = [{"role": "user", "content": QUESTION}]
SECONDS = 30.0


@pytest.fixture(scope="module")
def model() -> Iterator[parallm.Model]:
    with parallm.load(overrides=["engine.max_context=256"]) as opened:
        yield opened


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "it has not happened"
        time.sleep(0.005)


def write_adapter(folder: Path, nano: SharedModel, version: int) -> Path:
    arrays = initial_arrays(nano.targets, 4, mx.random.key(version))
    for name in [name for name in arrays if name.endswith("lora_b")]:
        arrays[name] = 0.1 * mx.random.normal(arrays[name].shape, key=mx.random.key(version))
    write_mlx(make_adapter(arrays, version=version, rank=4, alpha=8.0), folder, num_layers=nano.num_layers)
    return folder


def is_running(url: str) -> bool:
    """Whether the engine has anything to do."""
    queue = httpx.get(f"{url}/v1/queue", trust_env=False).json()
    return bool(queue["num_running"] + queue["num_waiting"])


def over_http(url: str, path: str, **fields: object) -> dict[str, object]:
    body = {"model": "policy", "return_token_ids": True, **fields}
    answer = httpx.post(url + path, json=body, trust_env=False, timeout=SECONDS)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    return dict(choice)


def test_a_chat_has_text_tokens_logprobs_and_the_version(model: parallm.Model) -> None:
    answer = model.chat(QUESTION, temperature=0, max_tokens=32)
    assert isinstance(answer, parallm.Answer)
    assert answer == model.chat(CHAT, temperature=0, max_tokens=32)
    assert answer.text.startswith("3 * 4 = 12")
    assert len(answer.tokens) == len(answer.logprobs) > 4
    assert max(answer.logprobs) <= 0
    assert (answer.version, answer.model, answer.finish_reason) == (0, "policy@0", "stop")
    assert answer.trajectory_id is None
    assert answer.choice["message"]["role"] == "assistant"


def test_an_answer_is_short_where_a_notebook_shows_it(model: parallm.Model) -> None:
    answer = model.chat(QUESTION, temperature=0, max_tokens=32)
    assert repr(answer).startswith(f"Answer(text={answer.text!r}, finish_reason='stop', version=0")
    assert len(repr(answer)) < len(answer.text) + 150


def test_http_gives_the_same_tokens_and_the_same_logprobs(model: parallm.Model) -> None:
    here = model.chat(CHAT, temperature=0.7, seed=3, max_tokens=16)
    plain = model.generate(["1 + 1 ="], temperature=0.7, seed=3, max_tokens=16)[0]
    with model.serve(port=0) as server:
        fields = {"temperature": 0.7, "seed": 3, "max_tokens": 16}
        there = over_http(server.url, "/v1/chat/completions", messages=CHAT, logprobs=True, **fields)
        text = over_http(server.url, "/v1/completions", prompt="1 + 1 =", logprobs=0, **fields)
    assert there == here.choice
    assert text == plain.choice


def test_generate_answers_prompts_of_all_kinds_in_their_order(model: parallm.Model) -> None:
    prompts: list[Prompt] = ["1 + 1 =", [5, 6, 7], CHAT, "2 + 2 =", *(f"{number} + 1 =" for number in range(30))]
    answers = model.generate(prompts, n=2, seed=1, max_tokens=4)
    assert len(answers) == 2 * len(prompts)
    assert [answer.prompt_tokens for answer in answers[::2]] == [answer.prompt_tokens for answer in answers[1::2]]
    assert answers[2].prompt_tokens == (5, 6, 7)
    alone = [answer for prompt in prompts for answer in model.generate([prompt], n=2, seed=1, max_tokens=4)]
    assert [(one.text, one.tokens) for one in alone] == [(one.text, one.tokens) for one in answers]
    assert model.generate([]) == []


def test_methods_work_where_an_event_loop_runs_and_are_awaited_beside_each_other(model: parallm.Model) -> None:
    async def notebook() -> tuple[Answer, list[Answer]]:
        blocking = model.chat(QUESTION, temperature=0, max_tokens=8)
        awaited = await asyncio.gather(*(model.achat(QUESTION, temperature=0, max_tokens=8) for _ in range(4)))
        generated = await model.agenerate([CHAT], temperature=0, max_tokens=8)
        return blocking, [*awaited, *generated]

    blocking, others = asyncio.run(notebook())
    assert others == [blocking] * 5


def test_threads_may_use_one_model_at_the_same_time(model: parallm.Model) -> None:
    expected, found = model.chat(QUESTION, temperature=0, max_tokens=8), []
    threads = [
        threading.Thread(target=lambda: found.append(model.chat(QUESTION, temperature=0, max_tokens=8)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert found == [expected] * 4


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda model: model.chat("x", model="nope"), UnknownModel, "no model 'nope'"),
        (lambda model: model.chat("x", model="policy@7"), UnknownModel, "policy@7"),
        (lambda model: model.chat("x", max_token=3), InvalidRequest, "max_token"),
        (lambda model: model.chat("x", temperature=-1.0), InvalidRequest, "temperature"),
        (lambda model: model.chat("x", max_tokens=4000), ContextTooLong, "maximum context length is 256"),
        (lambda model: model.chat("x", n=2), InvalidRequest, "generate"),
        (lambda model: model.chat([]), InvalidRequest, "messages"),
        (lambda model: model.chat({"role": "user", "content": "x"}), InvalidRequest, "messages"),
        (lambda model: model.chat(3), InvalidRequest, "messages"),
        (lambda model: model.generate([3.5]), InvalidRequest, "3.5 is no prompt"),
        (lambda model: model.generate([{"role": "user", "content": "x"}]), InvalidRequest, "is no prompt"),
        (lambda model: model.chat("x", logprobs=True), InvalidRequest, "each answer has"),
        (lambda model: model.generate("x"), InvalidRequest, "list of prompts"),
        (lambda model: model.generate(["x", ""]), InvalidRequest, "prompt"),
        (lambda model: model.versions("nope"), UnknownModel, "no adapter 'nope'"),
        (lambda model: model.promote(7), UnknownModel, "policy@7"),
        (lambda model: model.load_adapter("poet", "/no/such/folder"), AdapterError, "/no/such/folder"),
        (lambda model: model.unload_adapter("poet"), ParallmError, "poet"),
        (lambda model: model.serve(port=70000), ConfigError, "port"),
        (lambda model: model.serve(host="192.0.2.1", port=0), ConfigError, "host=192.0.2.1 can be reached"),
        (lambda model: parallm.load(), ConfigError, "the model nano is open in this process.*close"),
    ],
)
def test_mistakes_are_errors_of_parallm_and_the_model_goes_on(
    model: parallm.Model, call: Callable[[parallm.Model], object], kind: type[ParallmError], words: str
) -> None:
    with pytest.raises(kind, match=words):
        call(model)
    assert model.chat("x", temperature=0, max_tokens=1).finish_reason == "length"


def test_adapters_come_by_name_and_their_versions_are_switched(
    model: parallm.Model, nano: SharedModel, tmp_path: Path
) -> None:
    base = model.chat(QUESTION, temperature=0, max_tokens=8)
    assert model.versions() == []
    for version in (1, 2):
        card = model.load_adapter("poet", write_adapter(tmp_path / str(version), nano, version))
        assert (card.name, card.version, card.is_served) == ("poet", version, True)
    assert model.versions("poet") == [1, 2]
    newest, first = (model.chat(QUESTION, model=name, temperature=0, max_tokens=8) for name in ("poet", "poet@1"))
    assert [newest.model, first.model] == ["poet@2", "poet@1"]
    assert len({base.logprobs, newest.logprobs, first.logprobs}) == 3
    model.promote(1, "poet")
    assert model.chat(QUESTION, model="poet", temperature=0, max_tokens=8) == first
    model.promote(2, "poet")
    assert model.roll_back("poet") == 1
    model.set_alias("good", 2, "poet")
    assert model.chat(QUESTION, model="poet@good", temperature=0, max_tokens=8).logprobs == newest.logprobs
    assert "poet@good" in {card.version: card.aliases for card in model.adapters()}[2]
    model.unload_adapter("poet")
    assert model.adapters() == ()


def test_an_interrupted_call_ends_its_request_and_the_model_goes_on(model: parallm.Model) -> None:
    def interrupt() -> None:
        with model.serve(port=0) as server:
            wait_for(lambda: is_running(server.url))
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        model.generate(["1 + 1 ="] * 64, n=64, max_tokens=200, ignore_eos=True)
    thread.join(SECONDS)
    with model.serve(port=0) as server:
        wait_for(lambda: not is_running(server.url))
    assert model.chat("x", temperature=0, max_tokens=1).finish_reason == "length"


def test_a_cancelled_task_ends_its_request(model: parallm.Model) -> None:
    async def main() -> None:
        task = asyncio.create_task(model.agenerate(["1 + 1 ="], n=64, max_tokens=200, ignore_eos=True))
        await model.achat("x", temperature=0, max_tokens=1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert model.chat("x", temperature=0, max_tokens=1).finish_reason == "length"


def test_a_server_frees_its_port_and_the_model_goes_on_and_can_serve_again(model: parallm.Model) -> None:
    with model.serve(port=0) as server:
        port = urlsplit(server.url).port
        assert port
        with pytest.raises(Unavailable, match="already"):
            model.serve(port=0)
    server.close()
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0
    assert model.chat("x", temperature=0, max_tokens=1).finish_reason == "length"
    with model.serve(port=port) as again:
        assert (
            over_http(again.url, "/v1/completions", prompt="x", temperature=0, max_tokens=1)["finish_reason"]
            == "length"
        )


def test_a_server_that_drains_leaves_calls_from_python_alone(model: parallm.Model) -> None:
    async def main() -> None:
        long = asyncio.create_task(model.agenerate(["1 + 1 ="] * 3, n=64, max_tokens=200, ignore_eos=True))
        server = await asyncio.to_thread(model.serve, port=0)
        await asyncio.to_thread(wait_for, lambda: is_running(server.url))
        await asyncio.to_thread(server.close)
        assert not long.done(), "the end of the server has waited for it, or ended it"
        assert (await model.achat("x", temperature=0, max_tokens=1)).finish_reason == "length"
        long.cancel()

    asyncio.run(main())
