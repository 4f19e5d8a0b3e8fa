"""docs/configuration.md agrees with the schema and the compatibility table."""

from pathlib import Path

from maxdiffusion.config.config import ALL_FIELDS
from maxdiffusion.config.docs import main, render

ROOT = Path(__file__).parents[2]


def test_the_file_is_current():
    assert (ROOT / "docs/configuration.md").read_text(encoding="utf-8") == render()


def test_every_key_has_a_row():
    text = render()
    for name, field in ALL_FIELDS.items():
        assert f"| `{name}` | {field.kind.describe()} |" in text


def test_check_fails_on_a_stale_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    assert main(["--check"]) == 1
    assert main([]) == 0
    assert main(["--check"]) == 0
    (tmp_path / "docs/configuration.md").write_text("stale")
    assert main(["--check"]) == 1
    assert "is not current" in capsys.readouterr().err
    assert main(["--frob"]) == 2
