"""Config fields of single steps, declared as in `schema.py`: lists of steps, switches, step caches.

The keys of step caches are those of the public files. Caches are lossy and off by default.
"""

from maxdiffusion.config.fields import Integer, ListOf, Nullable, Number, field_group, setting

RATIOS = ListOf(Number(above=0))


@field_group
class StepFields:
    """Steps that differ from the sampler's own, and what a step may leave out."""

    denoising_step_list: tuple[float, ...] = setting(
        (),
        "Timesteps of few-step models before the shift, such as [1000, 750, 500, 250]; empty = "
        "those of the sampler.",
        ListOf(Number(above=0, maximum=1000)),
    )
    sigmas: tuple[float, ...] = setting(
        (),
        "Noise levels before the shift, the same as `denoising_step_list` / 1000; empty = those of "
        "the sampler.",
        ListOf(Number(above=0, maximum=1)),
    )
    boundary_step_index: int | None = setting(
        None,
        "wan2.2: steps of the high-noise expert, in place of `boundary_ratio`; null = by timestep.",
        Nullable(Integer(minimum=0)),
    )
    guidance_end_step: int | None = setting(
        None,
        "Steps with guidance; later ones compute the prompt only, and a data axis of 2 joins the "
        "ring for them; null = all steps.",
        Nullable(Integer(minimum=1)),
    )
    use_magcache: bool = setting(
        False, "Lossy: skip the blocks of steps by measured ratios of magnitudes (MagCache)."
    )
    magcache_thresh: float = setting(
        0.04, "MagCache: limit of the summed error.", Number(minimum=0)
    )
    magcache_K: int = setting(  # noqa: N815
        2, "MagCache: longest run of skipped steps.", Integer(minimum=0)
    )
    retention_ratio: float = setting(
        0.2,
        "MagCache: share of an expert's steps, from its first, that are never skipped.",
        Number(minimum=0, maximum=1),
    )
    mag_ratios_base: tuple[float, ...] = setting(
        (),
        "MagCache: ratios of prompt and negative prompt in turn, as calibrate_cache measures them; "
        "empty = the published ones of the model.",
        RATIOS,
    )
    mag_ratios_base_720p: tuple[float, ...] = setting(
        (),
        "MagCache: the same for videos of at least 720 rows, where the key above is empty.",
        RATIOS,
    )
    mag_ratios_base_480p: tuple[float, ...] = setting(
        (), "MagCache: the same for smaller videos.", RATIOS
    )
    use_cfg_cache: bool = setting(
        False, "Lossy: estimate the prediction of the negative prompt in four of five steps."
    )
    use_sen_cache: bool = setting(
        False, "Lossy: repeat the last prediction while the latents move little (SenCache)."
    )
