"""diffusers' own converter gives the same names for the original names of released models."""

import numpy as np
import pytest
import torch
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers

from tests.models.wan.released import RELEASED, released_tensors
from tests.oracle.original_tensors import original_tensors


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
@pytest.mark.parametrize("model", RELEASED)
def test_names_of_released_models(model, prefix):
    names = list(released_tensors(model))
    # The number in each tensor says which one it is.
    numbered = {name: np.full(3, index) for index, name in enumerate(names)}
    stored = {
        prefix + name: torch.tensor(value) for name, value in original_tensors(numbered).items()
    }
    converted = convert_wan_transformer_to_diffusers(stored)
    assert {
        name: value.tolist() for name, value in converted.items() if not name.endswith(".kernel")
    } == {name: value.tolist() for name, value in numbered.items()}
