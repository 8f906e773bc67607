"""Folders of this user for what one process computes and later ones read, such as compiled kernels.

Processes run what they find there, so a folder that somebody else owns or may write into is not used.
"""

import logging
import os
import stat
from functools import cache
from pathlib import Path

logger = logging.getLogger(__name__)


def user_cache(name: str) -> Path | None:
    """The folder `parallm/{name}` below XDG_CACHE_HOME, or ~/.cache, for this user alone, made if need be.

    None if it cannot be made or is not private, which one warning says, or if the user has no home.
    """
    try:
        return _private(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "parallm" / name)
    except RuntimeError:  # a user without a home
        return None


def is_own(found: os.stat_result) -> bool:
    """Whether a file or folder is this user's, and nobody else may write it."""
    return found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


@cache
def _private(folder: Path) -> Path | None:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        if is_own(folder.stat()):
            return folder
        reason = "it is not this user's, or others may write into it"
    except OSError as error:
        reason = str(error)
    logger.warning("nothing is kept in %s: %s. Each process makes it anew", folder, reason)
    return None
