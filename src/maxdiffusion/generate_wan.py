"""Makes videos: python -m maxdiffusion.generate_wan CONFIG.yml [key=value ...]"""

import sys
from collections.abc import Sequence

from maxdiffusion.commands.entry import run_command
from maxdiffusion.config.loading import Reading

USAGE = """usage: python -m maxdiffusion.generate_wan CONFIG.yml [key=value ...]

  CONFIG.yml                        a YAML file, such as configs/wan_tiny.yml
  key=value                         overrides a key of it: prompt="a red circle" seed=7
  flash_block_sizes.block_q=4096    overrides one entry of a table
  print_config=true                 prints the resolved config with the source of each value

docs/configuration.md lists all keys."""


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    return run_command(arguments, usage=USAGE, work=work)


def work(reading: Reading, arguments: Sequence[str]) -> None:
    """Makes the videos of a config."""
    from maxdiffusion.commands.generate import generate
    from maxdiffusion.commands.together import together

    together(reading, generate)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
