"""Runs a script with an Atropos environment unmodified, with a log that says what it does.

Started as a file by the interpreter that has atroposlib: `python environment_host.py SCRIPT ARGUMENTS`. By itself an
environment shows warnings alone; with a log it writes two lines for each of ten looks a second at its status, which are
left out.
"""

import logging
import runpy
import sys
from pathlib import Path

NOISE = ("env_manager: Status dict", "max_num_workers: ", "handle_env: Starting with item")


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger().handlers[0].addFilter(lambda record: not record.getMessage().startswith(NOISE))
    for chatty in ("httpx", "openai", "urllib3", "asyncio"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).parent)  # as if the script had been started, in place of this folder
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
