"""Settings of checkpoints."""

from pydantic import Field

from parallm.settings import settings


@settings
class CheckpointSettings:
    every: int = Field(default=10, ge=1)
    """Steps between checkpoints; the last step and Ctrl-C always save. After a kill the steps since then are made
    again, with the trajectories of clients that they had taken."""
    keep: int = Field(default=3, ge=1)
    """Number of newest checkpoints that stay on disk, beside the best by evaluation."""
    resume: str = "never"
    """`never`, `auto` (the newest good checkpoint of the run folder, if there is one) or a checkpoint's folder."""
