"""Files that are whole or not there."""

import pytest

from maxdiffusion.runtime.files import remove_leftovers, remove_unfinished, replacing


def test_the_file_appears_at_the_end(tmp_path):
    target = tmp_path / "deep" / "a.txt"
    with replacing(target) as unfinished:
        unfinished.write_text("new")
        assert unfinished.parent == target.parent
        assert unfinished.suffix == ".txt"
        assert not target.exists()
    assert target.read_text() == "new"
    assert list(target.parent.iterdir()) == [target]


def test_a_failure_leaves_what_was_there(tmp_path):
    target = tmp_path / "a.txt"
    target.write_text("old")

    def fail():
        with replacing(target) as unfinished:
            unfinished.write_text("half")
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_writer_that_writes_nothing_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError), replacing(tmp_path / "a.txt"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_what_killed_processes_left_is_removed_and_nothing_else(tmp_path):
    mine, other = tmp_path / "a_1.mp4", tmp_path / "a_11.mp4"
    mine.write_text("whole")
    left = [tmp_path / f".{path.stem}.0123456789ab.mp4" for path in (mine, other)]
    for path in left:
        path.write_text("half")
    remove_leftovers([mine, tmp_path / "new" / "b.mp4"])
    assert sorted(tmp_path.iterdir()) == sorted([mine, left[1]])


def test_a_process_that_ends_without_unwinding_leaves_nothing(tmp_path):
    def end_in_between():
        with replacing(tmp_path / "a.txt") as unfinished:
            unfinished.write_text("half")
            remove_unfinished()
            assert list(tmp_path.iterdir()) == []

    with pytest.raises(FileNotFoundError):
        end_in_between()
