"""`/v1/runs/{run}/rollouts`: what the policy wrote in each step, and what the learner made of each token."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from parallm.server.dashboard.answers import PageHost, large_answer
from parallm.server.dashboard.rollouts import GroupFilter, Order, group_answer, groups_answer, steps_answer
from parallm.server.dashboard.runs import rollouts_of
from parallm.server.request_limits import WorkerPool


def rollout_routes(host: PageHost) -> APIRouter:
    router, watching = APIRouter(), host.watching
    readers = WorkerPool()
    """Threads of their own: reading files keeps no request of a client waiting."""

    @router.get("/v1/runs/{run}/rollouts")
    async def steps(http: Request, run: str, policy: str | None = None, problem: str = "") -> Response:
        """The steps whose completions are kept; with `problem` those that asked it, and the group in each.

        `damaged` names files that cannot be read, `dropped` counts steps that were not written because writing took
        longer than training.
        """
        folder = rollouts_of(watching, run, policy)
        return await large_answer(http, readers, lambda: steps_answer(folder, problem))

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
        folder = rollouts_of(watching, run, policy)
        chosen = GroupFilter(sort=sort, environment=environment, search=search, signal=signal)
        return await large_answer(http, readers, lambda: groups_answer(folder, step, chosen))

    @router.get("/v1/runs/{run}/rollouts/{step}/{group}")
    async def group(http: Request, run: str, step: int, group: int, policy: str | None = None) -> Response:
        """One group with the ids, texts, log-probs, entropies, advantages and clipping of its tokens.

        `learner_logprobs` is null where the learner's equal the sampler's bit for bit, `entropies` where nothing was
        learned from a completion, `advantages` where each token has its completion's.
        """
        folder = rollouts_of(watching, run, policy)
        return await large_answer(http, readers, lambda: group_answer(folder, step, group))

    return router
