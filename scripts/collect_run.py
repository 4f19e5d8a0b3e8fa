#!/usr/bin/env python
"""Puts the results of scripts/validate_on_tpu.sh into one file, FOLDER/run.json.

    python scripts/collect_run.py FOLDER

FOLDER has steps_*.jsonl of scripts/bench_attention.py, with profiles next to them, and video.json,
the timing file of a whole video, if there was one.
"""

import json
import platform
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from maxdiffusion.errors import ProblemsFound
from maxdiffusion.runtime.traces import read_profiles


def main() -> int:
    """Writes the file; returns 0."""
    folder = Path(sys.argv[1])
    video = folder / "video.json"
    content = {
        "software": {name: installed(name) for name in ("jax", "jaxlib", "libtpu", "flax")},
        "host": platform.node(),
        "bench": [line for path in sorted(folder.glob("steps_*.jsonl")) for line in lines(path)],
        "runs": {video.name: json.loads(video.read_text())} if video.exists() else {},
    }
    (folder / "run.json").write_text(json.dumps(content, indent=2) + "\n")
    print(f"wrote {folder / 'run.json'}")
    return 0


def installed(package: str) -> str:
    """Returns the version of a package, or that it is absent."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the results of a file, with the seconds of the scopes of their profiles."""
    for text in path.read_text().splitlines():
        line = json.loads(text)
        case = line["key"].replace(":", "_").replace(" ", "_")
        try:
            first = read_profiles(path.with_suffix(".profile") / case)[0]
        except ProblemsFound:  # no profile of this case
            yield line
        else:
            yield line | {"scopes": dict(first.scopes)}


if __name__ == "__main__":
    sys.exit(main())
