"""Made-up answers of the routes that the page reads, for runs of any length and for texts of any kind.

Tests of the page that need what no run of a second has (10,000 steps, hostile names, faults) get them from here.
"""

import json
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

NOW = 1_763_900_000.0
RUN = "arithmetic_grpo~2026-11-23_16-05-00"
OTHER = "arithmetic_grpo~2026-11-22_21-10-00"
POINTS = 1024
NAMES = """
    reward/mean reward/std groups/sampled groups/with_signal completion/length_mean completion/truncated_fraction
    update/version update/loss update/gradient_norm update/adapter_delta_norm update/adapter_delta_relative
    update/learning_rate update/clip_fraction update/kl_to_behaviour update/entropy update/tokens
    update/device_seconds parity/tokens parity/bit_equal_fraction parity/mean_abs parity/max_abs offpolicy/lag_mean
    offpolicy/lag_max offpolicy/dropped offpolicy/tokens offpolicy/ratio_mean offpolicy/ratio_min
    offpolicy/ratio_max guard/skipped guard/rollbacks guard/idle guard/empty_completions seconds/rollout
    seconds/update seconds/total rollout/tokens rollout/tokens_per_second serving/tokens_per_second faults/total
    problems/skipped
"""


def plain(where: str) -> str:
    """Return an ordinary text for a field."""
    return where


@dataclass
class Answers:
    """`text(field)` makes the text of each field that models, clients, environments, files and logs fill."""

    num_steps: int = 200
    text: Callable[[str], str] = plain
    trains: bool = True
    policies: tuple[str, ...] = ("policy",)
    role: str = "admin"
    seed: int = 0
    epoch: str = "b71e"
    num_texts: int = 1
    """Rows of each list of texts, and names of each kind."""
    rows: list[dict[str, float]] = field(default_factory=list)
    histories: dict[int, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = range(self.num_texts)
        self.parts = [f"reward_part/{self.text('reward part')}" for _ in names]
        self.environments = [f"environment/{self.text('environment')}/reward" for _ in names]
        self.settings = [self.text("setting") for _ in names]
        self.rows = [self.row(step) for step in range(1, self.num_steps + 1)] if self.trains else []

    def row(self, step: int) -> dict[str, float]:
        """Return the row of a step: a run that learns, with noise."""
        noise = random.Random(f"{self.seed} {step}")
        progress = 1 - math.exp(-3 * step / max(50, self.num_steps))
        values = {name: round(noise.random(), 5) for name in NAMES.split()}
        own = {
            "step": step,
            "time": NOW - 4.0 * (self.num_steps - step),
            "reward/mean": 0.1 + 0.6 * progress + noise.gauss(0, 0.06),
            "update/entropy": 0.6 - 0.4 * progress + noise.gauss(0, 0.01),
            "update/kl_to_behaviour": abs(noise.gauss(0, 0.002)),
            "completion/length_mean": 30 + 10 * progress + noise.gauss(0, 2),
            "groups/sampled": 16,
            "groups/with_signal": noise.randint(6, 14),
            "guard/skipped": 0,
            "guard/rollbacks": 0,
            "parity/mean_abs": 0.0,
            "rollout/tokens_per_second": noise.gauss(5400, 300),
            "seconds/total": noise.gauss(4, 0.3),
            **{name: noise.random() for name in (*self.parts, *self.environments)},
        }
        return {name: round(value, 6) for name, value in (values | own).items()}

    def history(self, points: int = POINTS) -> dict[str, Any]:
        if points not in self.histories:
            self.histories[points] = self._history(points)
        return self.histories[points]

    def _history(self, points: int) -> dict[str, Any]:
        bucket = 1
        while self.num_steps / bucket > points:
            bucket *= 2
        starts = list(range(1, self.num_steps + 1, bucket))
        names = [name for name in (self.rows[0] if self.rows else {}) if name != "step"]
        columns = {}
        for name in names:
            parts = [[row[name] for row in self.rows[start - 1 : start - 1 + bucket]] for start in starts]
            columns[name] = {
                "low": list(map(min, parts)),
                "high": list(map(max, parts)),
                "last": [p[-1] for p in parts],
            }
        constant = {name: c["last"][0] for name, c in columns.items() if len({*c["low"], *c["high"]}) == 1}
        varying = {name: column for name, column in columns.items() if name not in constant}
        first, last = (1, self.num_steps) if self.rows else (None, None)
        shape = {"epoch": self.epoch, "first": first, "last": last, "bucket": bucket, "starts": starts}
        return {**shape, "columns": varying, "constant": constant}

    def evaluations(self) -> list[dict[str, float]]:
        steps = range(0, self.num_steps + 1, max(1, self.num_steps // 8))
        rows = []
        for step in steps:
            accuracy = 0.12 + 0.5 * (1 - math.exp(-3 * step / max(50, self.num_steps)))
            interval = {"heldout/low": accuracy - 0.05, "heldout/high": accuracy + 0.05}
            when = NOW - 4.0 * (self.num_steps - step)
            rows.append({"step": step, "time": when, "heldout/accuracy": accuracy, **interval, "heldout/problems": 200})
        return rows

    def happenings(self) -> list[dict[str, Any]]:
        kinds = ["started", "evaluated", "published", "saved", "promoted", "fault", "sign", "evaluated"]
        kinds += [self.text("kind") for _ in range(self.num_texts - 1)]
        return [
            {
                "time": NOW - 600 + 60 * index,
                "step": max(1, self.num_steps - 150 + 20 * index),
                "kind": kind,
                "what": self.text("alias"),
                "by": self.text("key") if kind == "promoted" else "",
                "text": self.text(f"happening {kind}"),
                "policy": "policy",
            }
            for index, kind in enumerate(kinds)
        ]

    def status(self) -> dict[str, Any]:
        shown = {
            "state": "updating",
            "step": self.num_steps,
            "total_steps": 2 * self.num_steps,
            "version": self.num_steps,
        }
        return {**shown, "seconds_left": 810.0, "message": self.text("message"), "policies": {}} if self.trains else {}

    def pulse(self) -> dict[str, Any]:
        return {
            "time": NOW,
            "running": 24,
            "waiting": 3,
            "kv_bytes": 41_000_000,
            "kv_limit": 100_000_000,
            "rows": {"max": 128},
            "tokens": {"serving": 310, "rollout": 5450},
            "device": {"serving": 0.2, "rollout": 0.5, "learning": 0.3},
            "by_version": {"policy@412": 8},
            "cpu": 0.9,
            "resident": 900_000_000,
        }

    def run(self, run: str = RUN) -> dict[str, Any]:
        state = "running" if run == RUN else "finished"
        return {
            "id": run,
            "name": self.text("run name") if run == RUN else "arithmetic_grpo",
            "began": NOW - 4 * self.num_steps,
            "ended": None if run == RUN else NOW - self.num_steps,
            "state": state,
            "step": self.num_steps,
            "total_steps": 2 * self.num_steps if run == RUN else self.num_steps,
            "policies": list(self.policies) if len(self.policies) > 1 else [],
            "figures": {"accuracy_best": 0.62 if run == RUN else 0.58, "seconds": 4.0 * self.num_steps},
            "is_current": run == RUN,
            "model": self.text("model"),
            "recipe": "arithmetic_grpo",
            "device": "Device(cpu, 0)",
            "machine": self.text("machine"),
            "commit": "e1a7e4dd",
            "columns": [],
            "files": [{"name": "metrics.jsonl", "bytes": 1234}],
        }

    def runs(self) -> list[dict[str, Any]]:
        more = [
            {**self.run(OTHER), "id": f"other~{index}", "name": self.text("run name")}
            for index in range(self.num_texts)
        ]
        return [self.run(RUN), self.run(OTHER), *(more if self.num_texts > 1 else [])]

    def session(self) -> dict[str, Any]:
        return {
            "role": self.role,
            "key": None,
            "has_keys": False,
            "control_routes": True,
            "trains": list(self.policies) if self.trains else [],
            "learns_live": [],
            "loads_adapters": False,
            "base": self.text("base"),
            "max_context": 8192,
            "now": NOW,
            "run": RUN if self.trains else None,
            "version": "0.1.0",
            "serves": True,
        }

    def log(self) -> list[dict[str, Any]]:
        levels = ["INFO", "WARNING", "ERROR"]
        return [
            {
                "time": NOW - 100 + index,
                "level": levels[index % 3],
                "logger": "parallm.trainer",
                "text": self.text("log"),
            }
            for index in range(30)
        ]

    def device(self) -> dict[str, Any]:
        times = [NOW - 900 + index for index in range(900)]
        noise = random.Random(1)
        count = len(times)
        columns = {
            "running": [noise.randint(10, 30) for _ in range(count)],
            "waiting": [noise.randint(0, 4) for _ in range(count)],
            "kv_bytes": [noise.randint(3, 5) * 1e7 for _ in range(count)],
            "tokens/serving": [noise.gauss(300, 20) for _ in range(count)],
            "tokens/rollout": [noise.gauss(5400, 200) for _ in range(count)],
        }
        memory = {"active": 400_000_000, "peak": 700_000_000, "cache": 90_000_000}
        seconds = {"serving": 120.0, "rollout": 410.0, "learning": 330.0}
        shares = {"serving_share": 0.5, "engine_share": 0.5}
        name = "Device(cpu, 0)"
        shown = {"now": NOW, "name": name, "seconds": seconds, "shares": shares, "memory": memory}
        return {**shown, "bucket": 1, "times": times, "columns": columns}

    def timeline(self) -> dict[str, Any]:
        spans, at, noise = [], -60.0, random.Random(2)
        while at < 0:
            length = noise.random() * 0.8
            spans.append([noise.randint(0, 2), round(at, 3), round(length, 3)])
            at += length + noise.random() * 0.1
        return {"now": NOW, "work": ["serving", "rollout", "learning"], "spans": spans}

    def device_rows(self) -> dict[str, Any]:
        numbers = {"prompt_tokens": 210, "sampled": 33, "max_tokens": 512, "seconds": 0.9}
        rows = [
            {"id": self.text("request id"), "traffic": "serving", "model": self.text("adapter"), **numbers}
            for _ in range(self.num_texts)
        ]
        return {"max_rows": 128, "waiting": 3, "rows": rows}

    def rollouts(self, problem: str = "") -> dict[str, Any]:
        rows = [
            {
                "step": step,
                "time": NOW - 4.0 * (self.num_steps - step),
                "groups": 3,
                "completions": 9,
                "reward_mean": 0.5,
                "with_signal": 2,
                "kept": False,
                **({"group": 1, "problem_reward": 0.25} if problem else {}),
            }
            for step in range(max(1, self.num_steps - 40), self.num_steps + 1)
        ]
        damaged = [{"step": 7, "reason": self.text("damage")}] if self.trains else []
        return {"steps": rows if self.trains else [], "damaged": damaged, "dropped": 2}

    def groups(self, step: int) -> dict[str, Any]:
        lines = [self.line(step) for _ in range(max(3, self.num_texts))]
        groups = [{"group": place, **line} for place, line in enumerate(lines)]
        return {"step": step, "time": NOW, "groups": groups, "more": 0, "environments": [self.text("environment")]}

    def line(self, step: int) -> dict[str, Any]:
        return {
            "problem_id": self.text("problem id"),
            "environment": self.text("environment"),
            "prompt": self.text("prompt")[:200],
            "answer": self.text("answer")[:200],
            "rewards": [0.0, 1.0, None],
            "advantages": [-0.5, 0.5, None],
            "lengths": [4, 3, 2],
            "finish_reasons": ["stop", "length", "stop"],
            "versions": [step - 1],
            "faulty": [{"kind": self.text("fault kind"), "detail": self.text("detail")[:200]}],
        }

    def group(self, step: int, place: int) -> dict[str, Any]:
        completions = [self.completion(index, step) for index in range(max(3, self.num_texts))]
        return {
            "step": step,
            "group": place,
            "groups": 3,
            "problem_id": self.text("problem id"),
            "environment": self.text("environment"),
            "messages": [{"role": "user", "content": self.text("prompt")}],
            "answer": self.text("answer"),
            "faulty": [{kind: self.text(f"fault {kind}") for kind in ("kind", "detail", "text")}],
            "completions": completions,
        }

    def completion(self, index: int, step: int) -> dict[str, Any]:
        texts = ["12", " +", "", "é", "\n", self.text("completion"), "<|end|>"]
        count = len(texts)
        learned = index < 2
        return {
            "index": index,
            "reward": [0.0, 1.0, None][index % 3],
            "parts": {self.text("reward part"): 1.0},
            "advantage": [-0.5, 0.5, None][index % 3],
            "finish_reason": "stop",
            "temperature": 1.0,
            "versions": [
                {"version": step - 1, "start": 0, "end": 3},
                {"version": step, "start": 3, "end": count},
            ],
            "text": "".join(texts[:-1]),
            "tokens": {
                "ids": list(range(100, 100 + count)),
                "texts": texts,
                "logprobs": [-0.1, -2.5, -0.01, -4.0, -0.5, -6.0, -0.001],
                "learner_logprobs": [-0.1, -2.25, -0.01, -4.5, -0.5, -6.0, -0.001] if index == 1 else None,
                "entropies": [0.1, 1.5, 0.02, 2.0, 0.4, 3.0, 0.01] if learned else None,
                "trained": [[0, 5], [6, count]],
                "clipped": [3] if learned else [],
                "advantages": None,
                "learned": learned,
            },
        }

    def trajectory_report(self) -> dict[str, Any]:
        numbers = {"num_waiting": 1, "num_rewarded": 1, "num_reserved": 1, "num_collected": 12, "num_trained": 8}
        return {**numbers, "oldest_seconds": 4.0, "dropped": {"stale": 1, self.text("reason"): 1}}

    def recent(self, state: str = "") -> list[dict[str, Any]]:
        rows = []
        for index in range(4 * self.num_texts):
            name = ("waiting", "rewarded", "trained", "dropped")[index % 4]
            is_here = name != "dropped"
            row = {
                "id": f"{self.text('request id')}-{index}",
                "policy": "policy",
                "state": name,
                "reason": self.text("reason") if name == "dropped" else None,
                "reward": None if name in ("waiting", "dropped") else 1.0,
                "parts": {self.text("reward part"): 1.0} if name == "rewarded" else {},
                "waited": 3.0 if name == "rewarded" else None,
                "age": 4.0 * index if is_here else None,
                "version": 198 if is_here else None,
                "step": 200 if name == "trained" else None,
                "prompt": self.text("prompt") if is_here else None,
                "text": self.text("completion") if is_here else None,
                "finish_reason": "stop" if is_here else None,
            }
            rows.append(row)
        return [row for row in rows if state in ("", row["state"])]

    def faults(self) -> list[dict[str, Any]]:
        return [self.fault() for _ in range(self.num_texts)]

    def fault(self) -> dict[str, Any]:
        culprit = {"problem_id": self.text("problem id"), "group": 3, "index": 1, "reason": self.text("reason")}
        own = {"kind": self.text("kind of fault"), "text": self.text("fault")}
        return {"step": 11, "time": NOW - 50, **own, "culprits": [culprit]}

    def raw(self, query: Mapping[str, str]) -> dict[str, Any]:
        since, until = int(query.get("since") or 0), int(query.get("until") or self.num_steps)
        rows = self.rows[since:until][:2000]
        names = query["names"].split(",") if query.get("names") else list(rows[0] if rows else {})
        columns = {name: [row.get(name) for row in rows] for name in names}
        return {"epoch": self.epoch, "steps": [row["step"] for row in rows], "columns": columns, "more": False}

    def answer(self, path: str, query: Mapping[str, str]) -> object | None:
        """Return the JSON of a route; None for one that is unknown."""
        if path.startswith("/v1/runs/"):
            return self._of_run(path.removeprefix("/v1/runs/"), query)
        routes: dict[str, Callable[[], object]] = {
            "/v1/session": self.session,
            "/v1/runs": lambda: {"data": self.runs(), "after": None},
            "/v1/device": self.device,
            "/v1/device/timeline": self.timeline,
            "/v1/device/rows": self.device_rows,
            "/v1/shares": lambda: self.device()["shares"],
            "/v1/training/status": self.status,
            "/v1/trajectories": lambda: {"data": {"policy": self.trajectory_report()}},
            "/v1/trajectories/recent": lambda: {"data": self.recent(query.get("state", ""))},
        }
        return routes[path]() if path in routes else None

    def _of_run(self, path: str, query: Mapping[str, str]) -> object | None:
        run, _, rest = path.partition("/")
        if run == OTHER and rest == "history":
            return replace(self, seed=1, num_steps=self.num_steps * 3 // 4, histories={}).history()
        routes: dict[str, Callable[[], object]] = {
            "": lambda: self.run(RUN if run == "current" else run),
            "history": lambda: (
                self.raw(query) if "since" in query else self.history(int(query.get("points") or POINTS))
            ),
            "evaluations": lambda: {"data": self.evaluations()},
            "happenings": lambda: {"data": self.happenings()},
            "checkpoints": lambda: {"data": [{"name": "step_000350", "step": 350, "time": NOW - 30, "bytes": 123_456}]},
            "faults": lambda: {"data": self.faults()},
            "log": lambda: {"data": self.log()},
            "rollouts": lambda: self.rollouts(query.get("problem", "")),
            "config": lambda: {"values": self.config(run)},
        }
        if rest.startswith("rollouts/"):
            step, _, group = rest.removeprefix("rollouts/").partition("/")
            return self.group(int(step), int(group)) if group else self.groups(int(step))
        return routes[rest]() if rest in routes else None

    def config(self, run: str) -> dict[str, Any]:
        rate = 4e-4 if run in ("current", RUN) else 1e-3
        own = {f"{name}.{index}": self.text("value") for index, name in enumerate(self.settings)}
        return {"learner.learning_rate": rate, "seed": 0, "environment.name": self.text("config"), **own}

    def hello(self) -> str:
        """Return the first event of the stream."""
        shown = {"epoch": self.epoch, "last": self.num_steps or None, "now": NOW, "policy": "policy"}
        return event("hello", {**shown, "status": self.status(), "pulse": self.pulse(), "last_step_row": None})


def event(kind: str, data: object) -> str:
    return f"event: {kind}\ndata: {json.dumps(data)}\n\n"
