"""Configs: typed fields from YAML or Python files and `key=value` overrides, checked at once.

Reading and printing a config imports no jax.
"""

from maxdiffusion.config.config import Config, ignored_fields
from maxdiffusion.config.load import ParsedConfig, load_config, parse_config, read_config

__all__ = ["Config", "ParsedConfig", "ignored_fields", "load_config", "parse_config", "read_config"]
