"""`/v1/runs/{run}/rollouts`: what the policy wrote in each step, and what the learner made of each token."""

from collections import OrderedDict
from pathlib import Path

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from parallm.errors import UnknownObject
from parallm.metrics.rollout_files import FOLDER
from parallm.metrics.rollout_folder import RolloutFolder
from parallm.server.dashboard.answers import PageHost, answer_made
from parallm.server.dashboard.rollouts import GroupFilter, Order, group_answer, groups_answer, steps_answer
from parallm.server.dashboard.runs import Runs

MAX_FOLDERS = 8
"""Other runs whose lists of steps stay in memory."""


def rollout_routes(host: PageHost) -> APIRouter:
    router, runs, others = APIRouter(), Runs(host.watching), OrderedDict[Path, RolloutFolder]()

    def folder_of(run: str, policy: str | None) -> RolloutFolder:
        """Return the completions of a run. For threads. Raises UnknownObject, UnknownModel."""
        if (live := runs.live(run, policy)) is not None:
            if live.rollouts is None:
                raise UnknownObject("this run keeps no completions: it learns from given data or metrics.rollouts=off")
            return live.rollouts
        path = runs.folder(run, policy).path / FOLDER
        folder = others.setdefault(path, RolloutFolder(path))
        while len(others) > MAX_FOLDERS:
            others.popitem(last=False)
        return folder

    @router.get("/v1/runs/{run}/rollouts")
    async def steps(http: Request, run: str, policy: str | None = None, problem: str = "") -> Response:
        """The steps whose completions are kept; with `problem` those that asked it, and the group in each.

        `damaged` names files that cannot be read, `dropped` counts steps that were not written because writing took
        longer than training.
        """
        return await runs.read(lambda: answer_made(http, lambda: steps_answer(folder_of(run, policy), problem)))

    @router.get("/v1/runs/{run}/rollouts/{step}")
    async def groups(
        http: Request,
        run: str,
        step: int,
        policy: str | None = None,
        sort: Order = "index",
        environment: str = "",
        search: str = "",
        signal: bool = False,
    ) -> Response:
        """The groups of a step: a problem each, with rewards, advantages and lengths of its completions; at most 200.

        `signal` leaves out groups whose rewards are equal; `search` looks into problems and completions.
        """
        chosen = GroupFilter(sort=sort, environment=environment, search=search, signal=signal)
        return await runs.read(lambda: answer_made(http, lambda: groups_answer(folder_of(run, policy), step, chosen)))

    @router.get("/v1/runs/{run}/rollouts/{step}/{group}")
    async def group(http: Request, run: str, step: int, group: int, policy: str | None = None) -> Response:
        """One group with the ids, texts, log-probs, entropies, advantages and clipping of its tokens.

        `learner_logprobs` is null where the learner's equal the sampler's bit for bit, `entropies` where nothing was
        learned from a completion, `advantages` where each token has its completion's.
        """
        return await runs.read(lambda: answer_made(http, lambda: group_answer(folder_of(run, policy), step, group)))

    return router
