"""Errors that a user can cause or repair, as one tree. `server/failures.py` gives each its HTTP status."""


class ParallmError(Exception):
    """Root of every error that a user can cause or repair."""


class InvalidRequest(ParallmError, ValueError):
    """A request that can never work; `parameter` names the field at fault."""

    def __init__(self, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class ContextTooLong(InvalidRequest):
    """Prompt and requested tokens exceed the context of `limit` tokens.

    `setting` is the key that raises the limit. `for_clients` is the message without it: clients cannot set it.
    """

    def __init__(
        self, message: str, parameter: str | None = None, *, limit: int | None = None, setting: str | None = None
    ) -> None:
        super().__init__(message if setting is None else f"{message} or raise {setting}", parameter)
        self.limit = limit
        self.for_clients = message


class NotFound(ParallmError, KeyError):
    """Nothing of that name is here."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would print the repr


class UnknownModel(NotFound):
    """No such model, version or alias."""


class UnknownTrajectory(NotFound):
    """No trajectory of that id waits for a reward."""


class UnknownObject(NotFound):
    """No file, batch or job of that id, or none of this client."""


class RolloutsDamaged(ParallmError):
    """A file of a step's completions that cannot be read."""


class FileTooLarge(InvalidRequest):
    """A file beyond the size that the server stores."""


class EngineFull(ParallmError):
    """The request queue is at its bound; try again later."""


class NoMemory(ParallmError):
    """Other models need the memory that this one would take; try again later."""


class EngineStopped(ParallmError):
    """The device thread has ended, so nothing can be computed."""


class NotFinite(ParallmError):
    """The model computes NaN for a request, so nothing can be sampled."""


class ConfigError(ParallmError, ValueError):
    """A key, type, choice or recipe that does not exist."""


class ModelError(ParallmError):
    """A model folder or hub id that cannot be loaded."""


class AdapterError(ParallmError):
    """An adapter that does not fit the base model or cannot be read."""


class AdapterMissing(AdapterError):
    """An adapter folder that does not exist, or not yet."""


class AdapterNotFinite(AdapterError):
    """An adapter that holds NaN or infinity: nothing could be sampled with it."""


class RunFolderError(ParallmError):
    """A run folder that cannot be written."""


class RunUnreadable(ParallmError):
    """A file of a run that cannot be shown; the message names the limit or the fault."""


class CheckpointError(ParallmError):
    """A checkpoint that cannot be written or read."""


class ProblemError(ParallmError):
    """An environment whose problems cannot be read or have no answers."""


class FolderInUse(ParallmError):
    """A folder that another process has locked; the message names the process."""


class NotStored(ParallmError):
    """A change by a client cannot be written to disk; the message says what is in effect all the same."""


class EnvironmentFailed(ParallmError):
    """An environment that fails at every completion; the message has its traceback."""


class Unavailable(ParallmError):
    """Something that this process does not do, or not now; the message says why."""


class TrainingStopped(ParallmError):
    """Training cannot go on; the message says why and what to change."""


class ExchangeFailed(ParallmError):
    """Another worker of the run is gone or does not answer; the message says which and why."""


class WorkersDiffer(ParallmError):
    """Workers of a run do not hold the same version, or have drawn other problems; the message names both."""
