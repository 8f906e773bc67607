"""A load of guidellm: 200 streaming chats of synthetic prompts, eight at a time. What it needs is on this disk."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from checking import MODEL, expect, report, server_and_model

URL, FOLDER = server_and_model()
NUM_REQUESTS, OUTPUT_TOKENS = 200, 16


def load(file: Path) -> dict[str, Any]:
    """Raises subprocess.CalledProcessError if guidellm fails."""
    options = {
        "backend": f"kind=openai_http,target={URL},model={MODEL}",
        "profile": "kind=concurrent,streams=8",
        "constraint": f"kind=max_requests,count={NUM_REQUESTS}",
        "tokenizer": f"kind=huggingface_auto,model={FOLDER}",
        "data": f"kind=synthetic_text,prompt_tokens=32,output_tokens={OUTPUT_TOKENS}",
        "output": f"kind=json,path={file}",
    }
    command = [str(Path(sys.executable).parent / "guidellm"), "run", "--disable-console"]
    command += [word for name, value in options.items() for word in (f"--{name}", value)]
    subprocess.run(command, check=True, stdout=sys.stderr, cwd=file.parent)
    benchmark: dict[str, Any] = json.loads(file.read_text())["benchmarks"][0]
    return benchmark


with tempfile.TemporaryDirectory() as folder:
    BENCHMARK = load(Path(folder) / "benchmark.json")


def all_requests_are_answered() -> None:
    totals = BENCHMARK["metrics"]["request_totals"]
    errors = [one["info"]["error"] for one in BENCHMARK["requests"]["errored"][:1]]
    expect(totals["successful"] == NUM_REQUESTS and totals["errored"] == 0, f"{totals} {errors}")


def each_answer_has_as_many_tokens_as_were_asked_for() -> None:
    counts = [one["output_metrics"]["text_tokens"] for one in BENCHMARK["requests"]["successful"]]
    expect(set(counts) == {OUTPUT_TOKENS}, sorted(set(counts)))


if __name__ == "__main__":
    report("guidellm", [all_requests_are_answered, each_answer_has_as_many_tokens_as_were_asked_for])
