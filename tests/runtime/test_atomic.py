"""Files that are whole or not there."""

import pytest

from maxdiffusion.runtime.atomic import replacing


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
