"""Files with a JSON object on every line, which a killed process may have cut short."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from maxdiffusion.runtime.atomic import replacing
from maxdiffusion.runtime.places import is_remote


def whole_lines(file: Path) -> list[dict[str, Any]]:
    """The objects of a file (none: no objects); a line that was cut short is left out."""
    if not file.exists():
        return []
    found = []
    for text in file.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(text))
        except ValueError:
            continue
    return found


def append_lines(file: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Adds lines to a file, which is made if need be; never to one that was cut short.

    In object storage nothing can be added to a file: it is written anew.
    """
    if is_remote(file):
        with replacing(file) as anew:
            texts = (f"{json.dumps(line)}\n" for line in [*whole_lines(file), *lines])
            anew.write_text("".join(texts), encoding="utf-8")
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a+b") as stream:
        if stream.tell():
            stream.seek(-1, os.SEEK_END)
            if stream.read(1) != b"\n":
                stream.write(b"\n")
        stream.writelines(f"{json.dumps(line)}\n".encode() for line in lines)


def add_new_lines(file: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Adds those lines that the file does not have yet."""
    held = whole_lines(file)
    new = [line for line in lines if line not in held]
    if new:
        append_lines(file, new)
