"""An event loop beside the learner's thread, and how the learner waits for what happens on it.

Invariant: the learner never waits deaf. While it does, `check` is called ten times a second, and what it raises ends
both the wait and the work waited for.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def wait(future: concurrent.futures.Future[T], check: Callable[[], None] = lambda: None) -> T:
    """Result of a future; `check` is called ten times a second and may end the wait, and the work, by raising."""
    try:
        while not future.done():
            concurrent.futures.wait([future], timeout=0.1)
            if not future.done():
                check()
        return future.result()
    except BaseException:
        future.cancel()
        raise


class LoopThread:
    """An asyncio event loop in a daemon thread, with calls into it from outside."""

    def __init__(self, name: str, workers: int):
        self.loop = asyncio.new_event_loop()
        self._executor = concurrent.futures.ThreadPoolExecutor(workers, thread_name_prefix=f"{name}-env")
        self.loop.set_default_executor(self._executor)
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def run(self, coroutine: Coroutine[Any, Any, T], check: Callable[[], None] = lambda: None) -> T:
        """Run a coroutine on the loop and wait for it (see `wait`)."""
        return wait(self.submit(coroutine), check)

    def stop(self) -> None:
        """Cancel what still runs and end the thread."""
        if not self._thread.is_alive():
            return

        async def cancel_all() -> None:
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=5.0) if tasks else None

        with contextlib.suppress(concurrent.futures.TimeoutError):
            self.submit(cancel_all()).result(timeout=10.0)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout=5.0)
        self._executor.shutdown(wait=False, cancel_futures=True)
        if not self._thread.is_alive():
            self.loop.close()
