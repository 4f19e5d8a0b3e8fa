"""Writes docs/configuration.md from the table of keys.

Run as `python -m maxdiffusion.config.documentation` in the repository's root folder. With `--check`
it writes nothing and fails if the file is not what it would write.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from maxdiffusion.config.keys import GROUPS
from maxdiffusion.config.schema import Key, Table, Use

PATH = Path("docs/configuration.md")
LONGEST_DEFAULT = 48

INTRODUCTION = """\
# Configuration

This file is written from the table of keys in `src/maxdiffusion/config/keys/` by
`python -m maxdiffusion.config.documentation`; change the table, not this file.

    python -m maxdiffusion.generate_wan FILE.yml key=value key=value ...

* A file states what differs from the file that its `base_config` names, and from the defaults
  below. Paths of base files are relative to the file that names them.
* `key=value` on the command line wins over files. Entries of a table are `table.entry=value`
  (`flash_block_sizes.block_q=9472`); `table={"entry": value}` is merged into the table, and
  `table=null` empties it. Lists are written `["one", "two"]`, booleans true/false or 1/0.
* `print_config=true` prints every value with its source and stops. What it prints is a config file.
* All that is wrong is reported at once, before any weight is read, with exit code 2.

What becomes of a key:

* **used**: this program acts on it.
* **no meaning here**: part of public WAN config files; accepted, and named in one line at start-up.
* **refused**: asks for something that this program does not offer. The default is fine; any other
  value loads and prints, but does not run.
"""


def render() -> str:
    """The whole text of docs/configuration.md."""
    return "\n".join([INTRODUCTION, *(line for group in GROUPS for line in section(group))])


def section(group: str) -> Iterator[str]:
    """The lines of one group of keys."""
    yield f"## {group}\n"
    yield "| key | value | default | meaning | |"
    yield "|---|---|---|---|---|"
    for key in GROUPS[group]:
        yield row(key)
    yield ""
    for key in GROUPS[group]:
        if isinstance(key.kind, Table) and key.kind.entries:
            yield from entries(key.name, key.kind)


def row(key: Key) -> str:
    """The line of one key."""
    use = "refused" if key.use is Use.REFUSED else key.use.value
    cells = (f"`{key.name}`", key.kind.describe(), shown(key.default), key.meaning, use)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def entries(name: str, table: Table) -> Iterator[str]:
    """The lines about what a table may hold."""
    yield f"Entries of `{name}`:\n"
    for entry, kind in table.entries.items():
        yield f"* `{entry}`: {kind.describe()}"
    yield ""


def shown(default: object) -> str:
    """A default as it would be written in YAML, cut where it is long."""
    text = json.dumps(default)
    return f"`{text}`" if len(text) <= LONGEST_DEFAULT else f"`{text[:LONGEST_DEFAULT]}...`"


def main(arguments: Sequence[str]) -> int:
    """Writes the file, or with --check compares; the exit code says whether it is current."""
    if list(arguments) == ["--check"]:
        current = PATH.exists() and PATH.read_text(encoding="utf-8") == render()
        print(f"{PATH} is current" if current else f"{PATH} is not current: write it anew")
        return 0 if current else 1
    if arguments:
        print("the only argument is --check")
        return 2
    PATH.write_text(render(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
