"""A thread with an event loop, on which a model lives from the call that loads it to `close`.

Methods of a model can therefore be called with and without a running event loop, such as a notebook's.
"""

import asyncio
import atexit
import gc
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, Generic, TypeVar

from parallm.errors import ConfigError, Unavailable
from parallm.server.app import forget_applications

Session = TypeVar("Session", covariant=True)
Result = TypeVar("Result")
Main = Callable[[Callable[[Session], None], asyncio.Event], Coroutine[Any, Any, None]]
"""Coroutine function: gets a function to call with its session, and an event after which it ends."""


class LoopThread(Generic[Session]):
    """Runs `main` on a thread; at most one in a process. For any thread."""

    def __init__(self, main: Main[Session], name: str, release: Callable[[], object]) -> None:
        """Wait for the session. `name` is for messages, and `release` is called after `main`.

        Raises ConfigError if another one is open, and errors of `main` before it has a session.
        """
        self.name = name
        self._end = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._session: Session | None = None
        self._release = release
        self.ended: Future[None] = Future()
        """Done when the thread has ended, with the error of `main`."""
        started: Future[None] = Future()
        self._error: BaseException | None = None
        self._is_ending = False
        _take_slot(self)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, args=(main, started), name="parallm", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # MLX may abort a process that ends while its device is at work
        try:
            started.result()
        except BaseException:
            self.close()
            raise

    @property
    def session(self) -> Session:
        """Raises Unavailable after the end."""
        if self._session is None:
            raise self._ended() from self._error
        return self._session

    @property
    def is_open(self) -> bool:
        return not self._is_ending and not self.ended.done()

    def call(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Return the result of `work`; an exception such as KeyboardInterrupt cancels it.

        Raises Unavailable on this thread, which cannot wait for itself, and after its end.
        """
        if threading.current_thread() is self._thread:
            work.close()
            raise Unavailable(f"{self.name} would wait for itself on its own event loop; await the method with an `a`")
        future = self._submit(work)
        try:
            return future.result()
        except Exception:
            if not self.is_open:
                raise self._ended() from self._error
            raise
        except BaseException:
            future.cancel()
            raise

    async def await_(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Await `work` on the caller's event loop. Cancelling the caller cancels it. Raises Unavailable."""
        future = self._submit(work)
        try:
            return await asyncio.wrap_future(future)
        except (Exception, asyncio.CancelledError):
            if future.done() and not self.is_open:
                raise self._ended() from self._error
            raise

    def request_end(self) -> None:
        """Ask `main` to end and return at once."""
        self._is_ending = True
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._stop)

    def close(self) -> None:
        """End `main` and wait for that. Does nothing the second time."""
        self.request_end()
        if threading.current_thread() is not self._thread:
            self._thread.join()
            forget_applications()
            gc.collect()  # the parts of a model refer to each other
            self._release()
        atexit.unregister(self.close)

    def _run(self, main: Main[Session], started: Future[None]) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._live(main, started))
        except BaseException as error:  # noqa: BLE001  # raised by `ended`, or by the constructor
            self._error = error
        finally:
            self._session = self._task = None
            _complete(self.ended, self._error)
            if not started.done():
                started.set_exception(self._error or self._ended())

    async def _live(self, main: Main[Session], started: Future[None]) -> None:
        self._task = asyncio.current_task()
        await main(partial(self._begin, started), self._end)

    def _begin(self, started: Future[None], session: Any) -> None:
        self._session = session
        started.set_result(None)

    def _stop(self) -> None:
        self._end.set()
        if self._session is None and self._task is not None:
            self._task.cancel()

    def _submit(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        if not self.is_open:
            work.close()
            raise self._ended() from self._error
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:
            work.close()
            raise self._ended() from self._error

    def _ended(self) -> Unavailable:
        reason = f" after {type(self._error).__name__}" if isinstance(self._error, Exception) else ""
        return Unavailable(f"{self.name} is closed{reason}; open it again")


def _complete(future: Future[None], error: BaseException | None) -> None:
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


_lock = threading.Lock()
_present: LoopThread[Any] | None = None


def _take_slot(thread: LoopThread[Any]) -> None:
    """Two device threads would share one BLAS and its number of threads. Raises ConfigError."""
    global _present
    with _lock:
        if _present is not None and _present.is_open:
            raise ConfigError(
                f"{_present.name} is open in this process, which has room for one model; call its close() first, load "
                "adapters into it in place of a second model, or open the other one in a process of its own"
            )
        if _present is not None:
            _present.close()  # it may still be ending
        _present = thread
