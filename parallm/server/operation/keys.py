"""API keys: read once at the start, kept as digests, compared in constant time."""

import hashlib
import hmac
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from starlette.datastructures import Headers

from parallm.errors import ConfigError
from parallm.server.settings import ApiKey, KeyRole, ServerSettings

SHORTEST_KEY = 16


@dataclass(frozen=True, slots=True)
class StoredKey:
    name: str
    role: KeyRole
    digest: bytes


def read_keys(settings: ServerSettings) -> tuple[StoredKey, ...]:
    """The keys with their digests. Raises ConfigError for a key that is not there, too short or named twice."""
    names = [key.name for key in settings.api_keys]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"server.api_keys: the name {twice[0]} stands there twice; give each key a name of its own")
    return tuple(StoredKey(key.name, key.role, _digest(key, os.environ)) for key in settings.api_keys)


def presented_key(headers: Headers) -> str | None:
    """What the client sent as `Authorization: Bearer KEY` or as `x-api-key: KEY`."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return headers.get("x-api-key")


def find_key(presented: str, keys: tuple[StoredKey, ...]) -> StoredKey | None:
    """Takes the same time for every wrong key: digests are compared, and all of them."""
    digest = hashlib.sha256(presented.encode()).digest()
    found = [key for key in keys if hmac.compare_digest(key.digest, digest)]
    return found[0] if found else None


def _digest(key: ApiKey, environment: Mapping[str, str]) -> bytes:
    where = f"server.api_keys {key.name}"
    match key.env, key.file, key.sha256:
        case str(variable), None, None:
            if variable not in environment:
                raise ConfigError(f"{where}: the environment variable {variable} is not set; set it to the key")
            return _digest_of(environment[variable], f"{where}: the environment variable {variable}")
        case None, str(path), None:
            return _digest_of(_read(path, where), f"{where}: the file {path}")
        case None, None, str(digest):
            return bytes.fromhex(digest)
        case _:
            raise ConfigError(f"{where}: give exactly one of env, file and sha256")


def _read(path: str, where: str) -> str:
    try:
        return Path(path).expanduser().read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: the file {path} cannot be read: {error}") from error


def _digest_of(text: str, where: str) -> bytes:
    key = text.strip()
    if len(key) < SHORTEST_KEY:
        raise ConfigError(
            f"{where} holds {len(key)} characters; a key has at least {SHORTEST_KEY}, "
            "such as those of `openssl rand -hex 24`"
        )
    return hashlib.sha256(key.encode()).digest()
