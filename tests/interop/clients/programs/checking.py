"""How a program of test_clients.py runs its checks and tells their results.

A program is called with the server's URL and the model's folder. It needs its client and nothing of ours.
"""

import json
import sys
from collections.abc import Callable, Sequence
from importlib import metadata

Check = Callable[[], object]
MODEL = "base"
QUESTION = "Mia has 3 apples. Mia gets 4 more. How many apples?"
MESSAGES = [{"role": "user", "content": QUESTION}]
QUERY = "what eats fish ?"
DOCUMENTS = ["the big cat eats fish", "a red tree", "the small dog runs in the river"]


def server_and_model() -> tuple[str, str]:
    """The URL without a slash at its end, and the folder of the model that is served there."""
    return sys.argv[1].rstrip("/"), sys.argv[2]


def task_servers() -> dict[str, str]:
    """URLs of servers whose models rerank and classify texts."""
    servers: dict[str, str] = json.loads(sys.argv[4])
    return servers


def expect(is_right: object, shown: object = "") -> None:
    if not is_right:
        raise AssertionError(str(shown)[:300])


def report(package: str, checks: Sequence[Check], remark: str = "") -> None:
    """Run all checks and print the last line that test_clients.py reads."""
    failed = []
    for check in checks:
        try:
            check()
        except Exception as error:  # noqa: BLE001  whatever goes wrong is the check's result
            failed.append(f"{check.__name__}: {type(error).__name__}: {' '.join(str(error).split())[:400]}")
    answer = {
        "version": metadata.version(package),
        "total": len(checks),
        "passed": len(checks) - len(failed),
        "failed": failed,
        "remark": remark,
    }
    print("\n" + json.dumps(answer), flush=True)
