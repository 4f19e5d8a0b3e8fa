"""Serves videos over HTTP: python -m maxdiffusion.serve_wan CONFIG [key=value ...]"""

import sys

from maxdiffusion.cli.commands import SERVE

main = SERVE.main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
