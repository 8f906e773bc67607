"""A base that is divided between processes: the numbers of the whole one, over TCP rings, and a server of it."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.convert import convert

from parallm.config.schema import ServeConfig
from parallm.distributed.settings import ServingSettings
from parallm.errors import ConfigError
from parallm.model.adapters.files import write_peft
from parallm.model.kernels.all_sum import PeerMemory
from parallm.model.kernels.segmented_lora import ShrinkOutput
from parallm.model.load import load_shared_model
from parallm.model.patches.forward import FusedAdd
from parallm.model.settings import ModelSettings
from parallm.model.tensor_parallel import Ranks, TensorParallel
from parallm.run.serve import checked, open_serving
from parallm.server.operation.http_server import Listener
from tests import conftest
from tests.distributed.conftest import ROOT, free_ports, run_ranks
from tests.distributed.rank_logits import adapter_of, logits_of, settings_of, weights_of
from tests.model.lora.test_segmented import random_versions
from tests.tiny_models import write_model

ARCHITECTURES = ("llama", "qwen2", "qwen3")
WIDE = {"intermediate_size": 128}
"""So that the groups of four-bit weights, too, divide by two."""
LIMIT_SECONDS = 120
LITTLE = 16 * 96 * 512
"""Bytes of keys and values for a part of the requests that come at once."""
EXCHANGE_FAILED = 75
IN_A_LAYER = 0.25
"""Times the weights of tiny models, so that a layer adds as little to the residual stream as in a real one."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Small models with random weights, and `-4`, one in four bits."""
    made = {}
    for name in ARCHITECTURES:
        made[name] = tmp_path_factory.mktemp(name)
        write_model(made[name], name, **WIDE)
    made["llama-4"] = tmp_path_factory.mktemp("llama-4") / "model"
    convert(str(made["llama"]), str(made["llama-4"]), quantize=True, q_bits=4, q_group_size=32)
    return made


def logits_of_two_ranks(tmp_path: Path, cases: Sequence[str]) -> Mapping[str, np.ndarray]:
    """What rank 0 writes."""
    output = tmp_path / "logits.npz"
    run_ranks(tmp_path, "tests.distributed.rank_logits", str(output), *cases)
    return dict(np.load(output))


def test_logits_of_two_ranks_are_those_of_one(folders: Mapping[str, Path], tmp_path: Path) -> None:
    cases = [f"{folders[name]}:auto:auto" for name in ARCHITECTURES] + [f"{folders['llama-4']}:packed:auto"]
    divided = logits_of_two_ranks(tmp_path, cases)
    for case in cases:
        whole = load_shared_model(settings_of(case))
        logits = logits_of(whole)
        for name, expected in logits.items():
            np.testing.assert_allclose(divided[f"{case} {name}"], expected, atol=4e-5)
        assert np.abs(logits["lora"] - logits["base"]).max() > 1  # what a wrong part of an adapter would change
        assert str(divided[f"{case} sha256"]) == whole.sha256
        assert int(divided[f"{case} bytes"]) * 2 == sum(layer.nbytes for layer in weights_of(whole))


def test_two_ranks_in_bfloat16_are_nearer_to_float32_than_one(tmp_path: Path) -> None:
    write_model(tmp_path, "llama", **WIDE, num_hidden_layers=24)
    file = str(tmp_path / "model.safetensors")
    weights = {name: array * (IN_A_LAYER if ".layers." in name else 1) for name, array in mx.load(file).items()}
    mx.save_safetensors(file, {name: array.astype(mx.bfloat16) for name, array in weights.items()})
    cases = [f"{tmp_path}:auto:{dtype}" for dtype in ("bfloat16", "float32")]
    divided = logits_of_two_ranks(tmp_path, cases[:1])[f"{cases[0]} base"]
    whole, exact = (logits_of(load_shared_model(settings_of(case)))["base"] for case in cases)
    assert rms(divided - exact) < 0.5 * rms(whole - exact)


def rms(difference_TV: np.ndarray) -> float:
    return float(np.sqrt(np.square(difference_TV).mean()))


@pytest.fixture
def config() -> ServeConfig:
    return ServeConfig(distributed=ServingSettings(tensor_parallel=2))


@pytest.mark.parametrize("has_lora", [False, True])
def test_what_a_rank_sends_has_its_lora(has_lora: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts of a product lack it."""
    monkeypatch.setattr("parallm.model.tensor_parallel.sum_add_norm.fits", lambda *_: True)
    monkeypatch.setattr("parallm.model.tensor_parallel.fits", lambda *_: False)
    ranks = Ranks(group=mx.distributed.init(), peers=PeerMemory(rank=0, size=1, addresses=mx.zeros(1, mx.uint64)))
    parallel = TensorParallel(ranks=ranks, by_outputs=frozenset(), by_inputs=frozenset(), stream=None)
    weights, y_B1H = random_versions(8, [8], [8], 1, mx.float32).weights, mx.full((3, 1, 8), 3.0)
    lora = ShrinkOutput(weights=weights, order_B2=mx.zeros((3, 2)), hidden_PBTK=mx.zeros((1, 3, 1, 8)))
    own = FusedAdd(y_B1H, lambda stream: y_B1H + stream, mx.ones((2, 3, 1, 8)), lora=lora if has_lora else None)
    sent_SB1H = parallel.output(own).parts
    assert sent_SB1H is not None
    assert sent_SB1H.sum(axis=0).tolist() == mx.full((3, 1, 8), 3.0 if has_lora else 2.0).tolist()


def test_a_reward_model_is_refused_beside_a_divided_base(config: ServeConfig) -> None:
    with pytest.raises(ConfigError, match=r"server\.reward_model=judge: a base that is divided"):
        checked(replace(config, server=replace(config.server, reward_model="judge")))


def test_a_process_alone_does_not_divide_a_base(config: ServeConfig) -> None:
    opened = open_serving(config, conftest.BLAS, Listener(keys=()), folder=None)
    with pytest.raises(ConfigError, match=r"start them by `python -m parallm\.serve`"):
        asyncio.run(opened.__aenter__())


class Divided:
    """`python -m parallm.serve distributed.tensor_parallel=2` on a free port."""

    def __init__(self, folder: Path, *keys: str) -> None:
        self.folder = folder
        self.url = f"http://127.0.0.1:{free_ports(1)[0]}"
        self._log = (folder / "log.txt").open("w+")
        port = self.url.rpartition(":")[2]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "parallm.serve", f"server.port={port}", *keys],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            cwd=folder,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def wait_until_ready(self) -> None:
        end = time.monotonic() + LIMIT_SECONDS
        while time.monotonic() < end:
            assert self.process.poll() is None, self.log
            with suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health").status_code == 200:
                    return
            time.sleep(0.1)
        raise AssertionError(self.log)

    def complete(self, **body: Any) -> dict[str, Any]:
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=60)
        result: dict[str, Any] = answer.json()
        return result

    def rank(self, number: int) -> int:
        """The process of a rank."""
        status = json.loads((self.folder / "checkpoints" / "serve" / "ranks" / str(number) / "worker.json").read_text())
        return int(status["process"])

    @property
    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def end(self) -> None:
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        self.process.kill()
        self._log.close()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Divided]]:
    made: list[Divided] = []

    def start(name: str, *keys: str) -> Divided:
        (tmp_path / name).mkdir()
        made.append(Divided(tmp_path / name, *keys))
        return made[-1]

    yield start
    for one in made:
        one.end()


def greedy(place: int, **more: Any) -> dict[str, Any]:
    """Two prompts, each with the base and the adapter, of 60 tokens and up to 120 sampled ones."""
    prompt = f"Anna has {place // 2 % 2} apples and pears. " * 5
    model = ("base", "policy")[place % 2]
    return {"model": model, "prompt": prompt, "max_tokens": 60 + 5 * place, "temperature": 0, "logprobs": 0} | more


def figure(metrics: str, name: str) -> float:
    """A figure of /metrics."""
    found = re.search(rf"^{name}(?:{{.*}})? (\S+)$", metrics, re.MULTILINE)
    assert found is not None, metrics
    return float(found[1])


def test_a_divided_server_answers_as_a_whole_one_and_ends_well(
    serve: Callable[..., Divided], folders: Mapping[str, Path]
) -> None:
    whole = load_shared_model(ModelSettings(path=str(folders["llama"])))
    write_peft(adapter_of(whole, 1), folders["llama"] / "adapter", base_name="llama", model_type="llama")
    keys = (f"model.path={folders['llama']}", f"model.adapter={folders['llama'] / 'adapter'}", "engine.max_context=512")
    one = serve("one", *keys, f"engine.kv_cache_bytes={LITTLE}")
    two = serve("two", *keys, f"engine.kv_cache_bytes={LITTLE // 2}", "distributed.tensor_parallel=2")
    answers = []
    for server in (one, two):
        server.wait_until_ready()
        with ThreadPoolExecutor(6) as pool:
            some = list(pool.map(lambda place: server.complete(**greedy(place)), range(6)))  # noqa: B023
        many = server.complete(**greedy(1, n=8, max_tokens=200, ignore_eos=True))  # more than there is memory for
        answers.append([*some, many, *(server.complete(**greedy(0)) for _ in range(2))])
        metrics = httpx.get(f"{server.url}/metrics").text
        assert figure(metrics, "vllm:num_preemptions_total") > 0, metrics
        assert figure(metrics, "vllm:prefix_cache_hits_total") > 0, metrics
    assert answers[0][0]["choices"][0]["text"] != answers[0][1]["choices"][0]["text"]
    choices = [[choice for answer in side for choice in answer["choices"]] for side in answers]
    for ours, theirs in zip(*choices, strict=True):
        assert ours["text"] == theirs["text"]
        one_T, two_T = (choice["logprobs"]["token_logprobs"] for choice in (ours, theirs))
        np.testing.assert_allclose(two_T, one_T, atol=1e-4)
    refused = httpx.post(f"{two.url}/v1/embeddings", json={"model": "base", "input": "pears"})
    assert refused.status_code >= 400
    assert "divided between devices" in refused.text
    two.process.send_signal(signal.SIGTERM)
    assert two.process.wait(LIMIT_SECONDS) == 0, two.log


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_rank_ends_the_server_with_a_reason(
    serve: Callable[..., Divided], folders: Mapping[str, Path], killed: int
) -> None:
    server = serve("two", f"model.path={folders['llama']}", "distributed.tensor_parallel=2")
    server.wait_until_ready()
    answers: list[Any] = []

    def ask() -> None:
        with suppress(httpx.TransportError):
            answers.append(server.complete(**greedy(0, max_tokens=400, ignore_eos=True)))

    client = threading.Thread(target=ask)
    client.start()
    time.sleep(0.3)
    os.kill(server.rank(killed), signal.SIGKILL)
    began = time.monotonic()
    assert server.process.wait(LIMIT_SECONDS) == 128 + signal.SIGKILL, server.log
    assert time.monotonic() - began < 20
    client.join()
    assert re.search(rf"rank {killed} is gone: its connection has ended", server.log)
    if killed == 1 and answers:
        assert "rank 1 is gone" in json.dumps(answers[0])


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_server_after_the_time_limit(
    serve: Callable[..., Divided], folders: Mapping[str, Path]
) -> None:
    keys = ("distributed.tensor_parallel=2", "distributed.timeout_seconds=20")
    server = serve("two", f"model.path={folders['llama']}", *keys)
    server.wait_until_ready()
    stopped = server.rank(1)
    os.kill(stopped, signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(1) as pool, suppress(httpx.TransportError):
            pool.submit(server.complete, **greedy(0)).result()
        assert server.process.wait(LIMIT_SECONDS) != 0
        assert "no answer in 20 seconds (distributed.timeout_seconds)" in server.log
    finally:
        with suppress(ProcessLookupError):
            os.kill(stopped, signal.SIGCONT)


def test_a_base_that_cannot_be_divided_is_refused_before_anything_is_served(
    serve: Callable[..., Divided], folders: Mapping[str, Path]
) -> None:
    server = serve("three", f"model.path={folders['llama']}", "distributed.tensor_parallel=3")
    assert server.process.wait(LIMIT_SECONDS) == 1, server.log
    assert "num_attention_heads is 4, which distributed.tensor_parallel=3 does not divide" in server.log
