"""`/v1/runs`: histories, evaluations and all else that a run has left to read."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from parallm.errors import InvalidRequest, UnknownObject
from parallm.metrics import run_files
from parallm.metrics.history import View
from parallm.metrics.recent_log import LogLine
from parallm.metrics.run_files import EVALUATIONS, HAPPENINGS, SUMMARY, Row, RunFolder
from parallm.server.dashboard.answers import PageHost, answer_made
from parallm.server.dashboard.runs import CURRENT, Runs

DEFAULT_POINTS = 1024
MAX_POINTS = 2048
MAX_ROWS = 2000
DEFAULT_LIMIT, MAX_LIMIT = 500, 5000
DEFAULT_RUNS, MAX_RUNS = 50, 500
MAX_FAULT_STEPS = 200
FAULTS_PER_STEP = 16
LEVELS = {"DEBUG": 10, "INFO": 20, "WARNING": 30, "ERROR": 40, "CRITICAL": 50}


def run_routes(host: PageHost) -> APIRouter:
    router, runs = APIRouter(), Runs(host.watching)
    _add_runs(router, runs)
    _add_numbers(router, runs)
    _add_events(router, runs)
    _add_faults(router, runs)
    return router


def _add_runs(router: APIRouter, runs: Runs) -> None:
    """Add what a run is: the list, one of it, its configuration, its checkpoints."""

    @router.get("/v1/runs")
    async def list_runs(http: Request, limit: int = DEFAULT_RUNS, after: str | None = None) -> Response:
        """Runs below the folder of checkpoints, the newest first."""
        limit = _limit(limit, MAX_RUNS)

        def read() -> Row:
            rows, last = runs.rows(limit, after)
            return {"data": rows, "after": last}

        return await runs.read(lambda: answer_made(http, read))

    @router.get("/v1/runs/{run}")
    async def one_run(http: Request, run: str, policy: str | None = None) -> Response:
        """A run as in the list, with its model, its metrics and its files."""
        names = (await runs.view(run, policy)).names

        def read() -> Row:
            folder = runs.folder(run, policy)
            own = runs.run_id if run == CURRENT else run
            assert own is not None, "there is a current run, or its view would not have been found"
            whole = runs.folders.folders().get(own, folder)
            summary = run_files.json_file(folder, SUMMARY)
            files = [entry for entry in run_files.entries(folder) if entry.is_file(follow_symlinks=False)]
            return {
                **runs.row(own, whole),
                **{name: summary.get(name) for name in ("machine", "commit")},
                "columns": names,
                "files": [{"name": file.name, "bytes": file.stat(follow_symlinks=False).st_size} for file in files],
            }

        return await runs.read(lambda: answer_made(http, read))

    @router.get("/v1/runs/{run}/config")
    async def config(http: Request, run: str, policy: str | None = None) -> Response:
        """Every key of the configuration with its value, as the run was composed."""

        def read() -> Row:
            folder = runs.folder(run, policy)
            found = RunFolder(folder.root, folder.parts)
            if run_files.key_of(found, run_files.CONFIG) is None:  # one of several policies: they have one in common
                found = folder.above()
            return {"values": runs.folders.config(found)}

        return await runs.read(lambda: answer_made(http, read))

    @router.get("/v1/runs/{run}/checkpoints")
    async def checkpoints(http: Request, run: str, policy: str | None = None) -> Response:
        """The checkpoints of a run that are on the disk, by step."""

        def read() -> Row:
            return {"data": run_files.checkpoints_of(runs.folder(run, policy))}

        return await runs.read(lambda: answer_made(http, read))


def _add_numbers(router: APIRouter, runs: Runs) -> None:
    """Add histories and evaluations."""

    @router.get("/v1/runs/{run}/history")
    async def history(
        http: Request,
        run: str,
        policy: str | None = None,
        points: int = DEFAULT_POINTS,
        since: int | None = None,
        until: int | None = None,
        names: str | None = None,
    ) -> Response:
        """Numbers of all steps: minimum, maximum and last of up to `points` groups, or with `since` rows as they are.

        Groups have a power of two of steps and do not move as the run goes on. Another `epoch` than that of an earlier
        answer means that rows were dropped and all is to be read anew.
        """
        if not 1 <= points <= MAX_POINTS:
            raise InvalidRequest(f"points={points} should be from 1 to {MAX_POINTS}", "points")
        view = await runs.view(run, policy)
        if since is None:
            return await runs.read(lambda: answer_made(http, lambda: bucket_answer(view, points)))
        last = (view.last or 0) if until is None else until
        chosen = None if names is None else _known(view, names.split(","))
        return await runs.read(lambda: answer_made(http, lambda: row_answer(view, since, last, chosen)))

    @router.get("/v1/runs/{run}/evaluations")
    async def evaluations(http: Request, run: str, policy: str | None = None) -> Response:
        """The evaluations of a run, the oldest first."""
        if (live := runs.live(run, policy)) is not None:
            rows = list(live.evaluations)
            return await runs.read(lambda: answer_made(http, lambda: {"data": rows}))
        return await _rows_answer(http, runs, run, policy, EVALUATIONS, MAX_LIMIT)


def _add_events(router: APIRouter, runs: Runs) -> None:
    """Add what happened, and the log."""

    @router.get("/v1/runs/{run}/happenings")
    async def happenings(http: Request, run: str, policy: str | None = None, limit: int = DEFAULT_LIMIT) -> Response:
        """What happened in a run beside its steps: published, promoted, saved, paused and so on, the oldest first."""
        return await _rows_answer(http, runs, run, policy, HAPPENINGS, _limit(limit, MAX_LIMIT))

    @router.get("/v1/runs/{run}/log")
    async def log(
        http: Request,
        run: str,
        policy: str | None = None,
        level: str = "",
        limit: int = DEFAULT_LIMIT,
        search: str = "",
    ) -> Response:
        """The newest lines of the log from a level on that hold a text, the oldest first."""
        if level and level.upper() not in LEVELS:
            raise InvalidRequest(f"level={level[:40]!r} should be one of {', '.join(LEVELS)}", "level")
        lowest, limit = LEVELS.get(level.upper(), 0), _limit(limit, MAX_LIMIT)

        def read() -> Row:
            if runs.live(run, policy) is None:
                lines = run_files.log_lines(_log_folder(runs.folder(run, policy)))
            else:
                lines = runs.recent_lines()
            kept = [line for line in lines if LEVELS.get(line.level, 0) >= lowest and _holds(line, search)]
            return {"data": [asdict(line) for line in kept[-limit:]]}

        return await runs.read(lambda: answer_made(http, read))


def _add_faults(router: APIRouter, runs: Runs) -> None:
    """Add the steps with faults, and the completions to blame."""

    @router.get("/v1/runs/{run}/faults")
    async def faults(http: Request, run: str, policy: str | None = None) -> Response:
        """The newest steps with completions that could not be scored or trained on, the oldest first."""

        def read() -> Row:
            folder = runs.folder(run, policy)
            times = run_files.fault_steps(folder)
            newest = sorted(times)[-MAX_FAULT_STEPS:]
            return {"data": [_fault(folder, step, times[step]) for step in newest]}

        return await runs.read(lambda: answer_made(http, read))

    @router.get("/v1/runs/{run}/faults/{step}")
    async def faults_of_step(http: Request, run: str, step: int, policy: str | None = None) -> Response:
        """The completions to blame in one step, with their problems, texts and reasons."""

        def read() -> Row:
            rows = run_files.faults_of(runs.folder(run, policy), step, DEFAULT_LIMIT)
            if not rows:
                raise UnknownObject(f"step {step} of run {run[:200]!r} has no faults; .../faults lists those that have")
            shown = (
                "step",
                "fault",
                "reason",
                "traceback",
                "problem_id",
                "prompt",
                "answer",
                "index",
                "text",
                "reward",
            )
            return {"step": step, "data": [{name: row[name] for name in shown if name in row} for row in rows]}

        return await runs.read(lambda: answer_made(http, read))


def bucket_answer(view: View, points: int) -> dict[str, Any]:
    """Return the history in groups of steps as JSON has it."""
    found = view.buckets(points)
    return {
        "epoch": view.epoch,
        "first": view.first,
        "last": view.last,
        "bucket": found.bucket,
        "starts": found.starts.tolist(),
        "columns": {
            name: {"low": low.tolist(), "high": high.tolist(), "last": last.tolist()}
            for name, (low, high, last) in found.columns.items()
        },
        "constant": found.constant,
    }


def row_answer(view: View, since: int, until: int, names: Sequence[str] | None) -> dict[str, Any]:
    """Return rows as JSON has them."""
    found = view.rows(since, until, names, MAX_ROWS)
    return {
        "epoch": view.epoch,
        "steps": found.steps.tolist(),
        "columns": {name: values.tolist() for name, values in found.columns.items()},
        "more": found.has_more,
    }


async def _rows_answer(http: Request, runs: Runs, run: str, policy: str | None, name: str, limit: int) -> Response:
    def read() -> Row:
        return {"data": run_files.newest_rows(runs.folder(run, policy), name, limit)}

    return await runs.read(lambda: answer_made(http, read))


def _fault(folder: RunFolder, step: int, time: float) -> Row:
    rows = run_files.faults_of(folder, step, FAULTS_PER_STEP)
    first = rows[0] if rows else {}
    return {
        "step": step,
        "time": time,
        "kind": first.get("fault"),
        "text": first.get("reason"),
        "culprits": [{name: row.get(name) for name in ("problem_id", "index", "reason")} for row in rows],
    }


def _log_folder(folder: RunFolder) -> RunFolder:
    """Return the folder with the log: that of the run, also for one of several policies."""
    return folder if run_files.key_of(folder, run_files.LOG) is not None or not folder.parts else folder.above()


def _holds(line: LogLine, search: str) -> bool:
    return search.casefold() in line.text.casefold() or search.casefold() in line.logger


def _limit(limit: int, most: int) -> int:
    if not 1 <= limit <= most:
        raise InvalidRequest(f"limit={limit} should be from 1 to {most}", "limit")
    return limit


def _known(view: View, names: Sequence[str]) -> list[str]:
    """Return the names. Raises InvalidRequest for one that no row has."""
    if unknown := [name for name in names if name not in view.columns]:
        raise InvalidRequest(f"no metric {unknown[0][:100]!r} in this run", "names")
    return list(names)
