"""Where the points of a sweep are searched: in this process, in a pool of processes, or on a Dask cluster."""

from __future__ import annotations

import asyncio
import itertools
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, CancelledError, Executor, Future, ProcessPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib import metadata
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from planner.errors import InputError

Item = TypeVar("Item")
Result = TypeVar("Result")

MOST_DEATHS = 3
"""Workers that may die with an item before it is given up."""

LOCAL = "local"
"""In place of an address: a Dask cluster on this machine."""


@dataclass(frozen=True)
class Crew:
    """An executor at work."""

    executor: Executor
    width: int
    """Items handed over and not yet returned, at most: enough to keep every worker busy."""
    killed: tuple[type[BaseException], ...] = ()
    """What it raises for an item whose worker died while it can go on itself; a pool that cannot raises BrokenExecutor."""


Engine = Callable[[], AbstractContextManager[Crew]]
"""Opens a crew; called again when its executor breaks."""


@dataclass(frozen=True)
class _Attempt:
    item: Any
    deaths: int = 0


def completed(engine: Engine, work: Callable[[Item], Result], items: Iterable[Item]) -> Generator[tuple[Item, Result | None]]:
    """Every item with its result, in the order in which they finish; None where it killed its worker three times.

    When a worker dies, whoever was in flight may have killed it: the suspects are run again one at a time.
    """
    waiting = map(_Attempt, items)
    suspects: list[_Attempt] = []
    left = True
    while left:
        with engine() as crew:
            left = yield from _flown(crew, work, waiting, suspects)


def _flown(crew: Crew, work: Any, waiting: Iterator[_Attempt], suspects: list[_Attempt]) -> Generator[tuple[Any, Any], None, bool]:
    """What a crew completes; returns whether its executor broke, so that another one has to go on."""
    flying: dict[Future[Any], _Attempt] = {}
    broken = False
    while True:
        if not broken:
            flying |= {_submit(crew.executor, work, one): one for one in _next(crew.width, waiting, suspects, len(flying))}
        if not flying:
            return broken
        for future in wait(flying, return_when=FIRST_COMPLETED).done:
            attempt, error = flying.pop(future), future.exception()
            broken = broken or isinstance(error, BrokenExecutor)
            if error is None:
                yield attempt.item, future.result()
            elif not isinstance(error, (BrokenExecutor, *crew.killed)):
                raise error
            elif attempt.deaths + 1 == MOST_DEATHS:
                yield attempt.item, None
            else:
                suspects.append(_Attempt(attempt.item, attempt.deaths + 1))


def _next(width: int, waiting: Iterator[_Attempt], suspects: list[_Attempt], flying: int) -> list[_Attempt]:
    """What is handed over now: a suspect alone, else as many as there is room for."""
    if suspects:
        return [] if flying else [suspects.pop(0)]
    return list(itertools.islice(waiting, width - flying))


def _submit(executor: Executor, work: Any, attempt: _Attempt) -> Future[Any]:
    try:
        return executor.submit(work, attempt.item)
    except BrokenExecutor as error:  # a worker died between two items
        failed: Future[Any] = Future()
        failed.set_exception(error)
        return failed


class Inline(Executor):
    """Runs what it is given at once, in this process."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """The future of work that is already done. Ctrl-C passes through."""
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


@contextmanager
def inline() -> Iterator[Crew]:
    """This process alone."""
    yield Crew(Inline(), 1)


def usable_cpus() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processes(jobs: int) -> Engine:
    """A pool of so many processes, or this one alone for one job."""
    return inline if jobs == 1 else lambda: _pool(jobs)


@contextmanager
def _pool(jobs: int) -> Iterator[Crew]:
    context = multiprocessing.get_context("spawn")
    lifeline, held = context.Pipe(duplex=False)
    with lifeline, held:
        pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=_follow, initargs=(lifeline,))
        try:
            with _deaf():
                pool.submit(int)  # starts all workers
            yield Crew(pool, 2 * jobs)
        finally:
            held.close()  # ends the workers, also amid a search: what was wanted has come back
            pool.shutdown(cancel_futures=True)


def _follow(lifeline: Connection) -> None:
    """A worker ends with the process that started it, however that one ends."""

    def watch() -> None:
        lifeline.poll(None)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def _deaf() -> Iterator[None]:
    """Processes that start in here never hear Ctrl-C: it is for the main process, which ends them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def dask(address: str, jobs: int) -> Engine:
    """A Dask cluster: that of a scheduler's address, or one of so many local processes. Raises InputError without the package.

    Results come back to this process, which alone writes: the workers need the planner, not a shared disk.
    """
    try:
        import distributed  # noqa: F401
    except ImportError:
        raise InputError("--dask needs the package distributed: pip install 'layout-planner[dask]'") from None
    _silence()
    return lambda: _local_cluster(jobs) if address == LOCAL else _client(address)


def _silence() -> None:
    """Keep distributed's log off the terminal: what matters of it becomes one line of ours."""
    for name in ["distributed", *logging.root.manager.loggerDict]:
        if name.partition(".")[0] == "distributed":
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)


LOCAL_SETTINGS = {
    "distributed.scheduler.allowed-failures": 0,  # it is `completed` that counts them
    "distributed.comm.timeouts.connect": "10s",  # for results of a worker that died with them
}


@contextmanager
def _local_cluster(jobs: int) -> Iterator[Crew]:
    import dask.config
    from distributed import LocalCluster

    with dask.config.set(LOCAL_SETTINGS):
        try:
            with _deaf():
                cluster = LocalCluster(n_workers=jobs, threads_per_worker=1, dashboard_address=None, silence_logs=logging.CRITICAL)
        except (OSError, RuntimeError) as error:
            raise InputError(f"--dask {LOCAL}: no worker starts here ({error})") from None
        with cluster, _client(cluster.scheduler_address) as crew:
            yield crew


ANSWER_SECONDS = 10
"""A scheduler has to answer, and to have a worker."""


@contextmanager
def _client(address: str) -> Iterator[Crew]:
    from distributed import Client, KilledWorker

    check_scheduler(address)
    with Client(address, timeout=ANSWER_SECONDS, set_as_default=False) as client:
        await_workers(client, address)
        check_workers(client, address)
        executor = client.get_executor(pure=False)
        try:
            yield Crew(executor, 2 * max(sum(client.nthreads().values()), 1), (KilledWorker,))
        except CancelledError:
            raise InputError(f"--dask {address}: the scheduler is gone; --resume goes on") from None
        finally:
            executor.shutdown(wait=False)


def check_scheduler(address: str) -> None:
    """Raise InputError where no scheduler answers; a client that never connected could not even be closed."""
    try:
        found = asyncio.run(asyncio.wait_for(_identity(address), ANSWER_SECONDS))
    except Exception as error:  # whatever another server's answer does to the protocol, also MemoryError
        why = "it speaks another protocol" if isinstance(error, MemoryError) else str(error) or f"no answer within {ANSWER_SECONDS} s"
    else:
        why = "" if "workers" in found else "it is no scheduler"
    if why:
        raise InputError(f"--dask {address}: no Dask scheduler answers ({why}); such as tcp://host:8786, or {LOCAL}")


async def _identity(address: str) -> Any:
    """What a server of Dask says of itself."""
    from distributed import Security, rpc

    async with rpc(address, timeout=ANSWER_SECONDS, connection_args=Security().get_connection_args("client")) as server:
        return await server.identity()


def await_workers(client: Any, address: str) -> None:
    """Raise InputError where a scheduler has no worker, nor gets one soon."""
    try:
        client.wait_for_workers(1, timeout=ANSWER_SECONDS)
    except TimeoutError:
        raise InputError(f"--dask {address}: no worker within {ANSWER_SECONDS} s: start some with dask worker {address}") from None


def check_workers(client: Any, address: str) -> None:
    """Raise InputError where a worker runs another version of this program, or none."""
    try:
        found = set(client.run(version).values()) - {version()}
    except Exception as error:  # whatever a machine raises that lacks the program
        raise InputError(f"--dask {address}: its workers cannot run this program ({error}): install layout-planner there") from None
    if found:
        raise InputError(f"--dask {address}: its workers run version {found.pop()}, this is {version()}: install the same")


def version() -> str:
    """The version of this program, here or on a worker."""
    return metadata.version("layout-planner")
