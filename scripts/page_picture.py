#!/usr/bin/env python
"""Take scripts/page.png, the picture of the README: the page of a quickstart's run, in Debian's chromium.

`scripts/page_picture.py [FILE]`; needs `parallm[dev]` and chromium (apt-get install chromium, or PARALLM_CHROMIUM).
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

PICTURE = Path(__file__).parent / "page.png"
STEPS = 20
RUN = ["+recipe=arithmetic_grpo", f"trainer.steps={STEPS}", "server.port=0", "trainer.keep_serving=true"]
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
SIZE = {"width": 1280, "height": 860}
MILLISECONDS_TO_DRAW = 3000


def main() -> None:
    picture = Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE
    chromium = os.environ.get("PARALLM_CHROMIUM") or shutil.which("chromium")
    if chromium is None:
        sys.exit("no chromium; apt-get install chromium, or set PARALLM_CHROMIUM")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "parallm.train", *RUN, f"hydra.run.dir={folder}/arithmetic/run"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=folder) as run:
            try:
                take(picture, chromium, page_of(run))
            finally:
                run.terminate()


def page_of(run: "subprocess.Popen[str]") -> str:
    """Wait for the end of training and return the page's address."""
    assert run.stdout is not None
    address = ""
    for line in run.stdout:
        print(line, end="", flush=True)
        if found := re.search(r"page +(http://\S+)", line):
            address = found[1]
        if "answers until Ctrl-C" in line:
            return address
    sys.exit("the run has ended before its page could be seen")


def take(picture: Path, chromium: str, address: str) -> None:
    with sync_playwright() as playwright, playwright.chromium.launch(executable_path=chromium, args=QUIET) as browser:
        page = browser.new_page(viewport=SIZE, color_scheme="light")
        page.goto(address)
        page.wait_for_timeout(MILLISECONDS_TO_DRAW)
        page.screenshot(path=picture)
    print(f"{picture}: {picture.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
