"""LPIPS against torch: its convolutions and pooling, put together as the published network."""

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from torch.nn import functional

from maxdiffusion.errors import ProblemsFound
from maxdiffusion.quality.lpips import Lpips, expected_shapes

# float32 over stages of up to 3456 terms; features have unit length afterwards.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def tensors():
    rng = np.random.default_rng(0)
    found = {}
    for name, shape in expected_shapes().items():
        fan_in = max(1, int(np.prod(shape[1:])))
        values = rng.normal(0, np.sqrt(2 / fan_in), shape).astype(np.float32)
        found[name] = np.abs(values) if name.startswith("lin") else values
    return found


def features(tensors, pictures):
    net = {name: torch.from_numpy(value) for name, value in tensors.items()}

    def convolved(values, name, **options):
        return functional.conv2d(
            values, net[f"net.{name}.weight"], net[f"net.{name}.bias"], **options
        ).relu()

    first = convolved(pictures, "slice1.0", stride=4, padding=2)
    second = convolved(functional.max_pool2d(first, 3, 2), "slice2.3", padding=2)
    third = convolved(functional.max_pool2d(second, 3, 2), "slice3.6", padding=1)
    fourth = convolved(third, "slice4.8", padding=1)
    return first, second, third, fourth, convolved(fourth, "slice5.10", padding=1)


def expected(tensors, one, two):
    shift = torch.tensor([-0.030, -0.088, -0.188]).reshape(1, 3, 1, 1)
    scale = torch.tensor([0.458, 0.448, 0.450]).reshape(1, 3, 1, 1)
    pictures = torch.from_numpy(np.stack([one, two])).movedim(-1, 1) / 127.5 - 1
    total = 0.0
    for index, stage in enumerate(features(tensors, (pictures - shift) / scale)):
        unit = functional.normalize(stage, dim=1, eps=1e-10)
        weights = torch.from_numpy(tensors[f"lin{index}.model.1.weight"])
        squared = (unit[:1] - unit[1:]).square()
        total += float(functional.conv2d(squared, weights).mean())
    return total


def test_distances(tensors, tmp_path):
    save_file(tensors, tmp_path / "alex.safetensors")
    lpips = Lpips.read(tmp_path / "alex.safetensors")
    rng = np.random.default_rng(1)
    one, two = rng.integers(0, 256, (2, 2, 64, 80, 3)).astype(np.uint8)
    wanted = np.mean([expected(tensors, *pair) for pair in zip(one, two, strict=True)])
    assert lpips(one, two) == pytest.approx(wanted, rel=TOLERANCE)
    assert lpips(one, one) < 1e-12  # rounding of two rows of a batch, squared


def test_files_that_are_refused(tensors, tmp_path):
    with pytest.raises(ProblemsFound, match=r"lpips_weights='.*gone.*': cannot be read"):
        Lpips.read(tmp_path / "gone.safetensors")
    (tmp_path / "text.safetensors").write_text("no")
    with pytest.raises(ProblemsFound, match="cannot be read"):
        Lpips.read(tmp_path / "text.safetensors")
    less = {name: value for name, value in tensors.items() if name != "lin3.model.1.weight"}
    save_file(less, tmp_path / "less.safetensors")
    with pytest.raises(ProblemsFound, match=r"must have lin3.model.1.weight of shape \[1, 256"):
        Lpips.read(tmp_path / "less.safetensors")
