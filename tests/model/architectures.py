"""What ParaLLM does with each model file of mlx-lm: a trial of a tiny model, and the table of all trials.

A trial serves ragged prompts that join and leave, compares their greedy tokens with mlx-lm's own `generate_step`, and
makes an update of what was sampled, with LoRA on all linear layers and experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models
import numpy as np
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model

from parallm.device.blas import set_blas_threads
from parallm.device.streams import DeviceStreams
from parallm.engine.engine import Engine
from parallm.engine.settings import EngineSettings
from parallm.engine.state_trial import shares_steps
from parallm.errors import ParallmError
from parallm.learner.learner import Learner
from parallm.learner.passes.packing import can_pack
from parallm.learner.settings import LearnerSettings
from parallm.model.adapters.adapter import Adapter, make_adapter
from parallm.model.adapters.initial import initial_arrays
from parallm.model.adapters.table import AdapterTable
from parallm.model.load import load_shared_model
from parallm.model.settings import LoraSettings, ModelSettings
from parallm.model.shared_model import SharedModel
from parallm.reports import UpdateReport
from parallm.types import (
    Completion,
    GenerationRequest,
    Message,
    Problem,
    SamplingParams,
    TokenEvent,
    Trajectory,
    TrajectoryGroup,
)
from tests.conftest import BLAS
from tests.engine.conftest import by_request, step
from tests.tiny_models import write_model

HELPERS = frozenset(
    {
        *("__init__", "activations", "base", "bitlinear_layers", "cache", "gated_delta", "mla", "pipeline"),
        *("rope_utils", "ssm", "switch_layers"),
    }
)
"""Files that hold no model."""
UNTRIED = {
    "bitnet": "its layers are kernels for Metal",
    "muse_spark": "its attention is a kernel for Metal",
    "olmo": "its class needs the package ai2-olmo",
    "deepseek_v41": "no tiny config",
    "prism_hadamard_qwen35": "no tiny config: it loads packed weights alone",
}
"""Files without a trial here, and why."""
HEAD = """\
# Architectures

Written by `scripts/build_architecture_table.py`: what ParaLLM does on a CPU with each model file of mlx-lm, as a trial
with tiny random weights shows it. `served`: rows together in one forward, or one after the other. `trained`: an update
of sampled completions with LoRA on all linear layers and experts, packed or row by row; the learner's log-probs are the
sampler's. `tokens`: greedy tokens of ragged prompts beside those of mlx-lm itself.

Of {files} files {tried} give mlx-lm's tokens, {batched} of them batched; {packed} are trained packed.

| file of mlx-lm | served | trained | LoRA targets | tokens |
|---|---|---|---|---|"""
DIFFERENT = {
    "phi3small": "differ: mlx-lm adds a mask of booleans to scores, so that prompts see the tokens after them",
}
"""Files whose tokens differ, and why."""
WITHOUT_CACHE = frozenset({"plamo3"})
"""Files that are compared with mlx-lm's forward of whole texts: plamo3's caches hold one position less than its masks
let a token see."""
LENGTHS, MAX_TOKENS = (5, 1, 23, 9, 37, 3), 10
NEAR = 1e-3
"""Nats between two tokens that may take each other's place."""
MAX_PARITY = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of the table."""

    served: str
    """`batched`, `row by row`, or why not."""
    trained: str
    """`packed`, `row by row`, or why not."""
    targets: str
    tokens: str
    """How the greedy tokens compare with mlx-lm's."""

    @property
    def is_tried(self) -> bool:
        return self.tokens == "equal"

    def cells(self, name: str) -> str:
        return f"| {name} | {self.served} | {self.trained} | {self.targets} | {self.tokens} |"


def model_files() -> list[str]:
    """The names of mlx-lm's model files, in order."""
    folder = Path(mlx_lm.models.__path__[0])
    return sorted({path.stem for path in folder.glob("*.py")} - HELPERS, key=str.lower)


def trial(name: str) -> Row:
    """Serve and train a tiny model of the architecture."""
    if name in UNTRIED:
        return Row(served="not tried", trained="not tried", targets="", tokens=UNTRIED[name])
    try:
        return _trial(name)
    except Exception as error:  # noqa: BLE001  # whatever it is, the table says it
        reason = " ".join(str(error).split())[:100]
        return Row(served="fails", trained="fails", targets="", tokens=f"{type(error).__name__}: {reason}")


def _trial(name: str) -> Row:
    with TemporaryDirectory() as folder:
        write_model(Path(folder), name)
        try:
            model = _load(Path(folder))
        except ParallmError as error:
            return Row(served="does not load", trained="-", targets="", tokens=str(error).splitlines()[0][-120:])
        reference, _ = load_model(Path(folder))
        prompts = [[int(t) for t in np.random.default_rng(n).integers(2, 385, n)] for n in LENGTHS]
        adapter = _adapter(model)
        table = AdapterTable()
        table.publish(adapter)
        made = _complete(model, [_request(i, prompt, "base", 0.0) for i, prompt in enumerate(prompts)], table)
        is_equal = all(
            _agrees(made[f"r{i}"][0], _expected(reference, prompt, made[f"r{i}"][0].tokens, name))
            for i, prompt in enumerate(prompts)
        )
        return Row(
            served="batched" if model.is_batch_invariant or shares_steps(model) else "row by row",
            trained=_trained(model, adapter, table, prompts),
            targets=", ".join(_target_names(model)),
            tokens="equal" if is_equal else DIFFERENT.get(name, "differ"),
        )


def table_of(rows: dict[str, Row]) -> str:
    """The text of ARCHITECTURES.md."""
    figures = figures_of(rows)
    return "\n".join(
        [
            *HEAD.format(
                files=len(rows), **{name.rpartition(".")[2]: count for name, count in figures.items()}
            ).splitlines(),
            *(row.cells(name) for name, row in rows.items()),
            "",
        ]
    )


def figures_of(rows: dict[str, Row]) -> dict[str, int]:
    tried = [row for row in rows.values() if row.is_tried]
    return {
        "architectures.tried": len(tried),
        "architectures.batched": _count(tried, "served", "batched"),
        "architectures.packed": _count(tried, "trained", "packed"),
    }


def _count(rows: Sequence[Row], column: str, value: str) -> int:
    return sum(getattr(row, column) == value for row in rows)


def _load(folder: Path) -> SharedModel:
    try:
        return load_shared_model(ModelSettings(path=str(folder), lora=LoraSettings(targets=("all-linear", "experts"))))
    except ParallmError:  # no experts
        return load_shared_model(ModelSettings(path=str(folder)))


def _target_names(model: SharedModel) -> list[str]:
    linears = {target.rpartition(".")[2] for target, shape in model.targets.items() if len(shape) == 2}
    has_experts = any(len(shape) == 3 for shape in model.targets.values())
    return [*sorted(linears), *(["experts"] if has_experts else [])]


def _adapter(model: SharedModel) -> Adapter:
    arrays = initial_arrays(model.targets, 4, mx.random.key(1))
    keys = mx.random.split(mx.random.key(2), len(arrays))
    for key, name in zip(keys, sorted(arrays), strict=True):
        if name.endswith("lora_b"):
            arrays[name] = 0.05 * mx.random.normal(arrays[name].shape, key=key)
    return make_adapter(arrays, version=1, rank=4, alpha=8.0)


def _request(index: int, prompt: Sequence[int], model: str, temperature: float, n: int = 1) -> GenerationRequest:
    sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=temperature, seed=index, ignore_eos=True)
    return GenerationRequest(request_id=f"r{index}", prompt_tokens=tuple(prompt), sampling=sampling, n=n, model=model)


def _complete(
    model: SharedModel, requests: Sequence[GenerationRequest], table: AdapterTable
) -> dict[str, list[Completion]]:
    events: list[TokenEvent] = []
    failures: list[Exception] = []
    engine = Engine(
        model,
        table,
        DeviceStreams(partial(set_blas_threads, BLAS)),
        EngineSettings(prefill_chunk=32),
        emit=events.extend,
        report=lambda _, error: failures.append(error),
        async_scheduling=False,
    )
    for request in requests:
        engine.add(request, False)
        step(engine)
    while step(engine):
        pass
    assert failures == []
    return by_request(requests, events)


def _expected(
    reference: nn.Module, prompt: Sequence[int], tokens: Sequence[int], name: str
) -> list[tuple[int, mx.array]]:
    """mlx-lm's greedy tokens with the log-probs (V,) of each; after `tokens` where caches are not used."""
    if name not in WITHOUT_CACHE:
        steps = generate_step(mx.array(prompt), reference, max_tokens=MAX_TOKENS)
        return [(int(token), logprobs_V) for token, logprobs_V in steps]
    logits_TV = reference(mx.array([*prompt, *tokens[:-1]])[None])[0, len(prompt) - 1 :]
    logprobs_TV = logits_TV - mx.logsumexp(logits_TV, axis=-1, keepdims=True)
    return [(int(row_V.argmax().item()), row_V) for row_V in logprobs_TV]


def _agrees(completion: Completion, expected: Sequence[tuple[int, mx.array]]) -> bool:
    """Whether the tokens are mlx-lm's, up to the first of two that are equally likely."""
    for token, logprob, (other, logprobs_V) in zip(completion.tokens, completion.logprobs, expected, strict=True):
        best = float(logprobs_V[int(other)].item())
        if abs(logprob - float(logprobs_V[token].item())) > NEAR:
            return False
        if token != int(other):
            return best - float(logprobs_V[token].item()) < NEAR
    return True


def _trained(model: SharedModel, adapter: Adapter, table: AdapterTable, prompts: Sequence[Sequence[int]]) -> str:
    requests = [_request(i, prompt, "policy", 1.0, n=2) for i, prompt in enumerate(prompts[:3])]
    made = _complete(model, requests, table)
    groups = [_group(request, made[request.request_id]) for request in requests]
    streams = DeviceStreams(partial(set_blas_threads, BLAS))
    learner = Learner(model, streams, LearnerSettings(), start=adapter, total_steps=1, seed=0)
    report = list(learner.update(groups, step=0, max_tokens=64))[-1]
    assert isinstance(report, UpdateReport)
    if report.skipped is not None:
        return f"no: {report.skipped.partition(' (')[0]}"
    if report.parity.max_abs > MAX_PARITY:
        return f"no: log-probs differ by {report.parity.max_abs:.0e}"
    return "packed" if can_pack(model) else "row by row"


def _group(request: GenerationRequest, completions: Sequence[Completion]) -> TrajectoryGroup:
    trajectories = [
        Trajectory(
            problem_id=request.request_id,
            prompt_tokens=request.prompt_tokens,
            tokens=completion.tokens,
            loss_mask=(True,) * len(completion.tokens),
            logprobs=completion.logprobs,
            temperature=1.0,
            weight_versions=completion.weight_versions,
            reward_parts={},
            reward=float(completion.index),
            text="",
            finish_reason="stop",
        )
        for completion in completions
    ]
    problem = Problem(problem_id=request.request_id, messages=(Message(role="user", content="?"),), answer="")
    return TrajectoryGroup(problem=problem, trajectories=tuple(trajectories))
