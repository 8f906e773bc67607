"""Several async streams as one."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import TypeAlias, TypeVar

Item = TypeVar("Item")
Inbox: TypeAlias = asyncio.Queue[tuple[int, Item] | int]


async def merged(streams: Sequence[AsyncIterator[Item]]) -> AsyncGenerator[tuple[int, Item], None]:
    """Items of all streams as they come, each with the number of its stream.

    The first error of any stream is raised here. Closing this closes them all.
    """
    if len(streams) == 1:
        # without a queue in between, so that a stream is asked only when its reader wants more
        try:
            async for item in streams[0]:
                yield 0, item
        finally:
            await close(streams[0])
        return
    queue: Inbox[Item] = asyncio.Queue()
    tasks = [asyncio.create_task(_pump(number, stream, queue)) for number, stream in enumerate(streams)]
    try:
        num_open = len(tasks)
        while num_open:
            message = await queue.get()
            if isinstance(message, int):
                await tasks[message]  # raises what ended the stream
                num_open -= 1
            else:
                yield message
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(number: int, stream: AsyncIterator[Item], queue: Inbox[Item]) -> None:
    """Consumes one stream into `queue`; its number alone says that it has ended, well or not, and is closed."""
    try:
        async for item in stream:
            queue.put_nowait((number, item))
    finally:
        await close(stream)
        queue.put_nowait(number)


async def close(stream: AsyncIterator[object]) -> None:
    """Run a generator's clean-up now and not when it is collected."""
    if isinstance(stream, AsyncGenerator):
        await stream.aclose()
