"""Modes that the quality ledger compares: one row each, with the overrides that a person types.

    rounding   the exact result in another order of sums or another dtype: the floor
    lossy      less work by another result

To add a mode, add one row. Rows of the two kinds never share a table. `{...}` in an override is a
value of the exact run: `{half_steps}`, or `{other_dtype}`, the one of float32 and bfloat16 that the
run does not use.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from maxdiffusion.config import Config
from maxdiffusion.config.fields import nearest_word
from maxdiffusion.errors import Collector, Problem

OTHER_DTYPE = {"float32": "bfloat16", "bfloat16": "float32"}
FOUR_STEPS = (
    *("enable_lora=true", "scheduler=euler", "denoising_step_list=[1000, 750, 500, 250]"),
    *("num_inference_steps=4", "flow_shift=5", "boundary_step_index=2"),
    *("guidance_scale_high=1", "guidance_scale_low=1"),
)
"""The recipe of configs/wan22_4step.yml; `lora_config` names the four-step weights."""


class Kind(Enum):
    """Kinds of modes."""

    ROUNDING = "rounding"
    LOSSY = "lossy"


@dataclass(frozen=True, kw_only=True)
class Mode:
    """A named set of config overrides."""

    name: str
    kind: Kind
    meaning: str
    overrides: tuple[str, ...]

    def arguments(self, config: Config) -> tuple[str, ...]:
        """Returns the overrides of a run whose exact form is `config`."""
        values = {
            "half_steps": max(1, config.num_inference_steps // 2),
            "other_dtype": OTHER_DTYPE[config.activations_dtype],
        }
        return tuple(override.format(**values) for override in self.overrides)


def _rounding(name: str, meaning: str, *overrides: str) -> Mode:
    return Mode(name=name, kind=Kind.ROUNDING, meaning=meaning, overrides=overrides)


def _lossy(name: str, meaning: str, *overrides: str) -> Mode:
    return Mode(name=name, kind=Kind.LOSSY, meaning=meaning, overrides=overrides)


MODES: tuple[Mode, ...] = (
    _rounding(
        "other_dtype",
        "bfloat16 for float32, or the reverse",
        *("weights_dtype={other_dtype}", "activations_dtype={other_dtype}"),
    ),
    _rounding("data_axis", "guidance on two devices", "ici_data_parallelism=2"),
    _rounding("tensor_axis", "heads and MLPs on two devices", "ici_tensor_parallelism=2"),
    _rounding("ulysses", "all-to-all, flash kernel", "attention=ulysses_custom"),
    _rounding("ring", "ring, flash kernel", "attention=tokamax_ring_custom"),
    _rounding("ulysses_ring", "both, flash kernel", "attention=ulysses_ring_custom"),
    _rounding("fixed_m", "fixed-m softmax", "attention=ulysses_ring_custom_fixed_m"),
    _lossy("fp8_attention", "Q.K^T in float8", "attention=ulysses_ring_custom_fp8"),
    _lossy("int8", "weights in int8", "use_qwix_quantization=true", "quantization=int8"),
    _lossy("fp8", "weights in float8", "use_qwix_quantization=true", "quantization=fp8"),
    _lossy("fp8_full", "activations too", "use_qwix_quantization=true", "quantization=fp8_full"),
    _lossy("magcache", "skip blocks by measured ratios", "use_magcache=true"),
    _lossy("cfg_cache", "estimate the negative prompt", "use_cfg_cache=true"),
    _lossy("sen_cache", "repeat predictions", "use_sen_cache=true"),
    _lossy("taylor_cache", "continue predictions", "use_taylor_cache=true"),
    _lossy("guidance_cutoff", "half of the guidance", "guidance_end_step={half_steps}"),
    _lossy("half_steps", "half of the steps", "num_inference_steps={half_steps}"),
    _lossy("four_steps", "four-step weights of lora_config", *FOUR_STEPS),
)


def modes_of(kind: Kind) -> tuple[Mode, ...]:
    """Returns the modes of a kind."""
    return tuple(mode for mode in MODES if mode.kind is kind)


def find_modes(names: Iterable[str]) -> tuple[Mode, ...]:
    """Returns the modes of these names, in the order of the table; raises unknown names."""
    by_name, wanted = {mode.name: mode for mode in MODES}, [*dict.fromkeys(names)]
    Collector(
        [
            Problem(
                name="--modes",
                value=name,
                rule="is not a mode",
                remedy=nearest_word(name, tuple(by_name)) or f"Modes: {', '.join(by_name)}",
            )
            for name in wanted
            if name not in by_name
        ]
    ).raise_if_any()
    return tuple(mode for mode in MODES if mode.name in wanted)


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the arguments of the config, and the names after `--modes`.

    Names are separated by commas or spaces, and end before the next `key=value` or option.
    """
    rest: list[str] = []
    names: list[str] = []
    taking = False
    for argument in arguments:
        option, equals, value = argument.partition("=")
        if option == "--modes":
            taking = not equals
            names += value.split(",")
        elif taking and not equals and not argument.startswith("-"):
            names += argument.split(",")
        else:
            taking = False
            rest.append(argument)
    return rest, [name for name in names if name]
