"""The two commands as a user runs them: in processes of their own that train, answer, are stopped and are killed."""

import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import pytest

from parallm.client import Client
from parallm.model.adapters.adapter import make_adapter
from parallm.model.adapters.files import write_mlx, write_peft
from parallm.model.adapters.initial import initial_arrays
from parallm.model.shared_model import SharedModel

ROOT = Path(__file__).parent.parent
TINY = (
    "environment.num_train=32",
    "environment.num_test=4",
    "rollout.problems_per_step=2",
    "rollout.group_size=4",
    "rollout.max_tokens=16",
    "rollout.temperature=1.5",
    "rollout.refill_rounds=1",
    "rollout.refill_below=1",
    "learner.learning_rate=1e-3",
    "learner.warmup_steps=0",
    "trainer.evaluate_problems=0",
    "metrics.samples_per_step=1000",
    "metrics.curves=false",
    "server.enabled=false",
)
SECONDS = 120.0
"""Longer than anything here takes on a busy machine."""


@dataclass(slots=True)
class Command:
    """One process, whose output goes to files."""

    process: subprocess.Popen[bytes]
    out: Path
    err: Path

    def wait_for(self, pattern: str) -> str:
        """The first match of `pattern` in what was printed so far; its first group where it has one."""
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            found = re.search(pattern, self.out.read_text() + self.err.read_text())
            if found:
                return found[found.re.groups]
            assert self.process.poll() is None, f"it ended before it printed {pattern}: {self.output()}"
            time.sleep(0.02)
        raise AssertionError(f"it did not print {pattern}: {self.output()}")

    def end(self, number: int | None = None) -> int:
        """Send a signal, if one is given, and wait for the exit code."""
        if number is not None:
            self.process.send_signal(number)
        return self.process.wait(SECONDS)

    def output(self) -> str:
        return self.out.read_text() + self.err.read_text()


Start = Callable[..., Command]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts `parallm.train`, another command or a script, in `tmp_path`; what still runs at the end is killed."""
    started: list[Command] = []

    def run(*arguments: str, command: str = "train", script: Path | None = None) -> Command:
        program = ["-m", f"parallm.{command}"] if script is None else [str(script)]
        paths = [tmp_path / f"{len(started)}.{name}" for name in ("out", "err")]
        with paths[0].open("wb") as out, paths[1].open("wb") as err:
            process = subprocess.Popen(
                [sys.executable, *program, *arguments],
                cwd=tmp_path,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                stdout=out,
                stderr=err,
            )
        started.append(Command(process, *paths))
        return started[-1]

    yield run
    for command in started:
        if command.process.poll() is None:
            command.process.kill()
            command.process.wait()


def run_folder(tmp_path: Path, name: str) -> Path:
    folders = (tmp_path / "checkpoints" / name).iterdir()
    (folder,) = (folder for folder in folders if not folder.is_symlink())  # `latest` is one
    return folder


def rows_of(folder: Path, name: str) -> list[dict[str, Any]]:
    """Rows without what the clock says."""
    rows = [json.loads(line) for line in (folder / name).read_text().splitlines()]
    return [{key: value for key, value in row.items() if "second" not in key and key != "time"} for row in rows]


def assert_same_run(one: Path, other: Path, steps: int) -> None:
    assert [row["step"] for row in rows_of(one, "metrics.jsonl")] == list(range(1, steps + 1))
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert rows_of(one, name) == rows_of(other, name)
    adapters = [folder / "adapter" / "adapters.safetensors" for folder in (one, other)]
    assert adapters[0].read_bytes() == adapters[1].read_bytes()


def test_good_runs_end_with_exit_code_zero_and_print_no_error(start: Start, tmp_path: Path) -> None:
    def run(number: int) -> tuple[int, str]:
        command = start(*TINY, f"name=good_{number}", "trainer.steps=1", f"seed={number}")
        return command.end(), command.err.read_text()

    with ThreadPoolExecutor(3) as pool:  # MLX has been seen to abort at exit, not every time
        assert list(pool.map(run, range(3))) == [(0, "")] * 3
    assert len(list(tmp_path.glob("checkpoints/good_*/latest/adapter_peft/adapter_model.safetensors"))) == 3


def test_a_run_leaves_what_the_list_of_its_folder_says_and_can_be_named_by_other_commands(
    start: Start, tmp_path: Path
) -> None:
    evaluated = ("trainer.evaluate_problems=4", "trainer.steps=2", "checkpoint.every=1", "checkpoint.keep=1")
    assert start(*TINY, *evaluated, "metrics.curves=true", "name=first").end() == 0
    folder = run_folder(tmp_path, "first")
    assert (tmp_path / "checkpoints" / "first" / "latest").readlink() == Path(folder.name)
    guide = (ROOT / "parallm" / "metrics" / "README.md").read_text().partition("## The run folder")[2]
    rows = re.findall(r"^\| (`.*?`) \| .* \| (.*) \|$", guide.partition("\n## ")[0], re.MULTILINE)
    listed = {name: when for names, when in rows for name in re.findall(r"`([^`]+)`", names)}
    patterns = [re.compile(re.escape(name.rstrip("/")).replace("N", r"\w+")) for name in listed]
    assert [path.name for path in folder.iterdir() if not any(one.fullmatch(path.name) for one in patterns)] == []
    always = [name for name, when in listed.items() if "with " not in when and "where " not in when]
    assert [name for name in always if not list(folder.glob(name.rstrip("/").replace("N", "*")))] == []

    log = (folder / "run.log").read_text()
    assert f"files   checkpoints/first/{folder.name}\n" in log
    assert [log.count(f"parallm.progress: step {number}/2  reward ") for number in (1, 2)] == [1, 1]
    assert [log.count(f"parallm.progress: evaluation at step {number}: ") for number in (0, 2)] == [1, 1]
    assert log.count("parallm.progress: peak memory ") == 1

    onwards = start(*TINY, "trainer.steps=1", "name=second", "model.adapter=checkpoints/first/latest")
    assert onwards.end() == 0, onwards.output()
    assert f"adapter  checkpoints/first/{folder.name}/step_000002/adapter\n" in onwards.out.read_text()
    before = sorted(tmp_path.rglob("*"))
    serving = start("server.port=0", "model.adapter=checkpoints/second/latest@newest", command="serve")
    url = serving.wait_for(r"server +(http://\S+)")
    asked = {"model": "policy", "prompt": "1", "max_tokens": 1}
    version = rows_of(run_folder(tmp_path, "second"), "metrics.jsonl")[-1]["update/version"]
    answer = httpx.post(f"{url}/v1/completions", json=asked, trust_env=False, timeout=SECONDS).json()
    assert answer["model"] == f"policy@{version}"
    assert serving.end(signal.SIGINT) == 0
    assert set(tmp_path.rglob("*")) - set(before) == {serving.out, serving.err}, "serving leaves no files"


def test_a_sweep_runs_one_job_after_the_other(start: Start, tmp_path: Path) -> None:
    command = start("-m", *TINY, "name=sweep", "trainer.steps=1", "seed=0,1")
    assert command.end() == 0
    assert len(list(tmp_path.glob("checkpoints/sweep/*/*/summary.json"))) == 2


def test_a_killed_run_goes_on_bit_for_bit(start: Start, tmp_path: Path) -> None:
    arguments = (*TINY, "trainer.steps=8", "checkpoint.every=2", "checkpoint.resume=auto")
    whole, killed = start(*arguments, "name=whole"), start(*arguments, "name=killed")
    killed.wait_for("step 3/8")
    time.sleep(random.random() / 4)
    assert killed.end(signal.SIGKILL) in (-signal.SIGKILL, 0)  # 0: it was faster
    resumed = start(*arguments, "name=killed")
    assert resumed.end() == 0
    assert "resumed after step" in resumed.output()
    assert whole.end() == 0
    assert_same_run(run_folder(tmp_path, "killed"), run_folder(tmp_path, "whole"), 8)


@pytest.mark.slow
def test_a_run_killed_again_and_again_goes_on_bit_for_bit(start: Start, tmp_path: Path) -> None:
    evaluated = ("trainer.steps=12", "trainer.evaluate_every=3", "trainer.evaluate_problems=4", "checkpoint.every=1")
    arguments = (*TINY, *evaluated, "checkpoint.resume=auto", "model.lora.dropout=0.1", "learner.schedule=cosine")
    assert start(*arguments, "name=whole").end() == 0
    for _ in range(6):
        killed = start(*arguments, "name=killed")
        killed.wait_for(r"step \d+/12|held-out accuracy after")
        time.sleep(random.random())
        killed.end(signal.SIGKILL)
    assert start(*arguments, "name=killed").end() == 0
    assert_same_run(run_folder(tmp_path, "killed"), run_folder(tmp_path, "whole"), 12)
    evaluations = [rows_of(run_folder(tmp_path, name), "evaluations.jsonl") for name in ("killed", "whole")]
    assert evaluations[0] == evaluations[1]


def test_one_interrupt_finishes_the_step_saves_and_leaves(start: Start, tmp_path: Path) -> None:
    command = start(*TINY, "name=run", "trainer.steps=5000", "checkpoint.every=5000")
    command.wait_for("step 2/5000")
    assert command.end(signal.SIGINT) == 0
    folder = run_folder(tmp_path, "run")
    last = rows_of(folder, "metrics.jsonl")[-1]["step"]
    assert last < 5000
    assert [path.name for path in folder.glob("step_*")] == [f"step_{last:06d}"]
    assert (folder / "adapter" / "adapters.safetensors").is_file()
    assert "Traceback" not in command.output()
    assert command.output().count("press Ctrl-C again to leave now") == 1  # not by the display and on stderr too


def test_two_interrupts_leave_at_once(start: Start, tmp_path: Path) -> None:
    command = start(
        *TINY, "name=run", "rollout.max_tokens=200", "rollout.problems_per_step=64", "rollout.temperature=9"
    )
    command.wait_for("files ")
    time.sleep(0.5)
    command.process.send_signal(signal.SIGINT)
    command.wait_for("press Ctrl-C again to leave now")
    began = time.monotonic()
    assert command.end(signal.SIGINT) == 130
    assert time.monotonic() - began < 2
    assert not (run_folder(tmp_path, "run") / "metrics.jsonl").exists()


def test_http_answers_while_training_and_streams_say_what_whole_answers_say(start: Start, tmp_path: Path) -> None:
    serving = ("server.enabled=true", "server.port=0", "trainer.keep_serving=true", "trainer.steps=12")
    command = start(*TINY, *serving, "name=run", "checkpoint.every=100")
    url, page = command.wait_for(r"server +(http://\S+)"), command.wait_for(r"page +(http://\S+)")
    with httpx.Client(base_url=url, timeout=SECONDS) as client, ThreadPoolExecutor(8) as pool:
        assert (page, client.get(page).status_code) == (f"{url}/dashboard/", 200)
        streams = list(pool.map(lambda number: three_streams(client, number), range(8)))
        statuses = [client.get("/v1/training/status").json()]
        while statuses[-1]["state"] != "finished":
            assert client.get("/health").json()["status"] == "ok"
            statuses.append(client.get("/v1/training/status").json())
            time.sleep(0.05)
        assert streams == [three_whole(client, number) for number in range(8)]
        names = {model["id"] for model in client.get("/v1/models").json()["data"]}
        answer = client.post("/v1/completions", json={"model": "policy", "prompt": "Tom", "max_tokens": 2}).json()
        refused = client.post("/v1/completions", json={"model": "policy@99", "prompt": "Tom"})
    assert [status["version"] for status in statuses] == sorted(status["version"] for status in statuses)
    last = statuses[-1]
    assert last["step"] == last["total_steps"] == 12
    assert {"base", "policy", f"policy@{last['version']}"} <= names
    assert answer["model"] == f"policy@{last['version']}"
    assert refused.status_code == 404
    assert f"policy@{last['version']}" in refused.json()["error"]["message"]
    assert command.end(signal.SIGINT) == 0
    assert "Traceback" not in command.output()
    assert all(row["parity/max_abs"] <= 1e-4 for row in rows_of(run_folder(tmp_path, "run"), "metrics.jsonl"))


def body(number: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"Tom has {number} pens and gets 3 more. How many pens does Tom have now?"}]
    return {"model": "base", "messages": messages, "max_tokens": 24, "seed": number, "temperature": 1.0}


def three_streams(client: httpx.Client, number: int) -> list[str]:
    return [streamed(client, body(10 * number + turn)) for turn in range(3)]


def three_whole(client: httpx.Client, number: int) -> list[str]:
    answers = [client.post("/v1/chat/completions", json=body(10 * number + turn)).json() for turn in range(3)]
    return [answer["choices"][0]["message"]["content"] for answer in answers]


def streamed(client: httpx.Client, request: dict[str, Any]) -> str:
    text = ""
    with client.stream("POST", "/v1/chat/completions", json=request | {"stream": True}) as response:
        assert response.status_code == 200
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    for line in lines[:-1]:
        text += json.loads(line)["choices"][0]["delta"].get("content") or ""
    return text


def test_training_is_paused_stepped_saved_and_resumed_over_http(start: Start, tmp_path: Path) -> None:
    command = start(
        *TINY, "server.enabled=true", "server.port=0", "name=run", "trainer.steps=5000", "checkpoint.every=5000"
    )
    url = command.wait_for(r"server +(http://\S+)")
    with httpx.Client(base_url=url, timeout=SECONDS) as client:
        while client.post("/v1/training/pause").status_code == 409:  # the trainer is still being made
            time.sleep(0.02)
        while (status := client.get("/v1/training/status").json())["state"] != "paused":
            time.sleep(0.02)
        client.post("/v1/completions", json={"model": "latest", "prompt": "2", "max_tokens": 4}).raise_for_status()
        stepped = client.post("/v1/training/update", json={"policy": "policy"}).json()
        assert stepped["step"] == status["step"] + 1
        (saved,) = client.post("/training/checkpoint").json()["folders"].values()
        assert saved.endswith(f"step_{stepped['step']:06d}")
        assert (tmp_path / saved / "manifest.json").is_file()
        found = client.get("/v1/training/status").json()
        assert (found["checkpoint_saves"], found["training_enabled"], found["state"]) == (1, True, "paused")
        assert found["current_lora"] == found["available_checkpoints"][-1] == f"checkpoint-{found['version']}"
        assert datetime.fromisoformat(found["last_update"]) <= datetime.now(UTC)
        assert found["trajectories_collected"] >= 8 * stepped["step"]
        assert client.put("/v1/shares", json={"serving_share": 0.9}).json()["serving_share"] == 0.9
        metrics = client.get("/v1/metrics").json()["metrics"]
        assert metrics["checkpoint_saves_total"][0]["value"] == 1
        assert {one["labels"]["kind"] for one in metrics["parallm:device_memory_bytes"]} == {"active", "peak", "cache"}
        refused = client.put("/v1/adapters/policy", content=b"zip")
        assert "is trained by this run" in refused.json()["error"]["message"]
        client.post("/v1/training/resume").raise_for_status()
        assert client.post("/v1/training/update").json()["step"] > stepped["step"]
        client.post("/v1/training/pause")
    assert command.end(signal.SIGINT) == 0
    assert "Traceback" not in command.output()


def written_adapters(tmp_path: Path, nano: SharedModel) -> Path:
    """A folder with the adapters `one` and `two`."""
    root = tmp_path / "adapters"
    for name, value in (("one", 0.3), ("two", -0.4)):
        arrays = initial_arrays(nano.targets, 4, mx.random.key(3))
        made = {key: array + value if key.endswith("lora_b") else array for key, array in arrays.items()}
        write_peft(make_adapter(made, version=0, rank=4, alpha=4), root / name, "nano", model_type="llama")
    return root


def test_what_operators_set_is_there_after_a_kill(start: Start, tmp_path: Path, nano: SharedModel) -> None:
    root = written_adapters(tmp_path, nano)
    serving = (
        "server.port=0",
        f"server.adapters_root={root}",
        f"server.adapters={{given: {root / 'one'}, old: {root / 'one'}}}",
    )

    state = f"checkpoints/serve/serving-{nano.sha256[:12]}"

    def told(url: str) -> list[Any]:
        with httpx.Client(base_url=url, timeout=SECONDS, trust_env=False) as client:
            cards = client.get("/v1/adapters").json()  # before the answers, of which it counts those under way
            splits = [(one["name"], one["shares"]) for one in client.get("/v1/splits").json()["data"]]
            ask = {"model": "ab", "prompt": [5, 9], "max_tokens": 8, "temperature": 0, "user": "me"}
            answers = [
                client.post("/v1/completions", json=ask | {"model": model}).json() for model in ("ab", "poet@good")
            ]
            texts = [(answer["model"], answer["choices"][0]["text"]) for answer in answers]
            return [cards, splits, texts]

    first = start(*serving, command="serve")
    url = first.wait_for(r"server +(http://\S+)")
    assert not (tmp_path / state).exists(), "nothing was set yet"
    with Client(url) as parallm, httpx.Client(base_url=url, timeout=SECONDS, trust_env=False) as client:
        for path in ("one", "two", "one"):
            client.post("/v1/adapters/load", json={"name": "poet", "path": path}).raise_for_status()
        parallm.promote(2, "poet")
        parallm.set_alias("good", 1, "poet")
        parallm.set_split("ab", {"poet@3": 3, "given": 1})
        parallm.unload_adapter("old")
        second = start(*serving, command="serve")
        other = second.wait_for(r"server +(http://\S+)")
        in_use = f"{state} is in use by process {first.process.pid}, which keeps there what operators set"
        second.wait_for(re.escape(f"what operators have set is not restored: {in_use}"))
        refused = httpx.post(f"{other}/v1/adapters/load", json={"name": "poet", "path": "two"}, trust_env=False)
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "folder_in_use")
        assert second.end(signal.SIGTERM) == 0
    before = told(url)
    assert first.end(signal.SIGKILL) == -signal.SIGKILL

    shutil.rmtree(root / "two")
    third = start(*serving, command="serve")
    assert told(third.wait_for(r"server +(http://\S+)")) == before
    for text in (
        f"restored poet@2, no old; aliases poet@good; splits of ab from {state}",
        f"given@1 is {root / 'one'}",
        f"old is as operators have left it, not as server.adapters.old={root / 'one'}",
    ):
        assert text in third.output()
    assert third.end(signal.SIGINT) == 0


def test_adapters_come_and_go_over_http_while_requests_run(start: Start, tmp_path: Path, nano: SharedModel) -> None:
    root = written_adapters(tmp_path, nano)
    packed = shutil.make_archive(str(tmp_path / "two"), "zip", root / "two")
    command = start("name=serve", "server.port=0", f"server.adapters_root={root}", command="serve")
    url = command.wait_for(r"server +(http://\S+)")
    ask = {"prompt": [5, 9, 11, 30], "max_tokens": 200, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    with httpx.Client(base_url=url, timeout=SECONDS) as client, ThreadPoolExecutor(2) as pool:

        def tokens(model: str, **changes: Any) -> tuple[list[int], str]:
            answer = client.post("/v1/completions", json={"model": model} | ask | changes).json()
            return answer["choices"][0]["token_ids"], answer["model"]

        moved = client.post("/load_adapter", json={"adapter_path": str(root / "one")}).json()
        assert (moved["status"], moved["policy_version"]) == ("success", 1)
        with Path(packed).open("rb") as file:
            assert client.post("/upload_adapter", files={"file": file}).json()["policy_version"] == 2
        assert tokens("base", lora_adapter="checkpoint-1")[1] == "policy@1"
        assert client.post("/model/switch-lora", json={"version": "checkpoint-1"}).json()["version"] == 1
        assert tokens("policy") == tokens("policy@1") != tokens("latest")
        loaded = client.post("/load_lora_adapter", json={"lora_name": "poet", "lora_path": "one"})
        assert loaded.json()["status"] == "ok"
        first = tokens("poet")
        assert first[1] == "poet@1"
        assert first[0] != tokens("base")[0]
        client.post("/pause?mode=keep").raise_for_status()
        running = pool.submit(tokens, "poet", request_id="mine")
        while client.get("/v1/queue").json()["num_held"] == 0:
            time.sleep(0.01)
        client.post("/resume").raise_for_status()
        uploaded = client.put("/v1/adapters/poet", content=Path(packed).read_bytes()).json()
        assert (uploaded["id"], uploaded["is_served"]) == ("poet@2", True)
        assert running.result() in (first, tokens("poet"))
        assert tokens("poet")[0] != first[0]
        client.post("/v1/adapters/rollback", json={"name": "poet"}).raise_for_status()
        assert tokens("poet") == first
        aborted = pool.submit(tokens, "poet", request_id="long", max_tokens=400)
        while not client.post("/abort_requests", json={"request_ids": ["long"]}).json()["aborted"]:
            time.sleep(0.001)
        assert len(aborted.result()[0]) < 400
        assert client.post("/load_lora_adapter", json={"lora_name": "x", "lora_path": "../"}).status_code == 400
        assert client.post("/load_lora_adapter", json={"lora_name": "x", "lora_path": "none"}).status_code == 404
        client.delete("/v1/adapters/poet").raise_for_status()
        assert client.post("/v1/completions", json={"model": "poet"} | ask).status_code == 404
    assert command.end(signal.SIGINT) == 0


def test_a_second_process_in_a_run_folder_is_refused_until_the_first_has_ended(start: Start, tmp_path: Path) -> None:
    long = (*TINY, "checkpoint.resume=auto", "checkpoint.every=1", "metrics.display=lines")
    first = start(*long, "trainer.steps=1000")
    first.wait_for(r"step 2/1000")
    second = start(*long, "trainer.steps=1000", "model.path=/nowhere")  # it does not come as far as the model
    folder = run_folder(tmp_path, "run").relative_to(tmp_path)
    before = (tmp_path / folder / "config.yaml").read_text()
    assert one_line(second, 1) == (
        f"parallm: the run folder {tmp_path / folder} is in use by process {first.process.pid}; wait until that has "
        "ended, or choose another folder with name=NAME or hydra.run.dir=FOLDER"
    )
    assert (tmp_path / folder / "config.yaml").read_text() == before
    assert first.end(signal.SIGKILL) == -signal.SIGKILL
    third = start(*long, "trainer.steps=3")
    assert third.end() == 0, third.output()
    assert "resumed after step" in third.output()


def test_serving_without_a_learner_answers_until_interrupted(start: Start) -> None:
    warm_up = ("engine.warmup=true", "engine.max_rows=4")
    command = start("name=serve", "server.port=0", *warm_up, command="serve")
    url = command.wait_for(r"server +(http://\S+)")
    with httpx.Client(base_url=url, timeout=SECONDS) as client:
        (queries,) = re.findall(r"^vllm:prefix_cache_queries_total\S* (\S+)", client.get("/metrics").text, re.MULTILINE)
        assert float(queries) == 3 * 64, "prompts of 1, 2 and 4 rows that nobody asked for"
        assert client.get("/v1/training/status").json()["state"] == "serving"
        assert client.post("/v1/chat/completions", json=body(5) | {"model": "policy"}).status_code == 200
    assert command.end(signal.SIGINT) == 0
    assert "Traceback" not in command.output()
    assert "this step" not in command.output()


def one_line(command: Command, code: int) -> str:
    """The one line that a mistake leaves on standard error, and nowhere else."""
    assert command.end() == code, command.output()
    assert "Traceback" not in command.output()
    (line,) = command.err.read_text().splitlines()
    assert line.startswith("parallm: ")
    assert line.removeprefix("parallm: ") not in command.out.read_text()
    return line


def failed_start(command: Command, code: int) -> str:
    """The one line of a command that has left no folder."""
    line = one_line(command, code)
    assert not (command.out.parent / "checkpoints").exists()
    return line


def write_rows(file: Path, *rows: dict[str, str]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_trajectories_of_a_killed_run_are_trained_on_by_the_next(start: Start, tmp_path: Path) -> None:
    live = ("+recipe=live_traffic", "server.port=0", "rollout.problems_per_step=1", "rollout.group_size=2")
    killed = start(*live)
    url = killed.wait_for(r"(http://127\.0\.0\.1:\d+)")
    body = {"model": "policy", "prompt": "1 + 1", "n": 2, "max_tokens": 4, "collect_trajectory": True}
    answer = httpx.post(f"{url}/v1/completions", json=body | {"request_id": "late"}, trust_env=False, timeout=SECONDS)
    assert answer.status_code == 200, answer.text
    assert killed.end(signal.SIGKILL) == -signal.SIGKILL

    resumed = start(*live, "trainer.steps=1", "trainer.keep_serving=false")
    with Client(resumed.wait_for(r"(http://127\.0\.0\.1:\d+)")) as parallm:
        assert parallm.trajectories()["policy"].num_waiting == 2
        assert [parallm.reward(f"cmpl-late-{place}", float(place)) for place in range(2)] == [0.0, 1.0]
    assert resumed.end() == 0, resumed.output()
    (row,) = rows_of(run_folder(tmp_path, "live_traffic"), "metrics.jsonl")
    assert (row["reward/mean"], row["groups/with_signal"]) == (0.5, 1)


LATE = """
import asyncio
import sys

from parallm.run.command import run_command


def run_late(config, folder, blas):
    from parallm.run import train

    build = train.build_policy_run

    async def build_late(*parts):
        await asyncio.sleep(2)
        return await build(*parts)

    train.build_policy_run = build_late
    return train.run_training(config, folder, blas)


sys.exit(run_command("train", run_late))
"""
"""`parallm.train` that takes long to come to its checkpoint."""


def test_the_first_answer_of_a_resumed_run_is_that_of_the_version_it_goes_on_from(start: Start, tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text(LATE)
    serving = ("server.enabled=true", "server.port=0", "trainer.keep_serving=true", "checkpoint.resume=auto")
    ended = start(*TINY, "trainer.steps=3", "checkpoint.every=1")
    assert ended.end() == 0, ended.output()
    resumed = start(*TINY, *serving, "trainer.steps=3", script=tmp_path / "late.py")
    url = resumed.wait_for(r"server +(http://\S+)")
    answer = httpx.post(
        f"{url}/v1/completions", json={"model": "policy", "prompt": "1"}, trust_env=False, timeout=SECONDS
    ).json()
    assert re.fullmatch(r"policy@[1-9]\d*", answer["model"]), (
        "not the base, which a policy is before its versions are back"
    )
    assert resumed.end(signal.SIGINT) == 0
    match = re.search(r"resumed after step 3, version (\d+)", resumed.output())
    assert match is not None
    assert answer["model"] == f"policy@{match[1]}"


WITHOUT_DATA = ("environment=gsm8k", "environment.path=nobody/nothing", *TINY[2:])
"""A data set that would be looked for in the network."""


def test_a_port_in_use_is_named_with_the_way_out_before_data_is_looked_for(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = failed_start(start(*WITHOUT_DATA, "server.enabled=true", f"server.port={port}"), 1)
    assert f"127.0.0.1:{port} is in use by another process; choose another port with server.port=..." in line


def test_a_missing_model_folder_is_named_before_data_is_looked_for(start: Start, tmp_path: Path) -> None:
    line = failed_start(start(*WITHOUT_DATA, f"model.path={tmp_path}/nowhere"), 1)
    assert f"model.path={tmp_path}/nowhere: no such folder" in line


def test_a_half_written_model_folder_is_named(start: Start, tmp_path: Path) -> None:
    folder = shutil.copytree(ROOT / "parallm" / "model" / "nano", tmp_path / "half")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    assert f"model.path={folder}" in failed_start(start(*TINY, f"model.path={folder}"), 1)


def test_an_adapter_of_another_base_is_refused(start: Start, tmp_path: Path) -> None:
    target = "model.layers.0.self_attn.q_proj"
    arrays = {f"{target}.lora_a": mx.zeros((48, 4)), f"{target}.lora_b": mx.zeros((4, 48))}
    write_mlx(make_adapter(arrays, version=1, rank=4, alpha=8.0), tmp_path / "other", num_layers=1)
    line = failed_start(start(*TINY, f"model.adapter={tmp_path}/other", "model.lora.rank=4"), 1)
    assert f"{tmp_path}/other" in line
    assert target in line


def test_a_broken_recipe_is_named(start: Start, tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "mine.yaml").write_text("learner: {learning_rate: [1e-3\n")
    command = start("+recipe=mine")
    assert command.end() == 78
    assert "recipes/mine.yaml cannot be read" in command.err.read_text()
    assert "Traceback" not in command.output()
    assert not (tmp_path / "checkpoints").exists()


def test_a_recipe_with_a_wrong_key_is_explained(start: Start, tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "mine.yaml").write_text("# mine\nlearner: {learning_rat: 1e-3}\n")
    assert "learner.learning_rat: unknown key, did you mean learning_rate?" in failed_start(start("+recipe=mine"), 78)


def test_a_dataset_without_answers_is_named(start: Start, tmp_path: Path) -> None:
    write_rows(tmp_path / "data.jsonl", {"question": "1 + 1?", "answer": "#### 2"}, {"question": "2 + 2?"})
    own = [argument for argument in TINY if not argument.startswith("environment")]
    line = failed_start(start(*own, "environment=gsm8k", f"environment.path={tmp_path}/data.jsonl"), 1)
    assert f"{tmp_path}/data.jsonl, line 2: no text under the key `answer`; its keys are ['question']" in line


def test_a_prompt_longer_than_the_context_names_its_problem(start: Start, tmp_path: Path) -> None:
    write_rows(tmp_path / "data.jsonl", {"question": "How many? " * 40, "answer": "#### 2"})
    own = [argument for argument in TINY if not argument.startswith("environment")]
    data = ("environment=gsm8k", f"environment.path={tmp_path}/data.jsonl")
    line = failed_start(start(*own, *data, "engine.max_context=64"), 1)
    assert re.search(
        r"problem gsm8k/train/0: its prompt has \d+ tokens, and with rollout.max_tokens=16 it does not fit the context "
        "of 64 tokens",
        line,
    )
