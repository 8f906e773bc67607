"""Figures that tests give: interoperation with other programs, robustness, learning.

A test records a figure with pytest's `record_property`. Tests that are skipped for want of something count in no
figure.
"""

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from bench.compare import print_table
from bench.measurement import Bar, Figures, Request, measurement
from bench.processes import ROOT, clean_environment

Combine = Callable[[Sequence[float]], float]
GAIN, STILL, ROUGHLY_STILL = Bar(min=0.2), Bar(min=-0.05, max=0.05), Bar(min=-0.1, max=0.1)


def give(name: str, path: str, minutes: float, *bars: Mapping[str, Bar], marks: str = "", **combine: Combine) -> None:
    """The tests at `path`, or those of them with these markers, give the figures NAME.*.

    A figure that several of them record is their sum, or what `combine` makes of it, by the last part of its name.
    """
    own = {name: bar for part in bars for name, bar in part.items()}

    def run(request: Request) -> Figures:
        figures, outcomes = run_tests(ROOT / "tests" / path, request, combine, marks)
        if f"{name}.checks_total" in own:
            figures |= {f"{name}.checks_{kind}": outcomes.count(kind) for kind in ("passed", "failed")}
            figures[f"{name}.checks_total"] = outcomes.count("passed") + outcomes.count("failed")
        return figures

    run.__name__ = name
    measurement(own, minutes=minutes)(run)


def run_tests(
    path: Path, request: Request, combine: Mapping[str, Combine], marks: str = ""
) -> tuple[Figures, list[str]]:
    """The figures that tests have recorded, and how each has ended: passed, failed or skipped."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-m",
            marks,
            "-o",
            "junit_family=xunit1",
            f"--junitxml={report}",
        ]
        subprocess.run([*command, str(path)], cwd=ROOT, env=clean_environment() | settings(request), check=False)
        cases = list(ElementTree.parse(report).iter("testcase"))
    values: dict[str, list[float]] = defaultdict(list)
    outcomes, rows = [], []
    for case in cases:
        failed = case.find("failure") is not None or case.find("error") is not None
        outcomes.append("failed" if failed else "skipped" if case.find("skipped") is not None else "passed")
        remark = ""
        for one in case.iter("property"):
            if one.attrib["name"] == "remark":
                remark = one.attrib["value"]
            else:
                values[one.attrib["name"]].append(float(one.attrib["value"]))
        rows.append((case.attrib["name"], outcomes[-1], f"{float(case.attrib['time']):.0f} s", remark))
    print_table(str(path.relative_to(ROOT)), [("test", "", "", ""), *rows])
    return {name: combine.get(name.rpartition(".")[2], sum)(found) for name, found in values.items()}, outcomes


def settings(request: Request) -> dict[str, str]:
    """The options of the command as variables, which `tests/conftest.py` reads."""
    values = {
        "PARALLM_MODEL": request.model if request.has_model else "",
        "PARALLM_GSM8K": request.data or "",
        "PARALLM_CLONES": os.pathsep.join(map(str, request.environments)),
        "PARALLM_PEERS": str(request.peers),
        "PARALLM_QUICK": "1" if request.is_quick else "",
    }
    return {name: value for name, value in values.items() if value}


def zero(*names: str) -> dict[str, Bar]:
    return dict.fromkeys(names, Bar(max=0))


give("slow", "", 25, {"slow.checks_total": Bar(min=60)}, zero("slow.checks_failed"), marks="slow")
give(
    "intervals",
    "rollout/test_interval_coverage.py",
    3,
    {"intervals.worst_coverage": Bar(min=0.93), "intervals.one_way_coverage": Bar(min=0.9)},
    {"intervals.worst_width_ratio": Bar(max=1.3), "intervals.control_coverage": Bar(max=0.5)},
)
EXACT_PACKINGS = {"hybrid.packings_exact": Bar(min=200), "hybrid.packings_worst_error": Bar(max=1e-4)}
FAMILIES = {
    "hybrid.families_exact": Bar(min=21, needs="strict"),
    "hybrid.families_alike": Bar(min=21, needs="gpu"),
    "hybrid.families_k3": Bar(max=1e-5),
}
give("hybrid_families", "engine/test_hybrids.py", 6, FAMILIES, families_k3=max)
give("hybrid_packings", "learner/passes/test_hybrids.py", 4, EXACT_PACKINGS, packings_worst_error=max)
REFERENCES = {"hybrid.reference_logits_error": Bar(max=1e-3), "hybrid.reference_gradients_error": Bar(max=1e-3)}
LEARNING = {f"{name}.learning_accuracy": Bar(min=0.85) for name in ("hybrid", "experts")}
CONTROL = {f"{name}.learning_control_gain": Bar(min=-0.02, max=0.02) for name in ("hybrid", "experts")}
give("grown_learning", "learning/test_grown_models.py", 20, LEARNING, CONTROL)
WORST = {"reference_logits_error": max, "reference_gradients_error": max}
give("hybrid_references", "learner/hybrids/test_references.py", 0.2, REFERENCES, **WORST)
PACE = {"episodes.vs_lock_step": Bar(min=2.5), "episodes.steps_vs_lock_step": Bar(min=1.5)}
EVEN = {"episodes.ahead_vs_lock_step_ahead": Bar(), "episodes.control_vs_lock_step": Bar(min=0.9, max=1.5)}
SCORES = {"episodes.scoring_share": Bar(max=0.1), "episodes.control_scoring_share": Bar(min=0.3)}
give("episodes", "rollout/test_pace.py", 10, PACE, EVEN, SCORES)
give("mutants", "robustness/test_mutants.py", 15, {"mutants.tried": Bar(min=30)}, zero("mutants.survived"))
ORACLE = {"oracle.worst_error": Bar(max=1e-6), "oracle.cases": Bar(min=31)}
ANEW = {"oracle.regenerated": Bar(min=29), "oracle.regenerated_error": Bar(max=1e-9)}
give("oracles", "learner/test_oracles.py", 0.2, ORACLE, worst_error=max)
give("regenerated", "interop/trl/test_oracles.py", 1, ANEW, regenerated_error=max)
give(
    "tasks", "tasks/test_references.py", 0.5, {"tasks.worst_embedding_error": Bar(max=1e-5)}, worst_embedding_error=max
)
give("experts", "model/adapters/test_expert_files.py", 0.5, {"experts.peft_error": Bar(max=1e-4)}, peft_error=max)
give("expert_routes", "engine/test_routes.py", 0.1, {"experts.routing_changed": Bar(max=0.01)}, routing_changed=max)
give(
    "architectures",
    "model/test_architectures.py",
    7,
    {"architectures.tried": Bar(min=104), "architectures.batched": Bar(min=100), "architectures.packed": Bar(min=90)},
)
give("task_losses", "tasks/test_losses.py", 0.1, {"tasks.worst_loss_error": Bar(max=1e-6)}, worst_loss_error=max)
EXACT = {"gguf.types_exact": Bar(min=14, max=14), "gguf.control_types_inexact": Bar(min=7)}
DAMAGED = {"gguf.mutants_survived": Bar(min=5000), "gguf.mutants_refused": Bar(min=2500)}
give("gguf", "model/gguf", 2, EXACT, DAMAGED, {"gguf.control_unclear_errors": Bar(min=10)})
give(
    "task_learning",
    "learning/test_encoders.py",
    2,
    {"tasks.embedding_before": Bar(max=0.2), "tasks.embedding_mrr": Bar(min=0.9)},
    {"tasks.embedding_seconds": Bar(max=60), "tasks.embedding_control_gain": Bar(min=0, max=0)},
    {"tasks.classifier_before": Bar(max=0.6), "tasks.classifier_accuracy": Bar(min=0.95)},
    {"tasks.classifier_control_gain": Bar(min=0, max=0)},
)
give(
    "cartpole",
    "learning/test_cartpole.py",
    3,
    {"tasks.cartpole_before": Bar(max=100), "tasks.cartpole_return": Bar(min=400)},
    {"tasks.cartpole_seconds": Bar(max=180), "tasks.cartpole_versions": Bar(min=10)},
    {"tasks.cartpole_control_gain": Bar(min=0, max=0)},
)
give("trl", "interop/trl/test_samples.py", 40, {"trl.samples_to_80_ratio": Bar(max=1)})
give("split", "robustness/test_split.py", 1, {"ab.share_error": Bar(max=0.02)}, zero("ab.failed_requests"))
give("head", "learner/passes/test_head_memory.py", 0.1, {"head.memory_ratio": Bar(max=0.1, needs="gpu")})
give(
    "presets",
    "learning/test_presets.py",
    17,
    {"presets.reached": Bar(min=10), "presets.total": Bar()},
    {"presets.worst_accuracy": Bar(min=0.85), "presets.control_accuracy": Bar(max=0.45)},
)
give(
    "reward_model",
    "learning/test_reward_model.py",
    4,
    {"reward_model.pair_accuracy": Bar(min=0.8), "reward_model.accuracy_before": Bar(max=0.45)},
    {"reward_model.accuracy_best": Bar(min=0.7), "reward_model.accuracy_last": Bar()},
    {"reward_model.control_pair_accuracy": Bar(max=0.7), "reward_model.control_gain": Bar(max=0.1)},
)
give(
    "live_learning",
    "learning/test_live_traffic.py",
    4,
    {"live.reward_gain": GAIN, "live.control_gain": STILL, "live.control_steps": Bar(min=1)},
    zero("live.failed_requests"),
)
give(
    "kills",
    "robustness/test_kills.py",
    12,
    {"live.kills": Bar(min=50), "live.ratings": Bar(min=500), "live.resent": Bar(min=50)},
    {"live.control_lost": Bar(min=1), "live.control_twice": Bar(min=1), "serve.control_wrong_states": Bar(min=1)},
    {"serve.kills": Bar(min=20), "serve.changes": Bar(min=200)},
    zero("live.ratings_lost", "live.trained_twice", "live.wrong_answers", "serve.wrong_states"),
)
give(
    "workers_kills",
    "robustness/test_worker_kills.py",
    25,
    {"workers.kills_survived": Bar(min=100), "workers.seconds_to_new_gang": Bar(max=10)},
    {"workers.longest_seconds_to_new_gang": Bar(max=10)},
    seconds_to_new_gang=max,
    longest_seconds_to_new_gang=max,
)
give("workers_exact", "distributed/test_runs.py", 6, {"workers.exact_equal": Bar(min=1)}, exact_equal=min)
give(
    "replicas",
    "robustness/test_rollout_engines.py",
    17,
    {"replicas.minutes": Bar(min=10), "replicas.kills": Bar(min=50), "replicas.steps": Bar(min=200)},
    {"replicas.requests_sampled_again": Bar(min=1), "replicas.cpu_sampling_speedup": Bar()},
    {"replicas.control_stale_found": Bar(min=1), "replicas.control_misled_steps": Bar(min=1)},
    {"replicas.control_other_base_refused": Bar(min=1)},
    zero("replicas.steps_lost", "replicas.wrong_version_tokens"),
)
give(
    "fuzz",
    "robustness/test_fuzz.py",
    12,
    {"fuzz.requests": Bar(min=100_000), "fuzz.engine_alive": Bar(min=1), "fuzz.control_errors": Bar(min=1)},
    {"fuzz.memory_growth_mb": Bar(max=32), "fuzz.files_growth": Bar(max=8)},
    zero("fuzz.server_errors"),
    engine_alive=min,
)
give(
    "load",
    "robustness/test_load.py",
    6,
    {"load.clients": Bar(min=200), "load.requests": Bar(), "load.checked": Bar(min=1000)},
    zero("load.lost", "load.wrong", "load.leaked_slots", "load.leaked_kv_share"),
)
give(
    "hostile",
    "robustness/test_hostile.py",
    5,
    {"hostile.attacks": Bar(min=8), "hostile.honest_answers": Bar(min=100), "hostile.steps": Bar(min=10)},
    {"hostile.worst_delay_seconds": Bar(max=2), "hostile.memory_growth_mb": Bar(max=256)},
    {"hostile.files_growth": Bar(max=8), "hostile.alive": Bar(min=1), "hostile.control_seen": Bar(min=3)},
    zero("hostile.not_refused", "hostile.honest_wrong", "hostile.honest_lost", "hostile.rows_lost"),
    zero("hostile.steps_skipped", "hostile.versions_rolled_back", "hostile.checkpoints_failed"),
)
give(
    "soak",
    "robustness/test_soak.py",
    8,
    {"engine.soak.requests": Bar(min=10_000), "engine.soak.preemptions": Bar(min=100)},
    {"engine.soak.prefix_hits": Bar(min=100), "engine.soak.failed_in_step": Bar(min=10)},
    {"engine.soak.memory_drift": Bar(max=0.02), "engine.soak.next_request_seconds": Bar(max=1)},
    {"engine.soak.traces_over_buckets": Bar(max=1)},
    zero("engine.soak.lost", "engine.soak.leaked_kv_bytes", "engine.soak.failed_besides"),
)
give(
    "models",
    "interop/models",
    10,
    {"jobs.accuracy_before": Bar(), "jobs.accuracy_gain": Bar(min=0.3), "jobs.control_gain": Bar(min=-0.1, max=0.1)},
    {"models.clients_passed": Bar(min=7), "models.clients_total": Bar(min=7)},
)
give(
    "model_cycles",
    "run/test_models.py",
    1,
    {"models.unload_cycles": Bar(min=20), "models.unload_leak_fraction": Bar(min=-0.01, max=0.01)},
    {"models.control_leak_fraction": Bar(min=0.01)},
)
give(
    "catalogue",
    "registry/test_catalogue.py",
    1,
    {"models.list_ms": Bar(max=50), "models.catalogue_kills": Bar(min=50), "models.control_broken": Bar(min=1)},
    zero("models.catalogue_broken"),
)
give(
    "job_kills",
    "robustness/test_job_kills.py",
    6,
    {"jobs.kills": Bar(min=20), "jobs.control_lost": Bar(min=1), "jobs.control_twice": Bar(min=1)},
    zero("jobs.lost", "jobs.twice"),
)
CLIENTS = {"clients.passed": Bar(), "clients.total": Bar(min=164), "tasks.clients_passed": Bar(min=8)}
give("clients", "interop/clients/test_clients.py", 5, CLIENTS, zero("clients.failed"))
give(
    "verifiers",
    "interop/verifiers/test_verifiers.py",
    25,
    {f"verifiers{kind}.reward_gain": GAIN for kind in ("", ".turns", ".classic")},
    {f"verifiers{kind}.control_gain": STILL for kind in ("", ".turns")},
    {f"verifiers{kind}.control_reward_change": ROUGHLY_STILL for kind in ("", ".turns")},
    {"verifiers.stock.reward_gain": replace(GAIN, needs="clones")},
    {"verifiers.stock.control_gain": replace(STILL, needs="clones")},
    {"verifiers.stock.control_reward_change": replace(ROUGHLY_STILL, needs="clones")},
    zero("verifiers.faults"),
)
give(
    "atropos",
    "interop/atropos",
    25,
    {"atropos.checks_passed": Bar(), "atropos.checks_total": Bar(min=11), "atropos.ledger_join_fraction": Bar(min=1)},
    {"atropos.reward_gain": Bar(min=0.1), "atropos.itl_p50_ratio": Bar(max=2)},
    zero("atropos.checks_failed"),
    ledger_join_fraction=min,
)
LOOK = {"dashboard.first_look_seconds": Bar(max=1), "dashboard.page_bytes": Bar(max=160_000)}
MEMORY = {"dashboard.heap_mb": Bar(max=120), "dashboard.heap_growth_mb": Bar(max=5)}
FRAMES = {"dashboard.redraw_p95_ms": Bar(max=8), "dashboard.cursor_p95_ms": Bar(max=4)}
HARM = zero("dashboard.axe_findings", "dashboard.hostile_acted")
give("dashboard", "dashboard", 10, LOOK, MEMORY, FRAMES, HARM, page_bytes=max)
