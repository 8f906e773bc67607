"""Measurements make of what they measured what their figures say. With made-up results, and with tiny sizes."""

import json
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from bench.compare import change, change_by_halves, tune
from bench.measure import engine, learner, learning, runs, serving, start, vllm, workers
from bench.measurement import Figures, Request, bars
from bench.processes import SCRIPTS, run_program
from bench.workers import grpo_steps, random_training
from bench.workers.loads import LEARNING_MODES, limits_of_step

import parallm.engine.engine
from parallm.config.schema import RunConfig
from parallm.device.blas import BlasReport
from parallm.engine.sequence import make_sequences
from parallm.run import train
from parallm.run.runtime import open_runtime
from parallm.types import POLICY, GenerationRequest, SamplingParams

OURS = {"tokens": 800, "seconds": [2.0], "accepted": 0}
THEIRS = {"tokens": 800, "seconds": [5.0], "settings": {"rows": 64}}
MIXED = "engine.gpu.mixed.vs_batchgenerator"


def gpu_figures(found: dict[str, Any]) -> Figures:
    return engine.gpu_figures(engine.GPU_PARTS, found)


def test_figures_of_engines_are_ratios_of_medians() -> None:
    slower, plain = ({"step_seconds": [seconds], "host_seconds": [0.004]} for seconds in (0.01, 0.008))
    floor = {"weight_bytes": 4_300_000_000, "step_seconds": [0.5, 0.002, 0.0015], "host_seconds": [0.001]}
    found = {
        "engine_parts.8b.b1": floor,
        "engine_parts.8b.mixed": OURS,
        "batch_generator_parts.8b.mixed": THEIRS,
        "engine_parts.8b.lora": slower | {"plain": plain},
        "engine_parts.8b.sampling16": slower | {"plain": plain},
        "engine_parts.8b.join": {"plain_seconds": [0.004], "churn_seconds": [0.005], "changes": [0.5]},
        "engine_parts.0.5b.group": {"computed": 4096, "of_rows": 32768},
        "engine_parts.0.5b.memory": {"held": 105, "needed": 100},
    }
    assert gpu_figures(found) == {
        "engine.gpu.8b.b1.vs_floor": 2.0,
        MIXED: 2.5,
        "engine.gpu.8b.lora.vs_base": 0.8,
        "engine.sampling16.vs_greedy": 1.25,
        "engine.join.vs_step": 0.5,
        "engine.group.prompt_tokens_ratio": 0.125,
        "engine.gpu.pages.memory_ratio": 1.05,
    }


def test_a_part_that_fails_costs_its_own_figure() -> None:
    found = {"engine_parts.0.5b.b1": OURS, "engine_parts.0.5b.group": {"computed": 1, "of_rows": 8}}
    assert gpu_figures(found) == {"engine.group.prompt_tokens_ratio": 0.125}


@pytest.mark.parametrize("ours", [OURS | {"accepted": 3}, OURS | {"tokens": 700}])
def test_sides_that_did_not_do_the_same_work_are_not_compared(ours: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"8b\.mixed"):
        gpu_figures({"engine_parts.8b.mixed": ours, "batch_generator_parts.8b.mixed": THEIRS})


def test_loads_beside_vllm_are_compared_by_the_tokens_of_both() -> None:
    ours = {"b1": OURS, "lora": {"seconds": [2.0, 4.0, 3.0], "accepted": 0}, "burst": OURS}
    theirs = {"b1": THEIRS, "lora": {"tokens": 600, "seconds": [6.0]}}
    figures = vllm.load_figures(["b1", "lora", "burst"], ours, theirs)
    assert figures == {"engine.gpu.8b.b1.vs_vllm": 2.5, "engine.gpu.8b.lora.vs_vllm": 2.0}
    with pytest.raises(ValueError, match="800 tokens of ours"):
        vllm.load_figures(["b1"], ours, {"b1": THEIRS | {"tokens": 700}})


def test_publishing_is_compared_by_the_first_token_of_the_new_version() -> None:
    ours, theirs = ({"publish": [0.1], "to_first_token": [first, 9.0, 1.0], "without": [1.0]} for first in (2.0, 8.0))
    assert vllm.publish_figures(ours, theirs) == {"publish.gpu.8b.vs_vllm": 4.0}


def test_completions_of_a_step_end_at_the_same_limits_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallm.engine.engine, "make_sequences", make_sequences)
    grpo_steps.limit_completions(group_size=2, rows=6, bounds=(4, 64))
    limits = limits_of_step(3, 6, (4, 64))
    assert len(set(limits)) > 1
    assert all(4 <= limit <= 64 for limit in limits)
    assert limits_of_step(4, 6, (4, 64)) != limits
    options: dict[str, Any] = {"is_streaming": False, "arrival": 1, "max_context": 1000}
    sampling = SamplingParams(max_tokens=64)
    for name, found in (("step-3-2-policy", limits[4:]), ("warm-up", [64, 64])):
        request = GenerationRequest(request_id=name, prompt_tokens=(1,), sampling=sampling, model=POLICY, n=2)
        sequences = vars(parallm.engine.engine)["make_sequences"](request, None, **options)
        assert [sequence.max_tokens for sequence in sequences] == found


def test_both_sides_run_with_tiny_sizes() -> None:
    wanted = ("engine.cpu.load.b1.", "engine.cpu.load.groups.", "engine.cpu.load.lora8.")
    figures = engine.loads(Request(wanted=wanted, is_quick=True))
    assert len(figures) == 3
    assert all(value is not None and value > 0 for value in figures.values())


def test_parts_for_a_gpu_run_with_tiny_sizes() -> None:
    wanted = ("engine.join", "engine.gpu.05b.b1.", "engine.group")
    figures: Figures = {}
    for found in engine.measure_gpu_parts(Request(wanted=wanted, is_quick=True), {"0.5b": "tiny", "8b": "tiny"}):
        figures |= found
    assert set(figures) == {
        "engine.gpu.05b.b1.vs_batchgenerator",
        "engine.join.vs_step",
        "engine.group.prompt_tokens_ratio",
    }
    assert figures["engine.group.prompt_tokens_ratio"] == 0.125
    assert (figures["engine.gpu.05b.b1.vs_batchgenerator"] or 0) > 0
    assert figures["engine.join.vs_step"] is not None  # a difference of two times, which noise makes negative


def test_settings_are_tried_one_after_the_other_beside_the_best_of_the_others() -> None:
    asked = []

    def seconds_of(settings: Any) -> float | None:
        asked.append((settings["rows"], settings["chunk"]))
        rows = settings["rows"]
        return None if rows == 8 else abs(rows - 4) + abs(settings["chunk"] - 10 * rows)

    trials = tune({"rows": 1, "chunk": 10}, {"rows": (1, 2, 4, 8), "chunk": (20, 40)}, seconds_of)
    assert asked == [(1, 10), (2, 10), (4, 10), (8, 10), (1, 20), (1, 40)]
    assert (trials[0].settings, trials[0].seconds) == ({"rows": 1, "chunk": 10}, 3)
    assert (trials[-1].settings, trials[-1].seconds) == ({"rows": 8, "chunk": 10}, None)


def test_a_change_by_chance_has_an_interval_around_zero_and_one_by_learning_has_not() -> None:
    same, more = change([0, 1] * 100, [1, 0] * 100), change_by_halves([0, 1] * 100 + [1, 1, 1, 0] * 50)
    assert (same.gain, -same.low) == (0, same.high)
    assert same.high == pytest.approx(1.96 * 0.05, rel=0.01)
    assert more.gain == 0.25
    assert more.low > 0.1


def test_steps_are_compared_by_the_seconds_of_a_token_that_is_sampled_and_trained_on() -> None:
    steps: learner.Steps = {"seconds": [10.0], "rollout": [6.0], "tokens": [600], "trained": [400]}
    assert learner.seconds_a_token([steps, steps]) == pytest.approx(0.02)
    steps = {"seconds": [20.0], "rollout": [6.0], "tokens": [300], "trained": [700]}
    assert learner.seconds_a_token([steps]) == pytest.approx(0.04)


@pytest.mark.parametrize(
    ("arrays", "held", "growth"), [([100, 120, 150, 160, 160, 160], 6, 0), ([100, 110, 120, 130, 140, 150], 5, 2 / 3)]
)
def test_memory_is_judged_after_the_last_update(arrays: list[int], held: float, growth: float) -> None:
    found = {"base": 1000, "adapter": 10, "arrays": arrays, "allocated": arrays, "peak": 400, "peak_of_updates": 900}
    figures = learner.memory_figures(found)
    assert figures["memory.learner_over_base"] == pytest.approx(held / 100)
    assert figures["memory.learner_over_base_bar"] == pytest.approx(0.11)
    assert figures["memory.learner_adapters"] == held
    assert figures["memory.growth_by_later_updates"] == pytest.approx(growth)
    assert figures["memory.update_peak_mb"] == pytest.approx(500 / 1e6)


@pytest.mark.parametrize(
    ("after", "without", "p50", "p99"),
    [
        ([24.0] * 99 + [34.0], [20.0] * 99 + [30.0], 4, 4),
        ([40.0] * 9, [20.0] * 8 + [500.0], 20, 20),  # however late a request without a publish was once
    ],
)
def test_a_publish_costs_what_the_next_first_token_takes_longer(
    after: list[float], without: list[float], p50: float, p99: float
) -> None:
    found = {"publish": [0.1] * len(after), "to_first_token": after, "without": without, "failed": 0}
    figures = serving.publish_figures(found)
    assert figures["publish.p50_ms"] == pytest.approx(p50)
    assert figures["publish.p99_ms"] == pytest.approx(p99)
    assert figures["publish.pointers_p99_ms"] == pytest.approx(0.1)


ALONE = {"gaps": [0.007] * 9 + [0.02], "tokens": 9000, "seconds": 1.0, "errors": [], "first": [0.02]}
UPDATE = {"tokens": 16_000, "seconds": [1.0, 1.0], "peak_gb": 60.0}
PACKED = UPDATE | {"peak_gb": 28.0}


def learning_found(mode: dict[str, Any]) -> dict[str, Any]:
    """What a worker finds where each mode of learning is `mode`."""
    shown = ALONE | {"updates_per_minute": 10.0, "update_seconds": [0.6]} | mode
    parts = {"8b.ragged": UPDATE, "8b.equal": UPDATE, "0.5b.ragged": UPDATE, "0.5b.equal": UPDATE}
    parts |= {"0.5b.rectangles": UPDATE, "8b-4bit.half": PACKED, "8b-8bit.short": PACKED}
    parts |= {"8b.publish": {"publish": [0.1] * 9, "failed": 0}, "8b.memory": {"shared": 20, "two_copies": 36}}
    return {**parts, "8b.streams": {"alone": ALONE} | dict.fromkeys(LEARNING_MODES, shown)}


def judged(figures: Figures) -> set[str]:
    """Those that miss their bars."""
    return {name for name, value in figures.items() if value is not None and not bars()[name].is_met(value)}


def test_learning_that_costs_streams_nothing_is_within_its_bars_and_the_controls_are_not() -> None:
    figures = learning.learning_figures(learning_found({}))
    assert set(figures) == set(learning.FIGURES)
    assert {name for name in judged(figures) if "control" not in name} == set()
    assert {"gpu.update.control_ragged_vs_equal", "serving.gpu.control_throughput_ratio"} <= judged(figures)


@pytest.mark.parametrize(
    ("changed", "missed"),
    [
        ({"8b.ragged": UPDATE | {"seconds": [1.3, 1.3]}}, {"gpu.update.ragged_vs_equal"}),
        ({"8b-4bit.half": PACKED | {"seconds": [1.5]}}, {"quantized.gpu.4bit.update_vs_full"}),
        ({"8b-4bit.half": PACKED | {"peak_gb": 31}}, {"quantized.gpu.4bit.peak_vs_full"}),
        ({"8b.publish": {"publish": [0.1] * 50 + [9.0] * 2, "failed": 1}}, {"serving.gpu.publish_p99_ms"}),
    ],
)
def test_what_is_slower_or_larger_misses_its_bar(changed: dict[str, Any], missed: set[str]) -> None:
    assert missed <= judged(learning.learning_figures(learning_found({}) | changed))


def test_streams_that_wait_for_updates_miss_their_bars() -> None:
    slow = {"gaps": [0.009] * 9 + [0.5], "tokens": 7000, "updates_per_minute": 5.0, "errors": ["lost"]}
    names = {"itl_ratio_10_updates", "throughput_ratio_10_updates", "updates_per_minute_10_updates", "errors"}
    names |= {"itl_ratio_latency_target", "mean_itl_ratio_latency_target"}
    assert {f"serving.gpu.{name}" for name in names} <= judged(learning.learning_figures(learning_found(slow)))


def test_a_step_is_compared_with_what_its_tokens_take_by_themselves() -> None:
    rates = {"sampling": 10_000.0, "update": 20_000.0}
    step = {"seconds": 3.3, "sampled": 20_000, "trained": 20_000}
    assert runs.step_vs_parts([step], rates) == pytest.approx(1.1)
    assert runs.step_vs_parts([step | {"seconds": 6.0}], rates) > 1.2


def test_steps_in_which_a_process_compiles_do_not_count() -> None:
    row = {"seconds/total": 1.0, "update/skipped": None, "rollout/tokens": 9, "seconds/rollout": 0.5}
    row |= {"seconds/update": 0.1, "reward/mean": 0.5}
    slow = row | {"seconds/total": 30.0}
    rows = [{"step": step} | (slow if step in (1, 2, 11, 12) else row) for step in range(1, 21)]
    figures = runs.mathling_figures(13, 10, rows)
    assert figures["gpu.mathling.step_seconds"] == 1.0
    assert (figures["runs.gpu.mathling.steps"], figures["runs.gpu.mathling.steps_done_again"]) == (20, 3)
    assert runs.mathling_figures(0, 0, rows)["runs.gpu.mathling.kills"] == 0
    slower = [one | {"seconds/total": 12.0, "update/skipped": "no signal"} for one in rows]
    assert {"gpu.mathling.step_seconds", "runs.gpu.mathling.steps_skipped"} <= judged(
        runs.mathling_figures(13, 10, slower)
    )


def test_the_command_lists_all_figures() -> None:
    listed = run_program([sys.executable, "-m", "bench", "--list"])
    assert "engine.gpu.8b.lora8.vs_base" in listed


def test_a_run_that_ends_before_its_first_step_has_no_seconds(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"no first step in \d+ s:\n.*learner.banana"):
        start.seconds_to_first_step(["learner.banana=1"], tmp_path)


def test_runs_are_on_the_weights_of_their_shape() -> None:
    figures: Figures = {}
    for found in runs.run_shapes(Request(wanted=("runs.gpu.05b",), is_quick=True)):
        figures |= found
    assert figures["runs.gpu.05b.steps"] == 3
    assert (figures["runs.gpu.05b.vs_parts"] or 0) > 0


def test_a_run_on_another_model_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(vars(train), "open_runtime", open_runtime)
    blas = BlasReport(name="reference", path=None, strict=False, message="")
    monkeypatch.setattr(train, "run_training", lambda *_: 0)  # loads what model.path says
    with pytest.raises(RuntimeError, match="not on the model given"):
        random_training.train_on(pytest.fail, RunConfig(), tmp_path, blas)


def test_runs_that_wait_for_each_other_take_the_longest_of_each_part() -> None:
    first = {workers.WHOLE: 3.5, "seconds/rollout": 2.0, "seconds/update": 1.0}
    second = {workers.WHOLE: 4.25, "seconds/rollout": 1.0, "seconds/update": 3.0}
    [step] = workers.slowest_of([[first], [second]])
    assert step == {workers.WHOLE: 2.0 + 3.0 + 0.5, "seconds/rollout": 2.0, "seconds/update": 3.0}


def test_two_workers_run_on_the_weights_of_a_shape() -> None:
    job = workers.Job(shape="tiny", rows=8, tokens=4, steps=1, warm_up=1)
    [row] = workers.run(job, workers=2, rows=8)
    assert row["step"] == 2
    assert row[workers.WHOLE] > row["seconds/rollout"] + row["seconds/update"]


class TypedServer(BaseHTTPRequestHandler):
    """Takes JSON only where its type is told, as vLLM does, and names the model that it has."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        is_good = self.headers["content-type"] == "application/json" and body["model"] == "base"
        self.send_response(200 if is_good else 400)
        self.end_headers()
        self.wfile.write(b"data: [DONE]\n\n" if is_good else f"no model {body['model']}".encode())


@pytest.fixture
def port() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), TypedServer) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def test_streams_are_read_from_a_server_that_wants_the_type_of_a_body(port: int) -> None:
    assert vllm.stream_seconds(port, [3, 5], vocabulary=99, max_tokens=4) > 0


def test_what_a_server_answers_in_place_of_a_stream_is_told(port: int) -> None:
    reader = [sys.executable, str(SCRIPTS / "bench" / "workers" / "stream_reader.py"), str(port)]
    with pytest.raises(RuntimeError, match="no model other"):
        run_program(reader, given=json.dumps([{"model": "other"}]))
