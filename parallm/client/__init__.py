"""A client for what OpenAI's lacks: adapters, splits, training, trajectories and their rewards."""

from parallm.client.async_client import AsyncClient
from parallm.client.calls import ApiError
from parallm.client.client import Client
from parallm.client.generated import Generated

__all__ = ["ApiError", "AsyncClient", "Client", "Generated"]
