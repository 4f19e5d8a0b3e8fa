"""diffusers' own converter gives the same names for the original names of released models."""

import pytest
import torch
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers

from maxdiffusion.models.wan.original import original_name
from tests.models.wan.released import RELEASED, released_tensors

MODELS = [model for model in RELEASED if "animate" not in model]


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
@pytest.mark.parametrize("model", MODELS)
def test_names_of_released_models(model, prefix):
    names = list(released_tensors(model))
    # The number in each tensor says which one it is.
    stored = {prefix + original_name(name): torch.tensor(i) for i, name in enumerate(names)}
    converted = convert_wan_transformer_to_diffusers(stored)
    assert {name: int(value) for name, value in converted.items()} == {
        name: index for index, name in enumerate(names)
    }
