"""`scripts/figures PREFIX...`: measures the figures whose names begin so, and shows each beside its bar.

Prints a line of JSON (figures, machine, commit) as soon as a figure is known, so that nothing is lost when it is
stopped, and one with all of them at the end. Ends with 1 if a figure falls short or was not measured. Without a prefix
it measures everything that can be measured here. `--list` names all figures.
"""

import json
import os
import sys
import traceback
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from bench.compare import print_table
from bench.measured import write_tables
from bench.measurement import (
    DEFAULT_PEERS,
    MEASUREMENTS,
    MISSING,
    SHORT,
    Figures,
    Measurement,
    Request,
    bars,
    chosen,
    found_here,
)
from bench.processes import ROOT, blas_name
from parallm.metrics.machine import describe_commit, describe_machine, describe_versions


def main() -> int:
    arguments = read_arguments()
    if arguments.list:
        list_figures()
        return 0
    if arguments.write is not None:
        write_tables(ROOT, [Path(name).read_text() for name in arguments.write])
        return 0
    request = request_of(arguments)
    here = found_here(request)
    measurements = chosen(request, here)
    if not measurements:
        names = ", ".join(sorted({name.partition(".")[0] for name in bars()}))
        print(f"no figure that can be measured here begins with {' or '.join(arguments.figures)}; there are {names}")
        return 2
    figures, failed = measure_all(measurements, request, arguments.report)
    rows = judged(measurements, figures, request, here)
    print_table("Figures", [("figure", "value", "bar", ""), *rows])
    line = json_line(figures)
    if arguments.report:
        arguments.report.write_text(report_of(rows, failed, line))
    print(line, flush=True)
    return int(bool(failed) or any(verdict in (SHORT, MISSING) for *_, verdict in rows))


def read_arguments() -> Namespace:
    parser = ArgumentParser(prog="scripts/figures", description=__doc__)
    parser.add_argument("figures", nargs="*", metavar="PREFIX", help="beginnings of names of figures")
    parser.add_argument("--list", action="store_true", help="all figures with their bars, needs and minutes")
    parser.add_argument("--model", default=os.environ.get("PARALLM_MODEL"), help="a local folder (PARALLM_MODEL)")
    parser.add_argument("--data", default=os.environ.get("PARALLM_GSM8K"), help="GSM8K as jsonl (PARALLM_GSM8K)")
    parser.add_argument(
        "--environments",
        nargs="*",
        default=[one for one in os.environ.get("PARALLM_CLONES", "").split(os.pathsep) if one],
        help="clones of Atropos, verifiers and prime-rl (PARALLM_CLONES)",
    )
    parser.add_argument("--peers", type=Path, default=DEFAULT_PEERS, help="where peers are installed (%(default)s)")
    parser.add_argument(
        "--torch-python",
        default=os.environ.get("PARALLM_TORCH_PYTHON", sys.executable),
        help="an interpreter with torch, trl and peft for a GPU (PARALLM_TORCH_PYTHON)",
    )
    parser.add_argument(
        "--vllm",
        default=os.environ.get("PARALLM_VLLM"),
        help="a folder of packages with vLLM, where that interpreter has none (PARALLM_VLLM)",
    )
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run? Bars mean nothing then")
    parser.add_argument("--report", type=Path, help="a file for the table, the versions and the line of JSON")
    parser.add_argument("--write", nargs="*", metavar="FILE", help="put these files' lines of JSON into MEASURED.md")
    return parser.parse_args()


def request_of(arguments: Namespace) -> Request:
    def absolute(name: str | None) -> str | None:
        return str(Path(name).expanduser().resolve()) if name else None

    return Request(
        wanted=arguments.figures or ("",),
        model=absolute(arguments.model) or "nano",
        data=absolute(arguments.data),
        environments=[Path(name).expanduser().resolve() for name in arguments.environments],
        peers=arguments.peers,
        torch_python=arguments.torch_python,
        vllm=Path(folder) if (folder := absolute(arguments.vllm)) else None,
        is_quick=arguments.quick,
    )


def measure_all(
    measurements: Sequence[Measurement], request: Request, report: Path | None = None
) -> tuple[Figures, list[str]]:
    """All figures, and the names of the measurements that have failed, each of which costs its own figures only."""
    figures: Figures = {}
    failed: list[str] = []
    for one in measurements:
        print(f"== {one.name}, about {one.minutes:g} minutes", flush=True)
        try:
            measured = one.measure(request)
            for found in [measured] if isinstance(measured, dict) else measured:
                known = {name: value for name, value in found.items() if figures.get(name) != value}
                figures |= found
                if known:
                    print(json_line(known), flush=True)  # what was measured outlives a crash of the machine
        except Exception:  # noqa: BLE001  # whatever it was, the others are measured
            traceback.print_exc()
            failed.append(one.name)
        if report:
            report.write_text(report_of([], failed, json_line(figures)))
    return figures, failed


def judged(
    measurements: Sequence[Measurement], figures: Figures, request: Request, here: frozenset[str]
) -> list[tuple[str, str, str, str]]:
    """Name, value, bar and verdict of the wanted figures of these measurements."""
    rows = []
    for one in measurements:
        for name, bar in one.bars.items():
            if request.wants(name):
                value, bounded = figures.get(name), bar.with_bounds(figures)
                text = "-" if value is None else f"{value:.4g}"
                rows.append((name, text, bounded.text(), bounded.verdict(value, here)))
    return rows


def json_line(figures: Figures) -> str:
    return json.dumps({"figures": figures, "machine": machine(), "commit": commit()})


@cache
def machine() -> str:
    return describe_machine(blas_name())


commit = cache(describe_commit)


def report_of(rows: Sequence[tuple[str, str, str, str]], failed: Sequence[str], line: str) -> str:
    """One file that says everything about a machine on which nobody else can look."""
    table = [f"| {' | '.join(row)} |" for row in (("figure", "value", "bar", ""), ("---",) * 4, *rows)]
    problems = [f"Failed: {', '.join(failed)}.", ""] if failed else []
    return "\n".join(["# Figures", "", describe_versions(), "", *problems, *table, "", "```", line, "```", ""])


def list_figures() -> None:
    rows = [("figure", "bar", "needs", "measurement", "minutes")]
    for one in MEASUREMENTS:
        for name, bar in one.bars.items():
            needs = sorted({one.needs, bar.needs} - {""})
            rows.append((name, bar.text() or bar.max_figure or "", ", ".join(needs), one.name, f"{one.minutes:g}"))
    print_table("Figures", rows)


if __name__ == "__main__":
    sys.exit(main())
