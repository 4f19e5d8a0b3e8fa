"""Trains a WAN model: python -m maxdiffusion.train_wan CONFIG.yml [key=value ...]"""

import sys
from collections.abc import Sequence

from maxdiffusion.commands.entry import run_command
from maxdiffusion.config.loading import Reading

USAGE = """usage: python -m maxdiffusion.train_wan CONFIG.yml [key=value ...]

  CONFIG.yml        a YAML file, such as configs/train_embedded.yml
  key=value         overrides a key of it: max_train_steps=100

The same command continues a run that was cut short. docs/training.md says more."""


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    return run_command(arguments, usage=USAGE, work=work)


def work(reading: Reading, arguments: Sequence[str]) -> None:
    """Trains the transformers of a config."""
    from maxdiffusion.commands.together import together
    from maxdiffusion.commands.train import train

    together(reading, train)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
