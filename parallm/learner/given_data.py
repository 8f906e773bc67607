"""Lines of data to train on, and those that are held out to evaluate on."""

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from parallm.errors import ConfigError, ProblemError
from parallm.learner.settings import LearnerSettings
from parallm.types import Message

HELD_OUT = 10
"""Without a file of held-out lines, one prompt in ten is held out."""

logger = logging.getLogger(__name__)


class Prompted(Protocol):
    @property
    def messages(self) -> Sequence[Message]: ...


Line = TypeVar("Line", bound=Prompted)


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenData(Generic[Line]):
    train: Sequence[Line]
    held_out: Sequence[Line]


def read_given(
    settings: LearnerSettings, read: Callable[[str, str], list[Line]], *, contents: str, holds_out: bool
) -> GivenData[Line]:
    """Read `learner.data` and what is held out, each by `read` with its place and key.

    Without `holds_out` nothing is. Raises ConfigError where the settings do not go together, ProblemError for data that
    cannot be used.
    """
    if settings.data is None:
        raise ConfigError(f"learner.data: must be given; name {contents}")
    if settings.data_held_out is not None and not holds_out:
        raise ConfigError(
            f"learner.data_held_out={settings.data_held_out}: trainer.evaluate_problems=0 turns evaluation off; set it "
            "above 0, or leave learner.data_held_out out"
        )
    every = read(settings.data, "learner.data")
    if settings.data_held_out is not None:
        return GivenData(train=every, held_out=read(settings.data_held_out, "learner.data_held_out"))
    return _split(every, settings.data) if holds_out else GivenData(train=every, held_out=())


def _split(every: Sequence[Line], where: str) -> GivenData[Line]:
    train = [line for line in every if not _is_held_out(line)]
    held_out = [line for line in every if _is_held_out(line)]
    way_out = "name lines to evaluate on with learner.data_held_out, or set trainer.evaluate_problems=0"
    if not train:
        raise ProblemError(f"learner.data: all {len(every)} lines of {where} are held out; {way_out}")
    if not held_out:
        logger.warning(
            "none of the %d lines of %s is held out, so nothing is evaluated; %s", len(every), where, way_out
        )
    logger.info("%s: %d lines to train on, %d held out", where, len(train), len(held_out))
    return GivenData(train=train, held_out=held_out)


def _is_held_out(line: Prompted) -> bool:
    """Decided by the prompt alone: completions of one prompt never stand on both sides."""
    text = repr([(message.role, message.content) for message in line.messages])
    return hashlib.sha256(text.encode()).digest()[0] % HELD_OUT == 0
