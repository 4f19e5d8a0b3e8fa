"""From YAML files and `key=value` overrides to one checked, unchanging config.

`load_config` and `read_config` need no jax; `maxdiffusion.config.validation` does, and turns a
config into a job.
"""

from maxdiffusion.config.config import Config, without_meaning
from maxdiffusion.config.loading import Reading, load_config, read_config

__all__ = ["Config", "Reading", "load_config", "read_config", "without_meaning"]
