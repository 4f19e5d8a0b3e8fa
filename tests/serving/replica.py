"""One server of several that share a queue, without a model: python replica.py FOLDER NAME URL"""

import sys
import time
from pathlib import Path

from tests.serving.stand_in import listening


def main(folder: str, name: str, url: str) -> None:
    overrides = {
        "serve_dir": f"{folder}/{name}",
        "serve_database_url": url,
        "serve_lease_seconds": 2,
    }
    with listening(Path(folder), step_seconds=0.02, **overrides) as (_, address):
        print(address, flush=True)
        time.sleep(600)


if __name__ == "__main__":
    main(*sys.argv[1:])
