"""Trains the autoencoder of a WAN model: python -m maxdiffusion.train_wan_vae CONFIG.yml"""

import sys
from collections.abc import Sequence

from maxdiffusion.config.loading import read_config
from maxdiffusion.generate_wan import BAD_INPUT, STOPPED, report
from maxdiffusion.runtime.problems import ProblemsFound, RunFailed

USAGE = """usage: python -m maxdiffusion.train_wan_vae CONFIG.yml [key=value ...]

  CONFIG.yml        a YAML file, such as configs/train_embedded.yml
  key=value         overrides a key of it: max_train_steps=100

The same command continues a run that was cut short. docs/training.md says more."""


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if arguments else BAD_INPUT
    try:
        reading = read_config(arguments)
        if reading.config.print_config and not reading.problems:
            print(reading.config.describe())
            return 0
        # Jax is slow to import, and a config that cannot be read does not need it.
        from maxdiffusion.commands.train_vae import train_vae

        train_vae(reading)
    except ProblemsFound as error:
        print(report(error), file=sys.stderr)
        return BAD_INPUT
    except RunFailed as error:
        print(f"stopped: {error}", file=sys.stderr)
        return STOPPED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
