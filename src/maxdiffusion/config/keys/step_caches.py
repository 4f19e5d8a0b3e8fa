"""Keys of methods that skip parts of denoise steps; none of them is exact."""

from maxdiffusion.config.kinds import Boolean, Integer, ListOf, Number
from maxdiffusion.config.schema import refused, unused

EVERY_STEP = "Leave it false: every step is computed"

KEYS = (
    refused(
        "use_cfg_cache",
        Boolean(),
        False,
        "Reuse unguided predictions of earlier steps.",
        way_out=EVERY_STEP,
    ),
    refused(
        "use_sen_cache",
        Boolean(),
        False,
        "Skip steps whose predicted change is small.",
        way_out=EVERY_STEP,
    ),
    refused(
        "use_magcache",
        Boolean(),
        False,
        "Skip steps by calibrated ratios of magnitudes.",
        way_out=EVERY_STEP,
    ),
    unused("magcache_thresh", Number(minimum=0), 0.04, "MagCache: limit of the summed error."),
    unused("magcache_K", Integer(minimum=0), 2, "MagCache: longest run of skipped steps."),
    unused(
        "retention_ratio",
        Number(minimum=0, maximum=1),
        0.2,
        "MagCache: share of steps at the start that are never skipped.",
    ),
    unused("mag_ratios_base", ListOf(Number()), (), "MagCache: calibrated ratios."),
    unused("mag_ratios_base_720p", ListOf(Number()), (), "MagCache: ratios for 720p."),
    unused("mag_ratios_base_480p", ListOf(Number()), (), "MagCache: ratios for 480p."),
)
