"""Routes by which rollout workers ask what runs here and which weights, and routes that do not exist here."""

import uuid

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from parallm.errors import Unavailable
from parallm.server.catalog import served_policy, served_version
from parallm.server.connection import json_response, while_connected
from parallm.server.schemas import Done, Wire
from parallm.server.service import Service
from parallm.types import BASE, GenerationRequest, SamplingParams

ABSENT_PATHS = (
    "/init_communicator/",
    "/update_named_param/",
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/finish_weight_update",
    "/init_weights_update_group",
    "/update_weights",
    "/update_weights_from_disk",
    "/update_weights_from_distributed",
    "/update_weights_from_tensor",
    "/load_lora_adapter_from_tensors",
)


class WorldSize(Wire):
    world_size: int


class WeightVersion(Wire):
    weight_version: str
    """Version of the served policy; `0` is the base."""


class ModelInfo(WeightVersion):
    """SGLang's answer."""

    model_path: str
    served_model_name: str
    tokenizer_path: str
    is_generation: bool
    preferred_sampling_params: dict[str, float] | None
    """Sampling defaults of OpenAI's routes, if they differ from the API's."""
    max_model_len: int


def identity_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/get_world_size")
    @router.get("/get_world_size/")
    async def world_size() -> Response:
        """One process, whatever its devices."""
        return json_response(WorldSize(world_size=1))

    @router.get("/weight_info")
    @router.get("/get_weight_version")
    async def weight_version() -> Response:
        """The version of the policy that is served."""
        return json_response(WeightVersion(weight_version=str(served_version(service))))

    @router.get("/model_info")
    @router.get("/get_model_info")
    async def model_info() -> Response:
        """Model, version and tokenizer of this server, in SGLang's form."""
        return json_response(
            ModelInfo(
                model_path=service.base_name,
                served_model_name=served_policy(service),
                tokenizer_path=service.base_name,
                is_generation=True,
                preferred_sampling_params=dict(service.sampling_defaults) or None,
                weight_version=str(served_version(service)),
                max_model_len=service.engine.max_context,
            )
        )

    @router.get("/health_generate")
    async def health_generate(http: Request) -> Response:
        """Generate one token of the base: 200 says that the engine really works."""
        request = GenerationRequest(
            request_id=f"health-{uuid.uuid4().hex}",
            prompt_tokens=service.tokenizer.encode("0"),
            sampling=SamplingParams(max_tokens=1, temperature=0),
            model=BASE,
        )
        await while_connected(http.receive, service.gateway.generate(request))
        return json_response(Done(status="ok"))

    return router


def absent_routes(_: Service) -> APIRouter:
    """Routes by which other trainers push whole weights, by NCCL, as pickles or on a disk: here the base is frozen."""
    router = APIRouter()

    async def absent() -> Response:
        """Always an error that names the way by adapters."""
        raise Unavailable(
            "the base is frozen and whole weights do not come in, by no way; give adapters: "
            "/load_lora_adapter with a folder, PUT /v1/adapters/NAME with a zip archive, or "
            "/update_adapter_weights with safetensors"
        )

    for path in ABSENT_PATHS:
        router.post(path)(absent)
    return router
