"""A client for what OpenAI's lacks: adapters, splits, training, trajectories and their rewards."""

from parallm.client.calls import ApiError, Generated
from parallm.client.client import AsyncClient, Client

__all__ = ["ApiError", "AsyncClient", "Client", "Generated"]
