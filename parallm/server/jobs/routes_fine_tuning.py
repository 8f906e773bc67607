"""`/v1/fine_tuning/jobs`: training that clients hand in, on the base that is served."""

from collections.abc import Mapping

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from parallm.errors import InvalidRequest, UnknownModel
from parallm.jobs.fine_tuning import new_seed
from parallm.jobs.plan import Hyperparameters, ReinforcementHyperparameters, TuningRequest
from parallm.server.catalog import card_of
from parallm.server.connection import received
from parallm.server.jobs.access import check_query, jobs_of, owner, read_limit, visible_to
from parallm.server.jobs.routes_files import answer
from parallm.server.jobs.schemas import CheckpointList, EventList, FineTuningBody, JobList, listed
from parallm.server.schemas import checked, read_object
from parallm.server.service import Service
from parallm.types import BASE

MAX_JOBS, USUAL_JOBS, USUAL_CHECKPOINTS = 100, 20, 10
NEUTRAL: Mapping[str, tuple[object, ...]] = {"integrations": ([],)}


def fine_tuning_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/fine_tuning/jobs")
    async def create(http: Request) -> Response:
        """Train an adapter on a file of examples, or on problems that a grader or an environment rewards."""
        body = await received(service, http, lambda text: checked(read_object(text), FineTuningBody, NEUTRAL))
        jobs = jobs_of(service)
        return answer(jobs.tuning.create(_request(body, service), owner(), visible_to()))

    @router.get("/v1/fine_tuning/jobs")
    async def jobs(http: Request) -> Response:
        """Jobs, the newest first."""
        query = http.query_params
        check_query(query, "after", "limit")
        limit = read_limit(query, usual=USUAL_JOBS, largest=MAX_JOBS)
        page = jobs_of(service).tuning.page(owner=visible_to(), after=query.get("after"), limit=limit)
        return answer(JobList.model_validate(listed(page)))

    @router.get("/v1/fine_tuning/jobs/{job_id}")
    async def job(job_id: str) -> Response:
        """How far a job is; `fine_tuned_model` is the name to ask for once it has succeeded."""
        return answer(jobs_of(service).tuning.get(job_id, visible_to()))

    @router.get("/v1/fine_tuning/jobs/{job_id}/events")
    async def events(http: Request, job_id: str) -> Response:
        """What has happened to a job, the newest first; `data` of a step has its numbers."""
        query = http.query_params
        check_query(query, "after", "limit")
        limit = read_limit(query, usual=USUAL_JOBS, largest=MAX_JOBS)
        page = jobs_of(service).tuning.events(job_id, visible_to(), after=query.get("after"), limit=limit)
        return answer(EventList.model_validate(listed(page)))

    @router.get("/v1/fine_tuning/jobs/{job_id}/checkpoints")
    async def checkpoints(http: Request, job_id: str) -> Response:
        """Checkpoints of a job that requests may ask for, the newest first."""
        query = http.query_params
        check_query(query, "after", "limit")
        limit = read_limit(query, usual=USUAL_CHECKPOINTS, largest=MAX_JOBS)
        page = jobs_of(service).tuning.checkpoints(job_id, visible_to(), after=query.get("after"), limit=limit)
        return answer(CheckpointList.model_validate(listed(page)))

    @router.post("/v1/fine_tuning/jobs/{job_id}/cancel")
    async def cancel(job_id: str) -> Response:
        """End a job after its present step; nothing of it is kept."""
        tuning = jobs_of(service).tuning
        job = tuning.cancel(job_id, visible_to())
        await tuning.clean_up(job.id)
        return answer(job)

    @router.post("/v1/fine_tuning/jobs/{job_id}/pause")
    async def pause(job_id: str) -> Response:
        """Let a job wait after its present step, and the next one begin."""
        return answer(jobs_of(service).tuning.pause(job_id, visible_to()))

    @router.post("/v1/fine_tuning/jobs/{job_id}/resume")
    async def resume(job_id: str) -> Response:
        """Go on with a paused job when its turn comes."""
        return answer(jobs_of(service).tuning.resume(job_id, visible_to()))

    return router


def _request(body: FineTuningBody, service: Service) -> TuningRequest:
    """Raises InvalidRequest, UnknownModel."""
    _check_model(body.model, service)
    method = body.method
    if method is not None and method.type == "dpo":
        raise InvalidRequest("the method dpo is refused; send supervised or reinforcement", "method.type")
    if method is not None and body.hyperparameters is not None:
        raise InvalidRequest("send hyperparameters inside of method alone", "hyperparameters")
    grader = None
    given: Hyperparameters | None = body.hyperparameters
    if method is None or method.type == "supervised":
        if method is not None and method.reinforcement is not None:
            raise InvalidRequest("the method is supervised; leave reinforcement out", "method.reinforcement")
        given = given if method is None or method.supervised is None else method.supervised.hyperparameters
    else:
        if method.reinforcement is None or method.supervised is not None:
            raise InvalidRequest(
                "the method is reinforcement; send its grader, and no supervised", "method.reinforcement"
            )
        grader, given = method.reinforcement.grader, method.reinforcement.hyperparameters
    fields = {} if given is None else given.model_dump()
    return TuningRequest(
        model=body.model,
        training_file=body.training_file,
        validation_file=body.validation_file or None,
        kind="supervised" if grader is None else "reinforcement",
        grader=grader,
        hyperparameters=ReinforcementHyperparameters(**fields),
        suffix=body.suffix or "",
        seed=new_seed() if body.seed is None else body.seed,
        metadata=body.metadata,
    )


def _check_model(name: str, service: Service) -> None:
    """Raise UnknownModel unless the name means the base or an adapter."""
    known = (BASE, service.base_name, *service.policies)
    if name not in known and card_of(name, service.catalog()) is None:
        raise UnknownModel(f"no model {name[:200]!r} can be trained; send base, or an adapter of GET /v1/models")
