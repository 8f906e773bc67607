"""Loaded by schemathesis: how to send what it makes up for uploads, which are bytes that are no archive."""

from typing import Any

import schemathesis


@schemathesis.serializer("application/zip", "application/octet-stream")
def as_bytes(context: Any, value: Any) -> dict[str, Any]:
    content = getattr(value, "data", value)
    return {"data": content if isinstance(content, bytes) else str(content).encode()}
