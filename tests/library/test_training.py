"""Training from a Python program: recipes, own objects, live rewards, failures, and what is left behind."""

import asyncio
import gc
import logging
import math
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx
import pytest
from omegaconf import OmegaConf

import parallm
from parallm.errors import ConfigError, EnvironmentFailed, FolderInUse, InvalidRequest, RunFolderError, Unavailable
from parallm.types import Message, Problem, Split

SECONDS = 60.0
TINY = (
    "rollout.problems_per_step=2",
    "rollout.group_size=4",
    "rollout.max_tokens=12",
    "rollout.temperature=1.5",
    "rollout.refill_rounds=0",
    "learner.learning_rate=1e-3",
    "learner.warmup_steps=0",
    "metrics.curves=false",
)
UNTESTED = "trainer.evaluate_problems=0"
SUMS = [{"prompt": f"What is {number} + 1?", "answer": str(number + 1)} for number in range(1, 9)]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def even_length(problem: Problem, text: str) -> float:
    return float(len(text) % 2 == 0)


class Shout:
    """An environment of a program, found under no name."""

    weights: Mapping[str, float] = {"loud": 1.0}

    def __init__(self) -> None:
        self.asked: list[str] = []

    def problems(self, split: Split) -> Sequence[Problem]:
        words = ("one", "two") if split == "train" else ("three",)
        return [Problem(problem_id=word, messages=(Message(role="user", content=word),), answer="") for word in words]

    def score(self, problem: Problem, text: str) -> Mapping[str, float]:
        self.asked.append(problem.problem_id)
        return {"loud": float(len(text) % 3)}


def test_a_recipe_with_overrides_leaves_what_the_command_leaves_and_shows_nothing(
    capfd: pytest.CaptureFixture[str],
) -> None:
    own = logging.getLogger("parallm")
    before = (own.level, list(own.handlers), list(logging.root.handlers))
    result = parallm.train("calculator_grpo", [*TINY, "trainer.steps=2", "trainer.evaluate_problems=4", "name=mine"])
    assert result.folder.parent == Path("checkpoints/mine")
    assert [row["step"] for row in result.steps] == [1, 2]
    assert [row["step"] for row in result.evaluations] == [0, 2]
    assert "reward/mean" not in repr(result), "a notebook shows it, with one row for each step"
    assert (result.version, result.was_stopped) == (2, False)
    assert result.best_version in (0, 2)
    assert result.adapter == result.folder / "adapter"
    names = {path.name for path in result.folder.iterdir()}
    assert {"config.yaml", "run.log", "summary.json", "metrics.jsonl", "samples.jsonl", "step_000002"} <= names
    config = OmegaConf.load(result.folder / "config.yaml")
    assert (config.environment.name, config.trainer.steps) == ("calculator", 2)
    assert "parallm.progress: step 2/2" in (result.folder / "run.log").read_text()
    out, err = capfd.readouterr()
    assert (out, err.count("Traceback")) == ("", 0)
    assert (own.level, own.handlers, logging.root.handlers) == before, "a program's loggers stay as they were"


def test_own_problems_with_a_reward_function_are_learned_from_and_shown_where_that_is_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    seen: list[tuple[str, str]] = []

    def reward(problem: Problem, text: str) -> dict[str, float]:
        seen.append((problem.messages[0].content, problem.answer))
        return {"reward": float(len(text) % 2), "correct": float(text.endswith(problem.answer)), "length": len(text)}

    steps = [*TINY, "trainer.steps=1", "metrics.display=lines"]
    result = parallm.train(problems=SUMS[2:], held_out=SUMS[:2], reward=reward, overrides=steps)
    assert "step 1/1" in capsys.readouterr().out
    assert ("What is 1 + 1?", "2") in seen
    row = result.evaluations[-1]
    assert row["heldout/problems"] == 2
    assert row["heldout_part/length"] > 1
    assert result.steps[0]["reward/mean"] <= 1


def test_an_environment_object_is_trained_on_as_it_is() -> None:
    mine = Shout()
    result = parallm.train(environment=mine, overrides=[*TINY, "trainer.steps=1"])
    assert {"one", "two", "three"} == set(mine.asked)
    assert "Shout" in OmegaConf.load(result.folder / "config.yaml").environment.target


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"problems": ["a"]}, "problems and reward belong together"),
        ({"reward": even_length}, "problems and reward belong together"),
        ({"held_out": ["a"]}, "held_out belongs to problems"),
        ({"problems": ["a"], "reward": even_length, "environment": Shout()}, "both given"),
        ({"problems": [{"question": "a"}], "reward": even_length}, "problems/0.*prompt, answer and id"),
        ({"problems": [{"prompt": [1]}], "reward": even_length}, "problems/0: the prompt"),
        ({"problems": ["a", {"prompt": "b", "id": "problems/0"}], "reward": even_length}, "two problems have the id"),
        ({"recipe": "nope"}, "recipe: 'nope' is unknown"),
        ({"recipe": "two_policies_grpo", "environment": Shout()}, "policies: each has an environment of its own"),
        ({"model": "nano", "overrides": ["model.path=nano"]}, "model.path is given twice"),
        ({"overrides": "trainer.steps=2"}, "overrides is 'trainer.steps=2' and must be a list"),
        ({"overrides": {"trainer.steps": 2}}, "overrides is .* and must be a list"),
        ({"overrides": [("trainer.steps", 2)]}, "overrides is .* and must be a list"),
    ],
)
def test_arguments_that_contradict_each_other_are_told_before_anything_is_loaded(
    given: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        parallm.train(**given)  # type: ignore[arg-type]
    assert not list(Path().iterdir())


def test_the_model_is_used_while_it_is_trained_and_training_is_steered() -> None:
    gc.collect()
    threads = set(threading.enumerate())
    with parallm.training(overrides=[*TINY, UNTESTED, "trainer.steps=5000"]) as run:
        assert run.model.chat("hello", temperature=0, max_tokens=4).finish_reason
        run.pause()
        status = run.step()
        assert (status.state, status.version) == ("paused", status.step)
        assert {card.version for card in run.model.adapters()} == set(run.model.versions())
        assert run.model.chat("hello", max_tokens=2).version == status.version
        assert run.checkpoint() == {"policy": run.folder / f"step_{status.step:06d}"}
        with run.model.serve(port=0) as server:
            there = httpx.get(f"{server.url}/v1/training/status", trust_env=False).json()
            assert (there["state"], there["step"]) == ("paused", status.step)
        with pytest.raises(FolderInUse, match="run folder"):
            raise_of_second_run(run.folder)
        run.resume()
        run.step()
        run.stop()
        result = run.wait()
        assert run.has_ended
        assert result.was_stopped
        assert len(result.steps) == result.version > status.step
        assert run.model.chat("hello", max_tokens=2).version == result.version
        with pytest.raises(Unavailable, match="training has ended"):
            run.pause()
    with pytest.raises(Unavailable, match="the run run is closed"):
        run.status()
    assert run.wait() == result
    end = time.monotonic() + SECONDS
    while set(threading.enumerate()) - threads:
        assert time.monotonic() < end, "a thread has stayed"
        time.sleep(0.01)


def raise_of_second_run(folder: Path) -> None:
    from parallm.config.run_folder import locked_run_folder  # noqa: PLC0415

    with locked_run_folder(folder):
        pass


@pytest.mark.slow
def test_leaving_the_block_stops_and_saves_and_a_second_run_goes_on() -> None:
    endless = [*TINY, UNTESTED, "trainer.steps=5000", "checkpoint.resume=auto"]
    with parallm.training(overrides=endless) as run:
        run.step()
    steps = len(run.wait().steps)
    assert run.wait().was_stopped
    assert (run.folder / f"step_{steps:06d}").is_dir()
    with parallm.training(overrides=endless) as again:
        assert again.folder == run.folder
        again.step()
    assert len(again.wait().steps) > steps


def test_answers_are_rewarded_by_the_program_and_learned_from() -> None:
    live = ["rollout.problems_per_step=1", "rollout.group_size=4", "trainer.steps=2", "metrics.samples_per_step=4"]
    with parallm.training("live_traffic", live) as run:
        while not run.has_ended:
            try:
                answers = run.model.generate(["1 + 1 ="], n=4, max_tokens=8, collect_trajectory=True)
                for place, answer in enumerate(answers):
                    assert run.reward(answer, {"first": float(place == 0), "more": 0.5 * place}) >= 0
            except Unavailable:  # it has ended meanwhile
                break
        result = run.wait()
        assert result.version == 2
        assert run.trajectories()["policy"].num_trained == 8


def test_one_update_is_made_on_answers_that_the_program_rewards() -> None:
    with parallm.training("live_traffic", ["trainer.steps=5"]) as run:
        answers = run.model.generate(["1 + 1 ="], n=4, max_tokens=8)
        with pytest.raises(ConfigError, match="collect_trajectory"):
            run.reward(answers[0], 1.0)
        rewarded = [answer.rewarded(float(place)) for place, answer in enumerate(answers)]
        update = run.train_on(rewarded, checkpoint_name="mine")
        assert (update.version, update.num_trained, update.num_recomputed) == (1, 4, 0)
        assert update.kl_to_behaviour == pytest.approx(0, abs=1e-5)
        assert update.checkpoint is not None
        assert run.model.chat("x", temperature=0, max_tokens=1).version == 1
        with pytest.raises(InvalidRequest, match="float"):
            run.train_on([{**rewarded[0], "reward": math.inf}])


def test_what_ends_training_is_raised_by_wait_and_else_by_leaving(caplog: pytest.LogCaptureFixture) -> None:
    def broken(problem: Problem, text: str) -> float:
        raise RuntimeError("no reward today")

    given = {"problems": ["a", "b"], "reward": broken, "overrides": [*TINY, UNTESTED, "trainer.steps=2"]}
    left = parallm.training(**given)  # type: ignore[arg-type]
    with pytest.raises(EnvironmentFailed, match="no reward today"), left:
        wait_until_gone(left)
    with parallm.training(**given) as run:  # type: ignore[arg-type]
        with pytest.raises(EnvironmentFailed):
            run.wait()
        wait_until_gone(run)
        with pytest.raises(Unavailable, match="closed after EnvironmentFailed"):
            run.status()


def wait_until_gone(run: parallm.Training) -> None:
    with pytest.raises(EnvironmentFailed):
        asyncio.run(run.await_close())


def test_a_folder_that_cannot_be_written_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(RunFolderError, match="cannot be written"):
        parallm.train(overrides=[*TINY])


@pytest.mark.slow
def test_two_policies_have_a_result_each() -> None:
    overrides = [*TINY, UNTESTED, "trainer.steps=1", "trainer.evaluate_every=1"]
    result = parallm.train("two_policies_grpo", overrides)
    assert set(result.policies) == {"head", "calculator"}
    assert all(one.folder == result.folder / name for name, one in result.policies.items())


def test_the_server_serves_and_trains_as_two_coroutines() -> None:
    async def main() -> parallm.TrainingResult:
        server = parallm.RLServer(
            base_model="nano",
            lora_config=parallm.LoRAConfig(rank=4, alpha=8),
            rl_config=parallm.RLConfig(algorithm="rloo", learning_rate=1e-3, batch_size=4, group_size=2, steps=2),
            problems=["a", "b"],
            reward=even_length,
            overrides=["rollout.max_tokens=8", UNTESTED, "rollout.temperature=1.5"],
        )
        with pytest.raises(Unavailable, match="nothing is loaded"):
            server.run  # noqa: B018
        serving = asyncio.create_task(server.run_inference(port=0))
        while not server.is_loaded:
            await asyncio.sleep(0.01)
        while server.run.status().state != "paused":  # training waits for its coroutine
            assert server.run.status().step == 0
            await asyncio.sleep(0.01)
        result = await server.run_training_loop()
        again = await server.run_training_loop()
        assert again == result
        answer = await server.run.model.achat("a", max_tokens=2)
        assert answer.version == result.version
        (card, *_) = server.run.model.adapters()
        assert (card.rank, card.alpha) == (4, 8)
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving
        with pytest.raises(Unavailable):
            server.run  # noqa: B018
        return result

    result = asyncio.run(main())
    assert len(result.steps) == 2
    assert "preset: rloo" in (result.folder / "config.yaml").read_text()


@pytest.mark.slow
def test_an_error_of_one_coroutine_ends_both_and_leaves_nothing() -> None:
    def broken(problem: Problem, text: str) -> float:
        raise RuntimeError("no reward today")

    async def main() -> None:
        rl = parallm.RLConfig(batch_size=4, group_size=2)
        server = parallm.RLServer("nano", None, rl, problems=["a"], reward=broken, overrides=[UNTESTED, *TINY[2:3]])
        await asyncio.gather(server.run_inference(port=0), server.run_training_loop())

    with pytest.raises(EnvironmentFailed, match="no reward today"):
        asyncio.run(main())
    with pytest.raises(ConfigError, match="batch_size=9 is no multiple of group_size=8"):
        parallm.RLServer("nano", None, parallm.RLConfig(batch_size=9))
    with parallm.load() as model:
        assert model.chat("x", temperature=0, max_tokens=1).finish_reason == "length"
