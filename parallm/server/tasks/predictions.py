"""Named tensors through a model: what `/v1/predict` and KServe's routes share.

A name is a policy net, or the base or an adapter of the language model. The bytes of an answer follow from the
signature and are checked before anything is computed.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from parallm.errors import InvalidRequest, UnknownModel
from parallm.model.adapters.names import is_number, versioned
from parallm.server.catalog import resolved
from parallm.server.interfaces import TensorModels
from parallm.server.service import Service
from parallm.server.tasks.tensors import check_rows
from parallm.tensors import ITEM_BYTES, Arrays, Signature, TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorModel:
    """The exact version that a request means."""

    model: str
    name: str
    version: int
    """0 is the base."""
    signature: Signature
    models: TensorModels


def choose(service: Service, name: str, version: str | None = None) -> TensorModel:
    """Return what `name`, perhaps `name@version`, means, after `prepare`.

    Raises UnknownModel, InvalidRequest, Unavailable.
    """
    if version is not None and (not is_number(version) or "@" in name):
        raise InvalidRequest(f"{version[:100]!r} is no version of {name[:100]}; name a number", "version")
    asked = name if version is None or int(version) == 0 else versioned(name, int(version))
    own = asked.partition("@")[0]
    is_policy_net = service.actor is not None and any(card.name == own for card in service.actor.cards())
    if is_policy_net and any(card.name == own for card in service.catalog()):
        raise InvalidRequest(f"{own} is an adapter and a policy net; unload one of them", "model")
    if is_policy_net and service.actor is not None:
        card = service.actor.card(asked)
        exact = versioned(card.name, card.version)
        return TensorModel(
            model=exact, name=card.name, version=card.version, signature=card.signature, models=service.actor
        )
    if service.predictor is None:
        raise UnknownModel(
            f"no policy net {own[:100]!r}, and the language model of this process takes no tensors; PUT one to "
            "/v1/rl/policies/NAME, or set tasks.policies.NAME to a folder"
        )
    if asked in service.splits.all():
        raise InvalidRequest(f"{asked} is split between versions; name one of them", "model")
    model = resolved(asked, service.catalog(), service.policies)
    name, _, number = model.partition("@")
    signature = service.predictor.signature(model)
    return TensorModel(model=model, name=name, version=int(number or 0), signature=signature, models=service.predictor)


async def prepare(service: Service) -> None:
    """Let `choose` know the language model's signature."""
    if service.predictor is not None:
        await service.predictor.prepare()


def choose_outputs(model: TensorModel, asked: Iterable[str] | None) -> tuple[TensorSpec, ...]:
    """Return the outputs to answer, in the order of the request; all of the signature's for None."""
    known = {spec.name: spec for spec in model.signature.outputs}
    names = list(known if asked is None else asked)
    for name in names:
        if name not in known:
            raise InvalidRequest(f"{model.name} has no output {name[:100]!r}; it has {', '.join(known)}", "outputs")
        if names.count(name) > 1:
            raise InvalidRequest(f"the output {name} is asked for twice", "outputs")
    if not names:
        raise InvalidRequest(f"ask for one of the outputs {', '.join(known)}", "outputs")
    return tuple(known[name] for name in names)


def check_answer(service: Service, specs: Collection[TensorSpec], inputs: Arrays) -> None:
    """Raise InvalidRequest if the tensors of an answer would be larger than `server.max_answer_bytes`."""
    sizes = _sizes(check_rows(inputs, "inputs"), inputs)
    num_bytes = {
        spec.name: math.prod(sizes[axis] if size < 0 else size for axis, size in enumerate(spec.shape))
        * ITEM_BYTES[spec.datatype]
        for spec in specs
    }
    total, limit = sum(num_bytes.values()), service.settings.max_answer_bytes
    if total > limit:
        text = ", ".join(f"{name} {size}" for name, size in num_bytes.items())
        raise InvalidRequest(
            f"the answer would have {total} bytes ({text}), the limit is {limit}; send fewer rows, name fewer outputs, "
            "or raise server.max_answer_bytes",
            "outputs",
        )


def _sizes(num_rows: int, inputs: Arrays) -> Mapping[int, int]:
    """Return the sizes of the open axes: rows, and tokens of a language model's rows."""
    return {0: num_rows, 1: max((array.shape[1] for array in inputs.values() if array.ndim > 1), default=1)}


async def predict(model: TensorModel, inputs: Arrays, outputs: Collection[TensorSpec]) -> Arrays:
    """Return the outputs by name. Raises what the model raises."""
    return await model.models.predict(model.model, inputs, [spec.name for spec in outputs])
