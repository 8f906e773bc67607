"""The engine and whole GRPO steps on a GPU beside vLLM, and TRL with vLLM in its process.

Random weights in bfloat16 on both sides, each in a process of its own, one after the other; the same prompts, the same
numbers of tokens. vLLM runs with torch.compile and CUDA graphs, which are its defaults, and TRL with the number of rows
with which it is fastest. Prompts have nothing in common but in GRPO, so vLLM's cache of prefixes is off elsewhere.

b1, b32, b128: rows of 128 + 128 tokens from the first prompt token on. burst: 256 requests at once, prompts of 32 to
4,096 tokens and outputs of 16 to 1,024. lora, lora8: 32 rows of one adapter and of eight. publish: from a version's
arrays in memory to its first token while 8 requests decode; vLLM reads adapters from files. http: 64 streams.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from bench.compare import described, print_table, ratio
from bench.measurement import Bar, Figures, Request, measurement
from bench.processes import ROOT, SCRIPTS, SECONDS_TO_STOP, free_port, last_json, run_program, work, work_in_parts
from bench.workers.loads import SHAPES, Load, random_prompts

BASE_PARTS, LORA_PARTS = ("b1", "b32", "b128", "burst"), ("lora", "lora8")
LOAD = Load(requests=256, mixed_rows=256)
LIMIT, SECONDS_TO_SERVE = 560.0, 240.0
STEP = {"prompts": 16, "group_size": 8, "prompt": 128, "completion": 512}
SHORTEST = 16
STEP_PARTS = ("seconds", "sampling", "publishing", "scoring", "update")
Found = Mapping[str, Mapping[str, Any]]


@measurement(
    {
        "engine.gpu.8b.b1.vs_vllm": Bar(min=1.05, needs="gpu"),
        "engine.gpu.8b.b32.vs_vllm": Bar(min=1, needs="gpu"),
        "engine.gpu.8b.b128.vs_vllm": Bar(min=1, needs="gpu"),
        "engine.gpu.8b.burst.vs_vllm": Bar(min=1, needs="gpu"),
        "engine.gpu.8b.lora.vs_vllm": Bar(min=1.2, needs="gpu"),
        "engine.gpu.8b.lora8.vs_vllm": Bar(min=1.4, needs="gpu"),
        "publish.gpu.8b.vs_vllm": Bar(),
    },
    minutes=7,
    needs="gpu",
)
def vllm_loads(request: Request) -> Iterator[Figures]:
    """Tokens/s from the first prompt token to the last one sampled. vLLM has one process for the base, one for LoRA."""
    names = [name for name in (*BASE_PARTS, *LORA_PARTS) if request.wants(f"engine.gpu.8b.{name}.vs_vllm")]
    publishes = ["publish"] if request.wants("publish.gpu.8b.vs_vllm") else []
    ours = dict(results(work_in_parts("engine_parts", is_peer=False, **parts_job(names)))) if names else {}
    theirs: dict[str, Mapping[str, Any]] = {}
    for has_lora, parts in ((False, BASE_PARTS), (True, (*LORA_PARTS, "publish"))):
        if chosen := [name for name in [*names, *publishes] if name in parts]:
            for name, part in results(vllm_work(request, "vllm_parts", **parts_job(chosen), has_lora=has_lora)):
                theirs[name] = part
                yield load_figures([name], ours, theirs) if name in names else {}
    if publishes and "publish" in theirs:
        yield publish_figures(work("publish_speed", shape="8b", repeats=20), theirs["publish"])


def publish_figures(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Figures:
    """A new version's first token, its publication included: vLLM's milliseconds over ours."""
    names = ("publish", "to_first_token", "without")
    rows = [(name, *(median(side[name]) for side in (ours, theirs))) for name in names]
    print_table("Publishing an adapter of rank 16, ms", [("", "ours", "vLLM"), *rows])
    return {"publish.gpu.8b.vs_vllm": median(theirs["to_first_token"]) / median(ours["to_first_token"])}


def parts_job(names: Sequence[str]) -> dict[str, Any]:
    return {"shape": "8b", "parts": list(names), "load": asdict(LOAD), "limit": LIMIT}


def results(parts: Iterator[Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """With their names, without those that have failed; each is printed as it comes."""
    for part in parts:
        print(f"  {part}", flush=True)
        if "error" not in part:
            yield part["part"], part


def load_figures(names: Sequence[str], ours: Found, theirs: Found) -> Figures:
    """Raises ValueError if two sides did not do the same work; nothing where one of them has failed."""
    figures: Figures = {}
    rows = []
    for name in names:
        if name not in ours or name not in theirs:
            continue
        one, other = ours[name], theirs[name]
        tokens = one.get("tokens", other["tokens"])  # the part of adapters does not tell its own
        if one.get("accepted") or tokens != other["tokens"]:
            raise ValueError(
                f"{name}: {tokens} tokens of ours, {one.get('accepted')} of them guessed; {other['tokens']}"
            )
        speeds = [tokens / median(side["seconds"]) for side in (one, other)]
        figures[f"engine.gpu.8b.{name}.vs_vllm"] = speeds[0] / speeds[1]
        rows.append((name, *speeds, speeds[0] / speeds[1]))
    print_table("8B beside vLLM, tokens/s", [("", "ours", "vLLM", "ratio"), *rows])
    return figures


@measurement(
    {"engine.http.vs_vllm_serve": Bar(min=1, needs="gpu"), "engine.http.vs_vllm_serve_every_token": Bar()},
    minutes=4,
    needs="gpu",
)
def vllm_http(request: Request) -> Figures:
    """Tokens/s of 64 streams over loopback, as each server sends them by default, and ours with each token at once.

    Both have a tokenizer in which each token is a word, so that both send as much text.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch = {"python": request.torch_python, "environment": {"BENCH_BLAS_LIBRARY": ""}}
        work("random_checkpoint", **torch, folder=name, config=SHAPES["8b"], has_weights=False)
        job = {"model": "nano", "data": request.data, "shape": "8b", "streams": 64, "max_tokens": 160, "rounds": 3}
        ours = work("http_speed", **job, tokenizer=name)
        print(f"  {ours}", flush=True)
        return http_figures(request, folder, ours)


def http_figures(request: Request, folder: Path, ours: Mapping[str, Any]) -> Figures:
    with serving(request, folder) as port:
        lengths = ours["prompt_lengths"]
        theirs = [
            stream_seconds(port, lengths, vocabulary=SHAPES["8b"]["vocab_size"], max_tokens=160) for _ in range(4)
        ]
    speeds = [len(lengths) * 160 / seconds for seconds in theirs[1:]]
    rows = [(name, median(ours[name])) for name in ("engine", "every_token", "coalesced")]
    print_table("64 streams, tokens/s", [("", "median"), *rows, ("vllm serve", median(speeds))])
    return {
        "engine.http.vs_vllm_serve": ratio(ours["coalesced"], speeds),
        "engine.http.vs_vllm_serve_every_token": ratio(ours["every_token"], speeds),
    }


@measurement(
    {f"grpo_step.gpu.{shape}.vs_trl_vllm": Bar(min=1.5, needs="gpu") for shape in ("05b", "8b")},
    minutes=10,
    needs="gpu",
)
def grpo_vllm(request: Request) -> Iterator[Figures]:
    """A whole step (sample, score, update, publish) of 16 x 8 completions of 16 to 512 tokens beside TRL with vLLM.

    Lengths are drawn for each completion, the same on both sides, as if an end token came there. Both load the same
    random weights; TRL's attention is PyTorch's own, as no other is installed, and its rows are padded.
    """
    for shape, passes in (("0.5b", (32, 16)), ("8b", (8, 4))):
        name = f"grpo_step.gpu.{shape.replace('.', '')}.vs_trl_vllm"
        if request.wants(name):
            yield from ({name: value} for value in grpo_figures(request, shape, passes))


def grpo_figures(request: Request, shape: str, passes: Sequence[int]) -> Iterator[float]:
    """The ratio beside the fastest number of rows so far, as each of them is there."""
    with tempfile.TemporaryDirectory() as model:
        torch = {"python": request.torch_python, "environment": {"BENCH_BLAS_LIBRARY": ""}}
        work("random_checkpoint", **torch, folder=model, config=SHAPES[shape])
        job = {"model": model, "vocabulary": SHAPES[shape]["vocab_size"], "warm_up": 2, "steps": 2, **STEP}
        ours = work("grpo_steps", **job, shortest=SHORTEST) | {"settings": {}}
        print(f"  {ours}", flush=True)
        found = []
        for one in vllm_work(request, "trl_vllm_steps", limit=LIMIT, **job, shortest=SHORTEST, rows=passes):
            print(f"  {one}", flush=True)
            if "error" in one:
                continue
            if ours["sampled_tokens"] != one["sampled_tokens"]:
                raise ValueError(f"{ours['sampled_tokens']} sampled tokens of ours, {one['sampled_tokens']} of TRL's")
            found.append(one)
            yield step_figure(shape, ours, min(found, key=lambda one: median(one["seconds"])))


def step_figure(shape: str, ours: Mapping[str, Any], peer: Mapping[str, Any]) -> float:
    """TRL's seconds over ours."""
    rows = [
        (
            who,
            *(median(one[part]) if part in one else "-" for part in STEP_PARTS),
            one["peak_gb"],
            described(one["settings"]),
        )
        for who, one in (("parallm", ours), ("TRL + vLLM", peer))
    ]
    print_table(f"One GRPO step of ragged completions: {shape}", [("", *STEP_PARTS, "peak GB", "settings"), *rows])
    return median(peer["seconds"]) / median(ours["seconds"])


# vLLM's processes ----------------------------------------------------------------------------------------------------


def vllm_environment(request: Request) -> dict[str, str]:
    """vLLM's packages first, then what the machine has; nothing is fetched or told to anybody."""
    paths = [*([str(request.vllm)] if request.vllm else []), str(SCRIPTS), str(ROOT), os.environ.get("PYTHONPATH", "")]
    local = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "lo")
    return local | {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "BENCH_BLAS_LIBRARY": "",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # offline: no other process between us and the steps
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it would be compiled first
        "NCCL_NVLS_ENABLE": "0",
    }


def vllm_work(request: Request, name: str, **keywords: Any) -> Iterator[dict[str, Any]]:
    return work_in_parts(
        name, is_peer=True, python=request.torch_python, environment=vllm_environment(request), **keywords
    )


@contextmanager
def serving(request: Request, folder: Path) -> Iterator[int]:
    """`vllm serve` of the model in `folder` with random weights; gives its port. Raises RuntimeError if it does not
    answer."""
    port, log = free_port(), folder / "serve.log"
    options = [
        "--load-format",
        "dummy",
        "--served-model-name",
        "base",
        "--no-enable-prefix-caching",
        "--dtype",
        "bfloat16",
    ]
    sizes = ["--max-model-len", "5376", "--max-num-seqs", "256", "--gpu-memory-utilization", "0.8"]
    command = [
        request.torch_python,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(folder),
        *options,
        *sizes,
    ]
    environment = {**os.environ, **vllm_environment(request), "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)], env=environment, stdout=output, stderr=output
        )
    try:
        wait_for_server(process, port, log)
        yield port
    finally:
        process.terminate()
        try:
            process.wait(SECONDS_TO_STOP)
        except subprocess.TimeoutExpired:
            process.kill()


def wait_for_server(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + SECONDS_TO_SERVE
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise RuntimeError(f"vllm serve did not answer:\n{log.read_text(errors='replace')[-3000:]}")


def stream_seconds(port: int, lengths: Sequence[int], *, vocabulary: int, max_tokens: int) -> float:
    """Seconds of one stream for each prompt length, with the same clients as ours."""
    prompts = [random_prompts(vocabulary, 1, length, seed)[0] for seed, length in enumerate(lengths)]
    body = {"model": "base", "max_tokens": max_tokens, "stream": True, "ignore_eos": True, "temperature": 1.0}
    bodies = json.dumps([body | {"prompt": list(prompt)} for prompt in prompts])
    reader = [sys.executable, str(SCRIPTS / "bench" / "workers" / "stream_reader.py"), str(port)]
    return float(last_json(run_program(reader, given=bodies))["seconds"])
