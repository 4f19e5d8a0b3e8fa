"""Writes docs/configuration.md from the schema and the compatibility table.

Run `python -m maxdiffusion.config.docs` in the root folder of the repository. `--check` writes
nothing and fails if the file is stale.
"""

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from maxdiffusion.config.compat import COMPAT_FIELDS
from maxdiffusion.config.config import GROUPS
from maxdiffusion.config.fields import Effect, Field, Table

PATH = Path("docs/configuration.md")
LONGEST_DEFAULT = 48

INTRODUCTION = """\
# Configuration

Written by `python -m maxdiffusion.config.docs` from `src/maxdiffusion/config/schema.py` and
`compat.py`; change those, not this file.

    python -m maxdiffusion.generate_wan FILE key=value key=value ...

* FILE is a YAML file, or a Python file with a function `get_config()` that returns an
  `ml_collections.ConfigDict`. Both have the same keys.
* A file states what differs from its `base_config` and from the defaults below. The path of
  `base_config` is relative to the file that names it.
* `key=value` on the command line has precedence over files. Entries of a table are
  `table.entry=value` (`flash_block_sizes.block_q=9472`); `table={"entry": value}` is merged into
  the table, and `table=null` empties it. Lists are written `["one", "two"]`, booleans true/false or
  1/0.
* `print_config=true` prints every value with its source and stops. The output is a config file.
* All problems are reported at once, before any weight is read, with exit code 2.

A sweep as a Python file:

    import ml_collections

    def get_config():
        config = ml_collections.ConfigDict({"base_config": "configs/base_wan_27b.yml"})
        config.height, config.width = 480, 832
        config.num_frames = 4 * 20 + 1
        return config
"""

REFUSED = """\
## Public keys that are refused

Keys of public WAN config files that request a feature that this program does not have. The default
runs; any other value loads and prints, but does not run.
"""

NO_MEANING = """\
## Public keys without meaning

Keys of public WAN config files that are accepted and have no effect; a run names them in one line
at start-up.
"""


def render() -> str:
    """Returns the text of docs/configuration.md."""
    return "\n".join(
        [
            INTRODUCTION,
            *(line for title, fields in GROUPS.items() for line in section(title, fields)),
            REFUSED,
            *rows(of_effect(Effect.REFUSED), last="instead"),
            "",
            NO_MEANING,
            *rows(of_effect(Effect.NO_MEANING), last=""),
            "",
        ]
    )


def of_effect(effect: Effect) -> list[Field]:
    """Returns the public keys that are treated alike."""
    return [field for field in COMPAT_FIELDS.values() if field.effect is effect]


def section(title: str, fields: Sequence[Field]) -> Iterator[str]:
    """Yields the lines of one group of fields."""
    yield f"## {title}\n"
    yield from rows(fields, last="")
    yield ""
    for field in fields:
        if isinstance(field.kind, Table) and field.kind.entries:
            yield f"Entries of `{field.name}`:\n"
            yield from (f"* `{n}`: {kind.describe()}" for n, kind in field.kind.entries.items())
            yield ""


def rows(fields: Iterable[Field], *, last: str) -> Iterator[str]:
    """Yields a table of fields; with a title for the last column it has their ways out."""
    titles = ["key", "value", "default", "meaning", *([last] if last else [])]
    yield f"| {' | '.join(titles)} |"
    yield "|---" * len(titles) + "|"
    for field in fields:
        cells = [f"`{field.name}`", field.kind.describe(), shown(field.default), field.meaning]
        cells += [field.way_out] if last else []
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def shown(default: object) -> str:
    """Returns a default as YAML, cut where it is long."""
    text = json.dumps(default)
    return f"`{text}`" if len(text) <= LONGEST_DEFAULT else f"`{text[:LONGEST_DEFAULT]}...`"


def main(arguments: Sequence[str]) -> int:
    """Writes the file, or compares it with --check; returns the exit code."""
    if list(arguments) == ["--check"]:
        current = PATH.exists() and PATH.read_text(encoding="utf-8") == render()
        state = "is current" if current else "is not current: run without --check"
        print(f"{PATH} {state}", file=sys.stderr)
        return 0 if current else 1
    if arguments:
        print("the only argument is --check", file=sys.stderr)
        return 2
    PATH.write_text(render(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
