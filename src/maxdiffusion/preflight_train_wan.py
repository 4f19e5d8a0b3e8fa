"""Predicts a training on a TPU slice: preflight_train_wan CONFIG topology=NAME"""

import sys

from maxdiffusion.cli.commands import PREFLIGHT_TRAINING

main = PREFLIGHT_TRAINING.main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
