"""The index of files outside runs: changed files, damage, no permission, and several processes at once."""

import os
import sqlite3
import subprocess
import sys
from contextlib import closing

import pytest

from mmrl.utils import file_index
from mmrl.utils.digests import file_digest
from mmrl.utils.file_index import FileIndex, shared_file_index, stamp_file


@pytest.fixture
def path(tmp_path):
    return tmp_path / "mmrl" / "files.sqlite"


def put(path, name, value="v"):
    index = FileIndex(path)
    index.put("kind", str(name), value, stamp_file(str(name)))
    index.flush()
    return index


def test_an_entry_lasts_until_its_file_changes(path, tmp_path):
    file = tmp_path / os.fsdecode(b"caf\xe9")  # a name that is not UTF-8
    file.write_bytes(b"a")
    put(path, file)
    assert FileIndex(path).get("kind", str(file)) == "v"
    assert FileIndex(path).get("other kind", str(file)) is None
    file.write_bytes(b"ab")
    assert FileIndex(path).get("kind", str(file)) is None


def test_a_file_is_read_once_for_its_digest(path, tmp_path, monkeypatch):
    file = tmp_path / "a"
    file.write_bytes(b"a")
    index = FileIndex(path)
    assert index.file_digest(file) == file_digest(file)
    index.flush()
    monkeypatch.setattr(file_index, "file_digest", lambda path: pytest.fail(f"{path} was read"))
    assert FileIndex(path).file_digest(file) == file_digest(file)


def test_a_file_that_changes_while_it_is_read_is_read_again(path, tmp_path, monkeypatch):
    file = tmp_path / "a"
    file.write_bytes(b"a")

    def read_and_change(file):
        digest = file_digest(file)
        file.write_bytes(b"changed")
        return digest

    index = FileIndex(path)
    with monkeypatch.context() as patch:
        patch.setattr(file_index, "file_digest", read_and_change)
        index.file_digest(file)
    index.flush()
    assert index.file_digest(file) == file_digest(file)


@pytest.mark.parametrize("offset", [0, 100, 4096])
def test_a_damaged_index_is_begun_anew_with_a_message(path, tmp_path, offset):
    put(path, tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[:offset] + b"damage" * 700 + content[offset + 4200 :])
    index = FileIndex(path)
    assert index.get("kind", str(tmp_path)) is None
    [problem] = index.problems
    assert str(path) in problem
    assert "damaged" in problem
    put(path, tmp_path)
    assert FileIndex(path).get("kind", str(tmp_path)) == "v"


def test_without_permission_nothing_is_known_and_the_reason_said(path, tmp_path):
    """As root every folder is writable, so a database of another program stands for it."""
    path.parent.mkdir()
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("CREATE TABLE entries (a)")
    index = put(path, tmp_path)
    assert index.get("kind", str(tmp_path)) is None
    assert ["cannot be used" in problem for problem in index.problems] == [True]


def test_entries_of_files_that_are_long_gone_leave(path, tmp_path, monkeypatch):
    put(path, tmp_path)
    now = file_index.time.time()
    monkeypatch.setattr(file_index.time, "time", lambda: now + 91 * 86400)
    FileIndex(path)
    monkeypatch.undo()
    assert FileIndex(path).get("kind", str(tmp_path)) is None


def test_processes_write_at_once_and_lose_nothing(path, tmp_path):
    script = """
import sys
from pathlib import Path
from mmrl.utils.file_index import FileIndex
index = FileIndex(Path(sys.argv[1]))
for number in range(3000):
    index.put(f"{sys.argv[2]} {number}", "", "v", (-1, -1))
    if number % 100 == 0:
        index.flush()
index.flush()
sys.exit("; ".join(index.problems) or 0)
"""
    writers = [subprocess.Popen([sys.executable, "-c", script, str(path), str(n)]) for n in range(3)]
    assert [writer.wait(timeout=120) for writer in writers] == [0, 0, 0]
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("SELECT count(*) FROM entries").fetchone() == (9000,)


def test_the_shared_index_lies_in_the_cache_folder(tmp_path, monkeypatch):
    shared_file_index.cache_clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shared_file_index()
    shared_file_index.cache_clear()
    assert (tmp_path / "mmrl" / "files.sqlite").exists()
