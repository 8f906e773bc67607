"""Times of vLLM on a shape with random weights, part by part: those of `engine_parts.py`, with the same prompts.

In an environment without MLX. CUDA graphs and torch.compile are on, as vLLM has them by default; prefixes are not
cached, since no two prompts have one in common, and nothing becomes text. `publish`: an adapter of rank 16 that a
trainer has in memory is written as vLLM reads it, and answers a request for one token, while 8 requests decode.
"""

import itertools
import json
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

from bench.workers.loads import SHAPES, Load, Tokens, check_tokens, random_burst, random_prompts, read_load
from bench.workers.random_checkpoint import write_config

VERSIONS, LORA_ROWS, RANK = 8, 32, 16
CLIENTS, PUBLISHES = 8, 20
MAX_ROWS, MAX_POSITIONS = 256, 5376
GRAPH_SIZES = (1, 2, 4, *range(8, MAX_ROWS + 1, 8))
Arrays = dict[str, torch.Tensor]


class Bench:
    def __init__(self, shape: str, load: Load, folder: Path, *, has_lora: bool) -> None:
        self._load = load
        self._shape = SHAPES[shape]
        self._folder = folder
        write_config(folder, self._shape)
        rows = LORA_ROWS if has_lora else MAX_ROWS
        options: dict[str, Any] = {}
        if has_lora:
            options = {"enable_lora": True, "max_loras": VERSIONS, "max_lora_rank": RANK, "max_cpu_loras": VERSIONS}
        self._llm = LLM(
            model=str(folder),
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=min(MAX_POSITIONS, self._shape["max_position_embeddings"]),
            max_num_seqs=rows,
            max_num_batched_tokens=8192,
            gpu_memory_utilization=0.8,
            enable_prefix_caching=False,
            generation_config="vllm",
            compilation_config={"cudagraph_capture_sizes": [size for size in GRAPH_SIZES if size <= rows]},
            disable_log_stats=True,
            seed=0,
            **options,
        )
        self._num_runs = 0
        self._clients: set[str] = set()
        """Requests that decode while adapters are published."""

    def parts(self) -> dict[str, Callable[[], dict[str, Any]]]:
        same = {f"b{rows}": partial(self.same_lengths, [None] * rows) for rows in (1, 32, 128)}
        lora = {"lora": partial(self.lora, 1), "lora8": partial(self.lora, VERSIONS), "publish": self.publish}
        return same | lora | {"burst": self.burst}

    def settings(self) -> dict[str, Any]:
        config = self._llm.llm_engine.vllm_config
        return {
            "compilation": str(config.compilation_config.mode),
            "graphs": str(config.compilation_config.cudagraph_mode),
            "async": bool(config.scheduler_config.async_scheduling),
        }

    def same_lengths(self, adapters: Sequence[LoRARequest | None]) -> dict[str, Any]:
        """Rows that begin and end together; the first turn warms up."""
        rows, load = len(adapters), self._load
        limits = [load.new] * rows
        seconds = [self._generate(self._prompts(rows), limits, adapters) for _ in range(load.repeats + 1)]
        return {"tokens": rows * load.new, "seconds": seconds[1:]}

    def burst(self) -> dict[str, Any]:
        """Requests of all lengths at once, after a quarter as many that warm up."""
        for seed, count in ((1, self._load.requests // 4), (0, self._load.requests)):
            arrivals = random_burst(self._load, self._shape["vocab_size"], seed)[:count]
            limits = [one.num_new for one in arrivals]
            seconds = self._generate([one.prompt for one in arrivals], limits, [None] * count)
        return {"tokens": sum(limits), "seconds": [seconds]}

    def lora(self, versions: int) -> dict[str, Any]:
        adapters = [self._adapter(version) for version in range(1, versions + 1)]
        return self.same_lengths([adapters[row % versions] for row in range(LORA_ROWS)])

    def publish(self) -> dict[str, Any]:
        """Milliseconds from a version's arrays in memory until its first token, and until one of a known version."""
        arrays = self._arrays()
        times: dict[str, list[float]] = {"publish": [], "to_first_token": [], "without": []}
        for version in range(VERSIONS + 1, VERSIONS + 1 + PUBLISHES):
            began = time.perf_counter()
            adapter = self._adapter(version, arrays)
            times["publish"].append(time.perf_counter() - began)
            first = self._seconds_to_token(adapter, f"after-{version}")
            times["to_first_token"].append(times["publish"][-1] + first)
            times["without"].append(self._seconds_to_token(adapter, f"without-{version}"))
        self._llm.llm_engine.abort_request(list(self._clients))
        return {name: [1e3 * one for one in seconds] for name, seconds in times.items()}

    def _seconds_to_token(self, adapter: LoRARequest, name: str) -> float:
        for number in range(CLIENTS - len(self._clients)):
            self._add(f"client-{name}-{number}", self._load.new)
            self._clients.add(f"client-{name}-{number}")
        for _ in range(4):  # until all of them decode
            self._step()
        began = time.perf_counter()
        self._add(name, 1, adapter)
        while name not in self._step():
            pass
        return time.perf_counter() - began

    def _add(self, name: str, limit: int, adapter: LoRARequest | None = None) -> None:
        prompt = {"prompt_token_ids": list(self._prompts(1)[0])}
        self._llm.llm_engine.add_request(name, prompt, sampling(limit), lora_request=adapter)

    def _step(self) -> set[str]:
        """One step; the requests that ended."""
        ended = {output.request_id for output in self._llm.llm_engine.step() if output.finished}
        self._clients -= ended
        return ended

    def _prompts(self, rows: int) -> list[Tokens]:
        self._num_runs += 1
        return random_prompts(self._shape["vocab_size"], rows, self._load.prompt, seed=1000 + self._num_runs)

    def _generate(
        self, prompts: Sequence[Tokens], limits: Sequence[int], adapters: Sequence[LoRARequest | None]
    ) -> float:
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        params = [sampling(limit) for limit in limits]
        loras = list(adapters) if any(adapters) else None
        began = time.perf_counter()
        outputs = self._llm.generate(asked, params, use_tqdm=False, lora_request=loras)
        seconds = time.perf_counter() - began
        check_tokens(sum(len(output.outputs[0].token_ids) for output in outputs), sum(limits))
        return seconds

    def _arrays(self) -> Arrays:
        """A and B of all linear layers, drawn from one pool: speed does not depend on them."""
        sizes = self._shape
        hidden, wide, head = sizes["hidden_size"], sizes["intermediate_size"], sizes["head_dim"]
        queries, keys = sizes["num_attention_heads"] * head, sizes["num_key_value_heads"] * head
        targets = {"self_attn.q_proj": (hidden, queries), "self_attn.o_proj": (queries, hidden)}
        targets |= {f"self_attn.{name}_proj": (hidden, keys) for name in "kv"}
        targets |= {f"mlp.{name}_proj": (hidden, wide) for name in ("gate", "up")} | {"mlp.down_proj": (wide, hidden)}
        pool = (torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)) * 0.01).to(torch.bfloat16)
        arrays: Arrays = {}
        for layer, (name, (inputs, outputs)) in itertools.product(range(sizes["num_hidden_layers"]), targets.items()):
            key = f"base_model.model.model.layers.{layer}.{name}"
            arrays[f"{key}.lora_A.weight"] = pool[: RANK * inputs].clone().view(RANK, inputs)
            arrays[f"{key}.lora_B.weight"] = pool[: RANK * outputs].clone().view(outputs, RANK)
        return arrays

    def _adapter(self, version: int, arrays: Arrays | None = None) -> LoRARequest:
        """An adapter as PEFT writes it."""
        folder = self._folder / f"adapter{version}"
        folder.mkdir(exist_ok=True)
        targets = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
        config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "bias": "none", "target_modules": targets}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        save_file(arrays or self._arrays(), folder / "adapter_model.safetensors", metadata={"format": "pt"})
        return LoRARequest(f"policy{version}", version, str(folder))


def sampling(limit: int) -> SamplingParams:
    """Greedy, to the end of the limit."""
    return SamplingParams(temperature=0.0, max_tokens=limit, ignore_eos=True, detokenize=False)


def main(*, shape: str, parts: Sequence[str], load: dict[str, Any], has_lora: bool) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        bench = Bench(shape, read_load(load), Path(folder), has_lora=has_lora)
        yield {"part": "start", "seconds": time.perf_counter() - began, **bench.settings()}
        measures = bench.parts()
        for name in parts:
            try:
                result = measures[name]()
            except Exception as error:  # noqa: BLE001  # whatever it was, the other parts are measured
                traceback.print_exc()
                result = {"error": f"{type(error).__name__}: {error}"}
            yield {"part": name, **result}
    os._exit(0)  # vLLM's threads may outlive its engine
