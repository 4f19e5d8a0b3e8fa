"""Encodes training clips once: python -m maxdiffusion.preprocess_wan CONFIG.yml [key=value ...]"""

import sys
from collections.abc import Sequence

from maxdiffusion.commands.entry import run_command
from maxdiffusion.config.loading import Reading

USAGE = """usage: python -m maxdiffusion.preprocess_wan CONFIG.yml [key=value ...]

  CONFIG.yml        the YAML file of a training
  key=value         overrides a key of it: train_data_dir=FOLDER

Writes latents and text embeddings to latent_cache_dir, where train_wan finds them. The same command
continues a run that was cut short. docs/training.md says more."""


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    return run_command(arguments, usage=USAGE, work=work)


def work(reading: Reading, arguments: Sequence[str]) -> None:
    """Encodes the clips of a config."""
    from maxdiffusion.commands.preprocess import preprocess
    from maxdiffusion.commands.together import together

    together(reading, preprocess)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
