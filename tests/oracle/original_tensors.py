"""Tensors of a diffusers checkpoint as Wan-AI's own files hold them.

Names come from the package; diffusers' own converter confirms them and undoes the rest, which is
done here: keys and values of a face adapter in one tensor, biases with four dimensions, and the
kernels of the blurs.
"""

import re
from collections.abc import Mapping

import numpy as np

from maxdiffusion.models.wan.original import original_name

CONVOLUTIONS = "motion_encoder.enc.net_app.convs"
_KEYS = re.compile(r"face_adapter\.\d+\.to_k\.(?:weight|bias)")
_VALUES = re.compile(r"face_adapter\.\d+\.to_v\.(?:weight|bias)")
_BLOCK = re.compile(r"motion_encoder\.res_blocks\.(\d+)\..+")


def original_tensors(values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the tensors of the original file of a transformer."""
    made = {}
    for name, value in values.items():
        theirs = original_name(name)
        assert theirs is not None, name
        if _KEYS.fullmatch(name):
            made[theirs] = np.concatenate([value, values[name.replace("to_k", "to_v")]])
        elif name.endswith(".act_fn.bias"):
            made[theirs] = value.reshape(1, -1, 1, 1)
        elif not _VALUES.fullmatch(name):
            made[theirs] = value
    return made | _blurs(values)


def _blurs(values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    row = np.array([1, 3, 3, 1], np.float32) / 8
    numbers = sorted({int(found[1]) for name in values if (found := _BLOCK.fullmatch(name))})
    return {
        f"{CONVOLUTIONS}.{number + 1}.{part}.0.kernel": np.outer(row, row)
        for number in numbers
        for part in ("conv2", "skip")
    }
