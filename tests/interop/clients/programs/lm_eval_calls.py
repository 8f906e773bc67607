"""lm-eval's `local-completions` on a task of our own problems, scored and generated.

Its third argument is a file with a line for each problem: `context`, `choices`, and for each choice the
`loglikelihood` and `is_greedy` that were computed without a server.
"""

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

from checking import MODEL, expect, report, server_and_model
from lm_eval import simple_evaluate

URL, FOLDER = server_and_model()
FILE = Path(sys.argv[3])
MAX_DIFFERENCE = 1e-3
TASK: dict[str, Any] = {
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": str(FILE)}},
    "test_split": "test",
    "doc_to_text": "{{context}}",
    "doc_to_target": 0,
    "target_delimiter": "",
}
CHOOSE = TASK | {
    "task": "choose",
    "output_type": "multiple_choice",
    "doc_to_choice": "choices",
    "metric_list": [{"metric": "acc"}],
}
CONTINUE = TASK | {
    "task": "continue",
    "output_type": "generate_until",
    "doc_to_target": "{{choices[0]}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 12, "temperature": 0.0},
    "metric_list": [{"metric": "exact_match"}],
}


@cache
def samples_of(name: str, batch_size: int) -> list[dict[str, Any]]:
    task = {"choose": CHOOSE, "continue": CONTINUE}[name]
    own = {"model": MODEL, "base_url": f"{URL}/v1/completions", "tokenizer": FOLDER, "max_length": 1024}
    answer = simple_evaluate("local-completions", own, [task], batch_size=batch_size, log_samples=True)
    samples: list[dict[str, Any]] = answer["samples"][name]
    return sorted(samples, key=lambda sample: sample["doc_id"])


def likelihoods(batch_size: int) -> tuple[list[tuple[float, bool]], list[tuple[float, bool]]]:
    """What the server says, and what was computed without one."""
    problems = [json.loads(line) for line in FILE.read_text().splitlines()]
    theirs = [
        (loglikelihood, is_greedy)
        for sample in samples_of("choose", batch_size)
        for loglikelihood, is_greedy in sample["filtered_resps"]
    ]
    own = [(one["loglikelihood"], one["is_greedy"]) for problem in problems for one in problem["found"]]
    return theirs, own


def loglikelihoods_are_those_of_the_model() -> None:
    theirs, own = likelihoods(batch_size=1)
    worst = max(abs(float(one[0]) - other[0]) for one, other in zip(theirs, own, strict=True))
    expect(worst < MAX_DIFFERENCE, f"they differ by {worst}")


def several_prompts_in_one_request_give_the_same() -> None:
    theirs, own = likelihoods(batch_size=4)
    worst = max(abs(float(one[0]) - other[0]) for one, other in zip(theirs, own, strict=True))
    expect(worst < MAX_DIFFERENCE, f"they differ by {worst}")


def greedy_choices_are_known() -> None:
    theirs, own = likelihoods(batch_size=1)
    expect([str(one[1]) for one in theirs] == [str(other[1]) for other in own], theirs)


def texts_are_generated_until_a_stop_string() -> None:
    texts = [sample["resps"][0][0] for sample in samples_of("continue", 1)]
    expect(all(texts) and not any("\n" in text for text in texts), texts)


if __name__ == "__main__":
    report(
        "lm_eval",
        [
            loglikelihoods_are_those_of_the_model,
            several_prompts_in_one_request_give_the_same,
            greedy_choices_are_known,
            texts_are_generated_until_a_stop_string,
        ],
    )
