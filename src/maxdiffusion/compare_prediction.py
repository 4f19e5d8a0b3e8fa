"""Compares a run with its prediction: python -m maxdiffusion.compare_prediction RUN.json"""

import sys

from maxdiffusion.cli.commands import COMPARE_PREDICTION

main = COMPARE_PREDICTION.main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
