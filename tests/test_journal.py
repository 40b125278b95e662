"""The journal of a sweep: whatever a crash leaves of it can be gone on with, and never with another sweep."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import InputError
from planner.journal import Journal, appearing, difference, sealed, unsealed

HEADER = {"sweep": "a1", "version": "1", "points": 4, "top": 1}


def entry(point: int) -> dict[str, Any]:
    """A finished point."""
    return {"point": point, "rows": f'{point},"a\nb"\n' * point}


def written(path: Path, points: list[int]) -> Path:
    """A journal that was closed after some points."""
    with Journal(path, HEADER) as journal:
        for point in points:
            journal.append(entry(point))
    return path


def test_points_come_back_in_order_whatever_the_order_of_their_ends(tmp_path: Path) -> None:
    path = written(tmp_path / "j", [3, 1])
    with Journal(path, HEADER, resume=True) as journal:
        assert list(journal) == [entry(1), entry(3)] and 3 in journal and 2 not in journal and not journal.complete
        journal.append(entry(2))
        journal.append(entry(4))
        assert [one["point"] for one in journal] == [1, 2, 3, 4] and journal.complete


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_journal_cut_anywhere_keeps_the_points_before_the_cut(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = written(tmp_path_factory.mktemp("cut") / "j", [2, 1, 4])
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut])
    kept = [unsealed(line)["point"] for line in whole[:cut].splitlines(keepends=True)[1:] if line.endswith(b"\n")]
    with Journal(path, HEADER, resume=True) as journal:
        assert [one["point"] for one in journal] == sorted(kept)
        for point in {1, 2, 3, 4} - set(kept):
            journal.append(entry(point))
    with Journal(path, HEADER, resume=True) as journal:
        assert list(journal) == [entry(point) for point in (1, 2, 3, 4)]


def test_what_was_stopped_is_not_begun_anew_unasked(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds 2 of 4 points .*: --resume goes on; delete the file to start anew"):
        Journal(written(tmp_path / "j", [1, 2]), HEADER)


def test_a_journal_without_points_is_begun_anew(tmp_path: Path) -> None:
    with Journal(written(tmp_path / "j", []), {**HEADER, "sweep": "b2"}) as journal:
        journal.append(entry(1))
    assert unsealed((tmp_path / "j").read_bytes().splitlines()[0])["sweep"] == "b2"


@pytest.mark.parametrize("change", [{"sweep": "b2"}, {"version": "2"}, {"top": 3, "sweep": "b2"}, {"more": 1}])
def test_another_sweep_or_version_is_refused_by_what_differs(tmp_path: Path, change: dict[str, Any]) -> None:
    path = written(tmp_path / "j", [1])
    before = path.read_bytes()
    key = next((key for key in change if key != "sweep"), "sweep")
    with pytest.raises(InputError, match=f"belongs to another sweep \\({key} = {HEADER.get(key)} there, {change[key]} here"):
        Journal(path, {**HEADER, **change}, resume=True)
    assert path.read_bytes() == before


def test_two_sweeps_never_write_one_journal(tmp_path: Path) -> None:
    with Journal(tmp_path / "j", HEADER):
        code = "import sys; from pathlib import Path; from planner.journal import Journal; Journal(Path(sys.argv[1]), {}, resume=True)"
        done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "j")], capture_output=True, text=True, check=False)
    assert "another sweep is writing it now" in done.stderr


DAMAGED = [
    b"{oops\n",
    b"\n",
    b'{"point":1}\n',
    b"\xff\xfe\n",
    b"[]\n",
    sealed({"rows": ""}),
    sealed({"point": 999}),
    sealed({"point": "x"}),
]


@pytest.mark.parametrize("line", DAMAGED)
def test_a_damaged_line_is_named(tmp_path: Path, line: bytes) -> None:
    path = written(tmp_path / "j", [1, 2])
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + line + lines[2])
    with pytest.raises(InputError, match=r"line 2 is damaged: delete the file to start anew"):
        Journal(path, HEADER, resume=True)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_changed_byte_is_taken_for_what_was_written(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = written(tmp_path_factory.mktemp("changed") / "j", [2, 1, 4])
    whole = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(whole) - 2))  # without its last newline a line is torn off, not damaged
    whole[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(whole)
    with pytest.raises(InputError, match=r"line [1-4] is damaged"):
        Journal(path, HEADER, resume=True)


def test_a_full_disk_leaves_a_valid_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        """A file on a disk that takes ten more bytes."""

        def __init__(self, file: Any) -> None:
            self.file, self.room = file, 10

        def write(self, text: bytes) -> int:
            if not self.room:
                raise OSError(errno.ENOSPC, "No space left on device")
            number, self.room = self.file.write(text[: self.room]), 0
            return int(number)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

    path = tmp_path / "j"
    with Journal(path, HEADER) as journal:
        journal.append(entry(1))
        before = path.read_bytes()
        monkeypatch.setattr(journal, "_file", Full(journal._file))
        with pytest.raises(InputError, match=r"No space left on device\); 1 point is kept: --resume goes on"):
            journal.append(entry(2))
    assert path.read_bytes() == before


def test_a_part_lives_beside_the_journal_and_goes_with_it(tmp_path: Path) -> None:
    with Journal(tmp_path / "j", HEADER) as journal:
        journal.append(entry(1), b"long")
        assert journal.part(1).read_bytes() == b"long"
        journal.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text("old")
    with pytest.raises(RuntimeError), appearing(path) as unfinished:
        unfinished.write_text("ha")
        raise RuntimeError
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    with appearing(path) as unfinished:
        unfinished.write_text("new")
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


def test_a_difference_is_told_even_where_only_the_hash_tells() -> None:
    assert difference({"sweep": "a"}, {"sweep": "b"}) == "sweep = a there, b here"
