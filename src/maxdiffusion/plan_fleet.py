"""Plans servers: python -m maxdiffusion.plan_fleet rate=PER_HOUR mix=NAME:SECONDS[:SHARE] ..."""

import sys

from maxdiffusion.cli.commands import PLAN_FLEET

main = PLAN_FLEET.main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
