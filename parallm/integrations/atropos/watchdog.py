"""Runs one command in a process group of its own, and ends the group when the process that started this one is gone.

Started as a file by `SupervisedProcess`, with the standard library alone. Standard input is a pipe without any data: it
closes when the other side ends, however that ends.
"""

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress

GRACE_SECONDS = 5.0


def main() -> int:
    child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)
    threading.Thread(target=end_with_parent, args=(child,), daemon=True).start()
    code = child.wait()
    signal_group(child, signal.SIGKILL)  # what the command has left behind
    return code if code >= 0 else 128 - code


def end_with_parent(child: "subprocess.Popen[bytes]") -> None:
    while os.read(0, 1024):  # not through sys.stdin, whose lock a thread that waits would keep at the end
        pass
    signal_group(child, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        child.wait(GRACE_SECONDS)
    signal_group(child, signal.SIGKILL)


def signal_group(child: "subprocess.Popen[bytes]", number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child.pid, number)


if __name__ == "__main__":
    sys.exit(main())
