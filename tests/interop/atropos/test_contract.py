"""Stock clients of atroposlib get from our server what they need, and its log-probs are the learner's."""

import json
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from bench.processes import NANO, foreign_environment, last_json

from tests.interop.atropos.stage import Stage, Trainer, base_overrides, expect, run_api, trainer

PROGRAM = Path(__file__).parents[1] / "clients" / "programs" / "atropos_contract.py"
TOLERANCE = 1e-4
"""Between the log-probs of sampling and of a forward pass over the same tokens, in float32; 0 with a strict BLAS."""
Sampled = Mapping[str, Sequence[Mapping[str, Any]]]


@pytest.mark.interop
def test_stock_servers_of_atropos_get_whole_sequences(stage: Stage) -> None:
    """VLLMServer, SGLangServer and OpenAIServer through ManagedServer, with and without BOS."""
    for name, model in (("plain", str(NANO)), ("bos", str(with_bos(stage.folder / "bos-model")))):
        own = stage.of(name)
        with run_api(own) as api, trainer(own, [*base_overrides(api.url), f"model.path={model}"]) as one:
            found = ask(own, one, model, *(["bos"] if name == "bos" else []))
            if name == "bos":
                expect(all(node["tokens"][0] == BOS for nodes in found.values() for node in nodes), "no BOS in front")


@pytest.mark.interop
def test_log_probs_are_those_of_the_learner(stage: Stage, record_property: Callable[[str, object], None]) -> None:
    """The learner trains, at a learning rate of 0, on what stock clients were given, and compares."""
    overrides = ["rollout.problems_per_step=3", "learner.learning_rate=0"]
    with run_api(stage) as api, trainer(stage, [*base_overrides(api.url), *overrides]) as one:
        found = ask(stage, one, str(NANO))
        worst = worst_difference(one, found, shift=0)
        shifted = worst_difference(one, found, shift=1)
        posted = [nodes for nodes in found.values() if len(nodes) in (4, 12)]
        for nodes in posted:
            api.put(posted_group(nodes))
        num_steps = sum(map(len, posted)) // 12
        one.wait_for_step(num_steps)
        rows = one.rows()
    largest = max(row["parity/max_abs"] for row in rows if row["parity/tokens"])
    ratios = [row[name] for row in rows for name in ("offpolicy/ratio_min", "offpolicy/ratio_max")]
    expect(worst <= TOLERANCE, f"sampled and recomputed log-probs differ by {worst}")
    expect(largest <= TOLERANCE, f"engine and learner differ by {largest}")
    expect(all(abs(ratio - 1) <= TOLERANCE for ratio in ratios if ratio is not None), f"ratios {ratios}")
    expect(min(row["atropos/joined_fraction"] for row in rows) == 1, "not everything was joined with the ledger")
    expect(rows[0]["parity/tokens"] > 0 and rows[-1]["atropos/refused"] == 0, rows)
    expect(shifted > 0.1, f"the control, shifted by one, differs by {shifted} only")
    record_property("atropos.ledger_join_fraction", min(row["atropos/joined_fraction"] for row in rows))
    record_property("remark", f"at most {max(worst, largest):.1e} apart; shifted by one {shifted:.1f}")


def ask(stage: Stage, one: Trainer, model: str, *words: str) -> Sampled:
    """The samples of the program with atroposlib's classes. Raises AssertionError with its errors."""
    done = subprocess.run(
        [stage.python, str(PROGRAM), one.url, model, *words],
        env=foreign_environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    expect(done.returncode == 0, done.stderr[-600:])
    return last_json(done.stdout)


def worst_difference(one: Trainer, found: Sampled, *, shift: int) -> float:
    """The difference of sampled log-probs to those of one forward pass over the sequence, moved by `shift` places."""
    worst = 0.0
    for nodes in found.values():
        for node in nodes:
            body = {"prompt": {"prompt_token_ids": node["tokens"]}, "prompt_logprobs": 0, "n": 1, "max_tokens": 1}
            answer = one.http.post("/generate", json=body | {"temperature": 1.0})
            answer.raise_for_status()
            truth = [place and next(iter(place.values())) for place in answer.json()["prompt_logprobs"]]
            for place, mask in enumerate(node["masks"][:-1]):
                if mask != -100:
                    worst = max(worst, abs(node["logprobs"][place] - truth[place + shift]))
    return worst


def posted_group(nodes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "tokens": [node["tokens"] for node in nodes],
        "masks": [node["masks"] for node in nodes],
        "inference_logprobs": [node["logprobs"] for node in nodes],
        "scores": [float(number) for number in range(len(nodes))],
    }


BOS = 0


def with_bos(folder: Path) -> Path:
    """The embedded model with a tokenizer that puts its padding token in front of every text."""
    shutil.copytree(NANO, folder)
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    token = "<|pad|>"
    special = {"id": token, "type_id": 0}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": special}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [
            {"SpecialToken": special},
            {"Sequence": {"id": "A", "type_id": 0}},
            {"Sequence": {"id": "B", "type_id": 1}},
        ],
        "special_tokens": {token: {"id": token, "ids": [BOS], "tokens": [token]}},
    }
    file.write_text(json.dumps(tokenizer))
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"bos_token": token}))
    return folder
