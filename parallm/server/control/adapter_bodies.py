"""Wire types of the routes about adapters."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from parallm.model_names import versioned
from parallm.server.schemas import LARGEST_INT, Wire
from parallm.types import POLICY, AdapterCard

Name = Annotated[str, Field(min_length=1, max_length=128)]
Path = Annotated[str, Field(min_length=1, max_length=4096)]
Version = Annotated[int, Field(ge=0, le=LARGEST_INT)]

NAMES: Mapping[str, str] = {
    "adapter_name": "name",
    "adapter_path": "path",
    "lora_name": "name",
    "lora_path": "path",
}
"""What others call our fields."""
OF_OTHERS: Mapping[str, tuple[object, ...]] = {
    "load_inplace": (True, False),
    "lora_id": (),
    "lora_int_id": (),
    "pinned": (False,),
}
"""Fields of vLLM and SGLang. A loaded name is always replaced in place; requests that run keep their version."""


class LoadBody(Wire):
    name: Name
    path: Path
    """Below `server.adapters_root`: of an adapter, a checkpoint or a run, `RUN@VERSION` too."""


class LoadPolicyBody(Wire):
    """A body without a name: the served policy moves to this adapter."""

    path: Path


class UploadFields(Wire):
    """Fields of a form beside its file."""

    name: Name | None = None
    """Name of the adapter; without one the policy moves to the adapter."""


class PolicyMoved(Wire):
    status: Literal["success"]
    policy_version: int
    message: str


class UnloadBody(Wire):
    name: Name


class PromoteBody(Wire):
    name: Name = POLICY
    version: Version


class RollBackBody(Wire):
    name: Name = POLICY


class AliasBody(Wire):
    alias: Name
    name: Name = POLICY
    version: Version


class SwitchBody(Wire):
    """Either a version to promote or a folder to load."""

    name: Name | None = None
    """Name of the adapter; without one the policy."""
    version: Version | Annotated[str, Field(min_length=1, max_length=128)] | None = None
    """A number, or `checkpoint-12`, `best-performance`, `latest` or an alias."""
    path: Path | None = None


class AdapterEntry(Wire):
    id: str
    name: str
    version: int
    parent: int | None
    step: int
    rank: int
    alpha: float
    rslora: bool
    is_dora: bool
    aliases: list[str]
    digest: str
    num_running: int
    is_served: bool
    num_bytes: int


class AdapterList(Wire):
    data: list[AdapterEntry]


class NameMeans(Wire):
    """What the bare name means from now on; version 0 is the base."""

    name: str
    version: int


class Done(Wire):
    status: Literal["ok"]


class LoadedAdapters(Wire):
    """SGLang's answer, and prime-rl's `status`."""

    status: Literal["ok"]
    success: Literal[True]
    error_message: None
    loaded_adapters: dict[str, str]


def entry(card: AdapterCard) -> AdapterEntry:
    return AdapterEntry(
        id=versioned(card.name, card.version),
        name=card.name,
        version=card.version,
        parent=card.parent,
        step=card.step,
        rank=card.rank,
        alpha=card.alpha,
        rslora=card.rslora,
        is_dora=card.is_dora,
        aliases=list(card.aliases),
        digest=card.digest,
        num_running=card.num_running,
        is_served=card.is_served,
        num_bytes=card.num_bytes,
    )


def in_our_words(value: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of others under our names."""
    return {NAMES.get(name, name): item for name, item in value.items()}
