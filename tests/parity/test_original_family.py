"""Every member of the family loads from original files as from the folder that diffusers wrote."""

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from maxdiffusion.checkpoints.load import ComponentSource, load_parameters
from maxdiffusion.checkpoints.lora import Adapter, LoraTargets, fuse, read_lora
from maxdiffusion.checkpoints.safetensors_io import open_weights
from maxdiffusion.errors import ProblemsFound
from maxdiffusion.models.abstract import values_of
from maxdiffusion.models.wan.checkpoint import transformer_map
from maxdiffusion.models.wan.original import TensorSizes, original_module
from maxdiffusion.pipelines.settings import Precision
from maxdiffusion.pipelines.spec import TransformerFiles, open_wan_folder, wan_models
from tests.oracle.lora_files import write_lora
from tests.oracle.original_tensors import original_tensors
from tests.oracle.tiny_checkpoints import TransformerSize
from tests.oracle.tiny_family import (
    wan21_flf2v,
    wan21_i2v,
    wan21_vace,
    wan22_animate,
    wan22_i2v,
    wan22_ti2v,
    write_family,
)

SIZE = TransformerSize(heads=2, head_dim=16, layers=2, ffn=48)
MEMBERS = {
    "2.1 image-to-video": lambda: wan21_i2v(1, transformer=SIZE),
    "first-and-last-frame": lambda: wan21_flf2v(2, transformer=SIZE),
    "2.2 image-to-video": lambda: wan22_i2v(3, transformer=SIZE),
    "TI2V": lambda: wan22_ti2v(4, transformer=SIZE),
    "VACE": lambda: wan21_vace(5, control_layers=(0, 1), transformer=SIZE),
    "Animate": lambda: wan22_animate(6, face_size=512, every=1, transformer=SIZE),
}


@pytest.fixture(scope="module", params=MEMBERS)
def member(request, tmp_path_factory):
    """The kind of a model, and its folder."""
    folder = tmp_path_factory.mktemp("model")
    write_family(folder, MEMBERS[request.param]())
    return request.param, folder


def loaded(stored, spec):
    abstract = wan_models(spec, Precision()).transformer.parameters
    table = transformer_map(spec.transformer)
    return values_of(
        load_parameters(ComponentSource(stored=stored, table=table, abstract=abstract))[0]
    )


def files_of(target, folder, experts):
    """Writes one original file per expert."""
    for name in experts:
        (file,) = (folder / name).glob("*.safetensors")
        save_file(original_tensors(load_file(file)), target / f"{name}.safetensors")
    paths = [str(target / f"{name}.safetensors") for name in experts]
    return TransformerFiles(first=paths[0], second="".join(paths[1:]))


def test_original_files_hold_the_same_weights(member, tmp_path):
    kind, folder = member
    base, spec = open_wan_folder(folder)
    files = files_of(tmp_path, folder, spec.experts)
    opened, _ = open_wan_folder(folder, files)
    for name in spec.experts:
        found, wanted = (loaded(one.weights[name], spec) for one in (opened, base))
        jax.tree.map(np.testing.assert_array_equal, found, wanted)
    tensors = base.weights["transformer"].tensors
    assert kind in TensorSizes.of({name: one.shape for name, one in tensors.items()}).kind


def test_adapters_reach_every_part(member, tmp_path):
    _, folder = member
    base, spec = open_wan_folder(folder)
    stored = base.weights["transformer"]
    shapes = {name: tensor.shape for name, tensor in stored.tensors.items()}
    deltas = write_lora(tmp_path / "lora.safetensors", shapes, "norms")
    lora = read_lora(tmp_path / "lora.safetensors", LoraTargets.of(shapes, original_module))
    lora.check(strict=True)
    assert set(lora.changes) == set(deltas)
    found = loaded(fuse(stored, [Adapter(lora=lora, strength=0.5)]), spec)
    (file,) = stored.files
    values = {n: v.astype(np.float64) for n, v in load_file(file).items()}
    values |= {name: values[name] + 0.5 * delta for name, delta in deltas.items()}
    save_file({n: v.astype(np.float32) for n, v in values.items()}, tmp_path / "model.safetensors")
    (tmp_path / "lora.safetensors").unlink()
    wanted = loaded(open_weights(tmp_path), spec)
    for name in wanted:
        np.testing.assert_allclose(found[name], wanted[name], atol=1e-6, rtol=1e-6, err_msg=name)


def test_a_file_of_another_member_is_named(tmp_path):
    text, image = tmp_path / "text", tmp_path / "image"
    write_family(text, wan22_ti2v(1, transformer=SIZE))
    write_family(image, wan21_i2v(1, transformer=SIZE))
    files = files_of(tmp_path, image, ("transformer",))
    with pytest.raises(ProblemsFound) as caught:
        open_wan_folder(text, files)
    said = str(caught.value)
    assert "in_channels=36: is 48 in" in said
    assert "a WAN 2.1 image-to-video model" in said
    assert "img_emb.proj.0.weight='unexpected'" in said
