"""Where points are searched: every engine returns every item once, whatever becomes of its workers."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from planner import engine
from planner.engine import LOCAL, MOST_DEATHS, Crew, Engine, await_workers, check_workers, completed, dask, processes, usable_cpus
from planner.errors import InputError


@contextmanager
def threads() -> Iterator[Crew]:
    """An executor of somebody else's."""
    with ThreadPoolExecutor(2) as executor:
        yield Crew(executor, 3)


ENGINES: dict[str, Engine] = {"inline": processes(1), "pool": processes(2), "threads": threads, "dask": dask(LOCAL, 2)}


def square(number: int) -> int:
    """Work."""
    return number * number


def die_once(task: tuple[int, str]) -> int:
    """Work whose worker is killed at item 3, the first time."""
    number, mark = task
    if number == 3 and not Path(mark).exists():
        Path(mark).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def die_always(number: int) -> int:
    """Work of which item 3 kills every worker."""
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def complain(number: int) -> int:
    """Work that raises."""
    raise InputError(f"{number} is wrong")


@pytest.mark.parametrize("name", ENGINES)
def test_every_item_comes_back_once(name: str) -> None:
    found = list(completed(ENGINES[name], square, range(12)))
    assert sorted(found) == [(number, number * number) for number in range(12)]


@pytest.mark.parametrize("name", ["inline", "pool"])
def test_what_work_raises_ends_the_run(name: str) -> None:
    with pytest.raises(InputError, match="is wrong"):
        list(completed(ENGINES[name], complain, range(3)))


@pytest.mark.parametrize("name", ["inline", "threads"])
def test_no_more_is_taken_than_keeps_the_workers_busy(name: str) -> None:
    taken = 0

    def counted() -> Iterator[int]:
        nonlocal taken
        for number in range(40):
            taken += 1
            yield number

    for done, _ in enumerate(completed(ENGINES[name], square, counted())):
        assert taken <= done + 5


@pytest.mark.parametrize("name", ["pool", "dask"])
def test_a_worker_killed_amid_its_work_loses_nothing_and_repeats_nothing(name: str, tmp_path: Path) -> None:
    items = [(number, str(tmp_path / "mark")) for number in range(8)]
    found = list(completed(ENGINES[name], die_once, items))
    assert sorted(number for (number, _), _ in found) == [result for _, result in sorted(found)] == list(range(8))
    assert (tmp_path / "mark").exists()


def test_an_item_that_kills_every_worker_is_given_up_and_the_others_are_done() -> None:
    found = dict(completed(ENGINES["pool"], die_always, range(8)))
    assert found == {number: number for number in range(8)} | {3: None}
    assert MOST_DEATHS == 3


PARENT = """
import sys, time
from planner.engine import completed, processes
if __name__ == "__main__":
    for done in completed(processes(2), time.sleep, [0, 0, 60, 60]):
        print("ready", flush=True)
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_workers_end_with_the_process_that_started_them(tmp_path: Path, end: signal.Signals) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == b"ready\n"
        children = [int(pid) for pid in Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()]
        parent.send_signal(end)
    assert len(children) >= 2
    until = time.monotonic() + 10
    while any(alive(pid) for pid in children) and time.monotonic() < until:
        time.sleep(0.05)
    assert not [pid for pid in children if alive(pid)]


def alive(pid: int) -> bool:
    """Whether a process runs; a dead one that nobody waits for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("address", ["tcp:/nowhere", "nonsense", "foo://host:1"])
def test_a_scheduler_that_does_not_answer_is_one_line(address: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match=rf"--dask {address}.*no Dask scheduler answers .*or local"):
        list(completed(dask(address, 1), square, [1]))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("said", "telling"), [(b"HTTP/1.0 400 Bad Request\r\n\r\n", "another protocol"), (b"", "no answer within 0.5 s")])
def test_a_server_of_another_kind_is_one_line(said: bytes, telling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "ANSWER_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        held: list[socket.socket] = []

        def answer() -> None:
            held.append(server.accept()[0])
            held[0].sendall(said)

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(InputError, match=f"no Dask scheduler answers .*{telling}"):
            list(completed(dask(f"tcp://127.0.0.1:{server.getsockname()[1]}", 1), square, [1]))
        held[0].close()


def test_a_scheduler_without_workers_is_one_line() -> None:
    class Client:
        """Of a cluster that never gets a worker."""

        def wait_for_workers(self, number: int, timeout: float) -> None:
            raise TimeoutError

    with pytest.raises(InputError, match="no worker within 10 s: start some with dask worker tcp://host:1"):
        await_workers(Client(), "tcp://host:1")


def test_the_log_of_the_package_stays_off_the_terminal() -> None:
    dask(LOCAL, 1)
    names = ("distributed", "distributed.client", "distributed.core", "distributed.scheduler")
    assert not [name for name in names if logging.getLogger(name).isEnabledFor(logging.CRITICAL)]


def test_without_the_package_the_message_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(InputError, match=r"pip install 'layout-planner\[dask\]'"):
        dask(LOCAL, 1)


def test_the_usual_number_of_jobs_is_that_of_the_processors() -> None:
    assert 1 <= usable_cpus() <= (os.cpu_count() or 1)


@pytest.mark.parametrize(
    ("answer", "telling"), [({"w": "0"}, "run version 0, this is"), (ImportError("planner"), "cannot run this program")]
)
def test_workers_of_another_version_are_refused(answer: Any, telling: str) -> None:
    class Client:
        """Of a cluster with one worker."""

        def run(self, function: Any) -> Any:
            if isinstance(answer, Exception):
                raise answer
            return answer

    with pytest.raises(InputError, match=telling):
        check_workers(Client(), "tcp://host:1")
