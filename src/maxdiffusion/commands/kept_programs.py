"""`aot_cache_dir`: a folder of compiled programs that jobs start from and preflight fills."""

from collections.abc import Callable
from dataclasses import replace

import jax

from maxdiffusion.config.config import Config
from maxdiffusion.config.output_checks import writing_problems
from maxdiffusion.pipelines.executable_key import surroundings
from maxdiffusion.pipelines.executables import ExecutableStore
from maxdiffusion.pipelines.programs import Workshop
from maxdiffusion.runtime.places import place
from maxdiffusion.runtime.problems import ProblemsFound


def keep_programs(workshop: Workshop, config: Config) -> Workshop:
    """The workshop, loading programs from `aot_cache_dir` and keeping there what it compiles."""
    store = store_of(workshop, config)
    return workshop if store is None else replace(workshop, compile=store)


def fill_programs(workshop: Workshop, config: Config) -> Workshop:
    """The workshop, compiling every program and keeping it in `aot_cache_dir`."""
    store = store_of(workshop, config)
    return workshop if store is None else replace(workshop, compile=store.fill)


def store_of(
    workshop: Workshop, config: Config, say: Callable[[str], None] | None = None
) -> ExecutableStore | None:
    """The folder that a config names, for the programs of this workshop; None without one."""
    if not config.aot_cache_dir:
        return None
    folder = place(config.aot_cache_dir)
    problems = list(writing_problems("aot_cache_dir", config.aot_cache_dir, folder))
    if problems:
        raise ProblemsFound(problems)
    spec = workshop.spec
    settings = {
        "transformer": spec.transformer,
        "vae": spec.vae,
        "text encoder": spec.text_encoder,
        "settings": workshop.settings,
    }
    return ExecutableStore(
        folder=folder, surroundings=surroundings(workshop.mesh, settings), say=say or _say
    )


def _say(text: str) -> None:
    if jax.process_index() == 0:
        print(text, flush=True)
