"""What a config may ask for that is not run: it loads and prints, and refuses to run."""

from collections.abc import Iterator

from maxdiffusion.config.config import Config
from maxdiffusion.config.keys import KEYS
from maxdiffusion.config.kinds import nearest_word
from maxdiffusion.config.schema import Use
from maxdiffusion.runtime.problems import Problem

AUTO = "auto"  # an attention is chosen for the devices, before anything is planned


def model_refusal(config: Config) -> Problem | None:
    """The problem of a model type that is not run; None if it is."""
    if config.model_type == "T2V":
        return None
    return Problem(
        name="model_type",
        value=config.model_type,
        rule="only text-to-video is run; image-to-video files can be loaded and printed",
        remedy="Use a text-to-video config (model_type: T2V), or print this one: print_config=true",
    )


def refused_features(config: Config) -> Iterator[Problem]:
    """A problem for every key that asks for something that is not offered."""
    for name, key in KEYS.items():
        if key.use is Use.REFUSED and config.values[name] not in key.harmless:
            meaning = key.meaning.rstrip(".")
            rule = f"not offered ({meaning[0].lower()}{meaning[1:]})"
            yield Problem(name=name, value=config.values[name], rule=rule, remedy=key.way_out)


def attention_problems(config: Config) -> Iterator[Problem]:
    """A problem if nobody knows the attention by that name."""
    # Kernels need jax, which reading and printing a config does not.
    from maxdiffusion.attention import ATTENTION_NAMES

    names = (AUTO, *ATTENTION_NAMES)
    if config.attention not in names:
        known = ", ".join(names)
        near = nearest_word(config.attention, names) or "'flash' always works"
        rule = f"must be one of {known}"
        yield Problem(name="attention", value=config.attention, rule=rule, remedy=near)


def guidance_problems(config: Config) -> Iterator[Problem]:
    """Problems of scales that belong to the other model."""
    if config.model_name == "wan2.2" and config.guidance_scale is not None:
        yield Problem(
            name="guidance_scale",
            value=config.guidance_scale,
            rule="wan2.2 has a scale for each of its two experts",
            remedy="Set guidance_scale_high and guidance_scale_low",
        )
    for name in ("guidance_scale_high", "guidance_scale_low", "boundary_ratio"):
        if config.model_name == "wan2.1" and config.overridden(name):
            rule, remedy = "wan2.1 has one transformer only", "Set guidance_scale, or leave it out"
            yield Problem(name=name, value=config.values[name], rule=rule, remedy=remedy)
