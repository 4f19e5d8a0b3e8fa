"""Predicts a job on a TPU slice: python -m maxdiffusion.preflight_wan CONFIG topology=NAME"""

import sys

from maxdiffusion.cli.commands import PREFLIGHT

main = PREFLIGHT.main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
