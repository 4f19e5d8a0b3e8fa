"""Makes videos: python -m maxdiffusion.generate_wan CONFIG.yml [key=value ...]"""

import sys
from collections.abc import Sequence

from maxdiffusion.config.loading import read_config
from maxdiffusion.runtime.problems import ProblemsFound, RunFailed

USAGE = """usage: python -m maxdiffusion.generate_wan CONFIG.yml [key=value ...]

  CONFIG.yml                        a YAML file, such as configs/wan_tiny.yml
  key=value                         overrides a key of it: prompt="a red circle" seed=7
  flash_block_sizes.block_q=4096    overrides one entry of a table
  print_config=true                 prints the resolved config with the source of each value

docs/configuration.md lists all keys."""

STOPPED = 1
BAD_INPUT = 2


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
        from maxdiffusion.commands.generate import generate

        generate(reading)
    except ProblemsFound as error:
        print(report(error), file=sys.stderr)
        return BAD_INPUT
    except RunFailed as error:
        print(f"stopped: {error}", file=sys.stderr)
        return STOPPED
    return 0


def report(error: ProblemsFound) -> str:
    """All problems, a line each."""
    count = len(error.problems)
    title = "1 problem" if count == 1 else f"{count} problems"
    return "\n".join([f"{title}, nothing was run:", *(f"  {line}" for line in error.problems)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
