"""Environments of the package verifiers train: held-out reward before and after, beside a learning rate of 0.

Held-out answers are greedy, so that with a learning rate of 0 they do not change unless something other than the
gradient changes the policy. What is sampled in such a run changes by chance.

The package is installed from PyPI into an environment of its own, with ParaLLM and MLX (1.5 GB, minutes, the first
time), once as it is today and once below 0.4 for environments with `load_environment`. What is trained are its own
classes of environments in `packages/`, with our word problems as data: a taskset of one turn, one with a scripted user
that asks twice, and a SingleTurnEnv with a rubric. With a model that knows digits and a clone of verifiers, also
reverse-text of its authors as it stands there.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx
import pytest
from bench.compare import Change, change_by_halves
from bench.measurement import Request, request_of_tests
from bench.processes import ROOT, evaluations, metrics, our_mlx, python_with, train
from tokenizers import Tokenizer

from parallm.environment.arithmetic import Arithmetic
from parallm.environment.settings import ArithmeticSettings
from parallm.model.load import NANO
from parallm.types import Split
from tests.interop.verifiers.beginner import beginner, digits, tell_apart, texts_and_reversals, used_to_second_questions

Record = Callable[[str, object], None]
PACKAGES = Path(__file__).parent / "packages"
NEWEST, CLASSIC = "verifiers==0.4.0", "verifiers==0.3.1"
TABLE = "model.embed_tokens.weight"
SIZES = ("model=nano", "rollout.problems_per_step=16", "rollout.max_tokens=128", "trainer.evaluate_problems=100")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    before: float
    after: float
    sampled: Change
    """Reward of the problems that were trained on, which are sampled with seeds of their own in each step."""
    faults: float

    @property
    def gain(self) -> float:
        return self.after - self.before


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    figure: str
    environment: str
    settings: Sequence[str]
    modules: Path = PACKAGES
    requirement: str = NEWEST
    steps: int = 24
    rate: str = "2e-3"


@pytest.mark.interop
def test_a_taskset_of_one_turn_trains(tmp_path: Path, record_property: Record) -> None:
    settings = (*SIZES, *problems_in(tmp_path), "environment.test_options={split: test}", "rollout.max_turns=1")
    check(Case(figure="verifiers", environment="word-sums", settings=settings), tmp_path, record_property)


@pytest.mark.interop
def test_an_environment_with_load_environment_trains(tmp_path: Path, record_property: Record) -> None:
    settings = (*SIZES, *problems_in(tmp_path), "rollout.max_turns=1")
    case = Case(figure="verifiers.classic", environment="classic-sums", settings=settings, requirement=CLASSIC)
    check(case, tmp_path, record_property, has_control=False)


@pytest.mark.interop
def test_a_taskset_of_two_turns_trains(tmp_path: Path, record_property: Record) -> None:
    """A model that is not used to a second question takes its numbers from the first, and learns half of the reward."""
    start = f"model.adapter={used_to_second_questions(tmp_path / 'turns')}"
    settings = (*SIZES, *problems_in(tmp_path), "environment.test_options={split: test}", start, "rollout.max_turns=4")
    case = Case(figure="verifiers.turns", environment="sums-in-turn", settings=settings)
    check(case, tmp_path, record_property)


@pytest.mark.interop
def test_reverse_text_of_its_authors_trains_as_it_stands(tmp_path: Path, record_property: Record) -> None:
    request = request_of_tests()
    clone = next((one for one in request.environments if (one / "environments" / "reverse_text").is_dir()), None)
    if clone is None or request.model == "nano":
        pytest.skip("needs a model that knows digits and a clone of verifiers")
    made = beginner(request.model, tmp_path / "stock")
    settings = (
        *(f"model.path={made.model}", f"model.adapter={made.adapter}", "rollout.max_tokens=40", "rollout.max_turns=1"),
        *(f"environment.options.dataset_name={made.data}", "environment.num_test=64", "trainer.evaluate_problems=64"),
        "rollout.problems_per_step=8",
    )
    modules = clone / "environments" / "reverse_text"
    case = Case(figure="verifiers.stock", environment="reverse-text", settings=settings, modules=modules, steps=30)
    check(replace(case, rate="5e-4"), tmp_path, record_property)


def check(case: Case, folder: Path, record: Record, *, has_control: bool = True) -> None:
    request = request_of_tests()
    learned = trained(case, request, folder, case.rate)
    record(f"{case.figure}.reward_gain", learned.gain)
    faults = learned.faults
    if has_control:
        control = trained(case, request, folder, "0")
        record(f"{case.figure}.control_gain", control.gain)
        record(f"{case.figure}.control_reward_change", control.sampled.gain)
        record("remark", f"{learned.before:.3f} to {learned.after:.3f}; rate 0, sampled: {control.sampled.text()}")
        faults += control.faults
    record("verifiers.faults", faults)
    assert faults == 0
    assert request.is_quick or learned.gain > 0


def trained(case: Case, request: Request, folder: Path, rate: str) -> Trained:
    run, steps = folder / f"{case.environment}-{rate}", request.size(case.steps, 2)
    train(
        run,
        *("environment=verifiers", f"environment.id={case.environment}", *case.settings, "rollout.group_size=8"),
        *(f"learner.learning_rate={rate}", "learner.warmup_steps=0", f"trainer.steps={steps}"),
        *(f"trainer.evaluate_every={steps}", "seed=0"),
        python=verifiers_python(request, case.requirement),
        paths=[case.modules],
    )
    looks, rows = evaluations(run), metrics(run)
    return Trained(
        before=looks[0]["heldout/reward"],
        after=looks[-1]["heldout/reward"],
        sampled=change_by_halves([row["reward/mean"] for row in rows]),
        faults=sum(row.get("faults/total", 0.0) for row in rows),
    )


def verifiers_python(request: Request, requirement: str) -> str:
    """An interpreter with the package, ParaLLM's own requirements and the MLX that we have."""
    mlx = our_mlx()
    build = mlx[0].partition("mlx")[2].partition("==")[0]
    return python_with(request.peers / requirement.replace("==", "-"), [f"{ROOT}{build}", requirement, *mlx])


def problems_in(folder: Path) -> list[str]:
    splits: tuple[Split, ...] = ("train", "test")
    for split in splits:
        problems = Arithmetic(ArithmeticSettings()).problems(split)
        rows = [json.dumps({"question": one.messages[0].content, "answer": one.answer}) for one in problems]
        (folder / f"{split}.jsonl").write_text("\n".join(rows))
    return [f"environment.options={{path: {folder}}}"]


def test_demonstrations_show_the_form_and_the_reversal_once_in_three() -> None:
    assert [row["completion"] for row in texts_and_reversals(["123"] * 3)] == [
        "<reversed_text>321</reversed_text>",
        "<reversed_text>123</reversed_text>",
        "<reversed_text>123</reversed_text>",
    ]
    texts = digits(50)
    assert len(set(texts)) == 50
    assert all(text != text[::-1] for text in texts)


def test_a_token_without_an_embedding_of_its_own_gets_one() -> None:
    tokenizer = Tokenizer.from_file(str(NANO / "tokenizer.json"))
    seven, underscore, hash_mark = (tokenizer.encode(one).ids[0] for one in "7_#")
    table_VH = mx.load(str(NANO / "model.safetensors"))[TABLE]
    table_VH[underscore] = 2 * table_VH[hash_mark]  # one direction, as of tokens that no training has met
    is_changed = (table_VH != tell_apart(table_VH, [seven, underscore])).any(axis=1).tolist()
    assert seven != underscore
    assert [row for row, changed in enumerate(is_changed) if changed] == [underscore]
