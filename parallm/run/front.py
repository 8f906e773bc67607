"""The wiring of `parallm.front`: a front before servers that others have started. Imports no MLX."""

import asyncio
import sys
from collections.abc import Mapping

from parallm.config.schema import FrontConfig
from parallm.device.garbage import collect_rarely
from parallm.distributed.front.connection import address_of
from parallm.distributed.front.process import open_front
from parallm.distributed.settings import FrontSettings
from parallm.errors import ConfigError
from parallm.interrupts import until_signal
from parallm.server.operation.http_server import Listener, listening


def run_front(config: FrontConfig) -> int:
    """Answer for the workers until Ctrl-C. Returns the exit code; raises ParallmError."""
    urls = dict(enumerate(config.workers))
    if not urls:
        raise ConfigError("workers: name the servers, such as 'workers=[http://node1:8000,http://node2:8000]'")
    for url in urls.values():
        address_of(url)  # names a wrong one before anything begins
    collect_rarely()
    with listening(config.server) as listener:
        asyncio.run(_serve(config, urls, listener))
    return 0


async def _serve(config: FrontConfig, urls: Mapping[int, str], listener: Listener) -> None:
    if listener.bound is None:
        return
    settings = FrontSettings(hold_seconds=config.hold_seconds)
    async with open_front(config.server, settings, listener.keys, listener.bound) as (workers, _):
        workers.set(urls)
        sys.stdout.write(f"{listener.url} answers for {', '.join(urls.values())} until Ctrl-C\n")
        sys.stdout.flush()
        await until_signal()
