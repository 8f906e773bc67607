"""The header of a run: what does not change and stands above its progress."""

from dataclasses import dataclass

from parallm.metrics.eta import Schedule

FILES = "files"
"""Name of the row that holds a path, in the header and in the summary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHeader:
    """One header per process."""

    name: str
    model: str
    device: str
    blas: str
    """Library that multiplies matrices; empty on a GPU."""
    url: str | None
    """Address of the server; None without one."""
    folder: str | None = None
    """Folder that the run writes to; None without one."""
    adapter: str | None = None
    """The folder of the adapter that it begins with."""
    policies: tuple[str, ...] = ()
    """Names of what is trained, where it is more than `policy`."""
    schedule: Schedule | None = None
    """None where nothing is trained."""

    def rows(self) -> list[tuple[str, str]]:
        """Return names and values of what is set; `files` comes last."""
        named = {
            "run": self.name,
            "model": self.model,
            "adapter": self.adapter,
            "device": self.device,
            "BLAS": self.blas,
            "server": self.url or "off",
            "policies": ", ".join(self.policies),
            FILES: self.folder,
        }
        return [(name, value) for name, value in named.items() if value]
