"""The problems that measurements use: the first ones of a local GSM8K folder, or of the arithmetic environment."""

from collections.abc import Sequence

from parallm.environment.arithmetic import Arithmetic
from parallm.environment.gsm8k import Gsm8k
from parallm.environment.settings import ArithmeticSettings, Gsm8kSettings
from parallm.types import Problem


def make_environment(data: str | None, limit: int) -> Arithmetic | Gsm8k:
    """The environment whose train split is the `limit` problems of a measurement."""
    if data is None:
        return Arithmetic(ArithmeticSettings(num_train=limit))
    return Gsm8k(Gsm8kSettings(path=data, limit=limit))


def load_problems(data: str | None, limit: int) -> Sequence[Problem]:
    return make_environment(data, limit).problems("train")


def environment_overrides(data: str | None, limit: int) -> list[str]:
    """The same problems as overrides of `python -m parallm.train`."""
    if data is None:
        return ["environment=arithmetic", f"environment.num_train={limit}"]
    return ["environment=gsm8k", f"environment.path={data}", f"environment.limit={limit}"]
