"""What does not change during a run and stands above its progress."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHeader:
    """One header per process."""

    name: str
    model: str
    device: str
    blas: str
    """Which library multiplies matrices; empty where that is no question."""
    url: str | None
    """Where the server answers; None without a server."""
    folder: str
    policies: tuple[str, ...] = ()
    """Names of what is trained, where it is more than `policy`."""
    total_steps: int

    def rows(self) -> list[tuple[str, str]]:
        """Return name and value of what is known."""
        named = {
            "run": self.name,
            "model": self.model,
            "device": self.device,
            "BLAS": self.blas,
            "server": self.url or "off",
            "policies": ", ".join(self.policies),
            "files": self.folder,
        }
        return [(name, value) for name, value in named.items() if value]
