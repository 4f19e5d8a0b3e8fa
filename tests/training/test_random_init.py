"""Models to train from have the tokenizer of the embedded model, and a kind that opens."""

import shutil

from maxdiffusion.checkpoints.diffusers_folder import locate
from maxdiffusion.pipelines.spec import open_wan_folder
from maxdiffusion.training.random_init import write_one_transformer, write_tokenizer


def test_the_tokenizer_is_that_of_the_embedded_model(tmp_path):
    source = locate("embedded") / "tokenizer"
    shutil.copytree(source, tmp_path / "tokenizer")
    file = tmp_path / "tokenizer" / "tokenizer.json"
    changed = file.read_text(encoding="utf-8").replace("circle", "square")
    file.write_text(changed, encoding="utf-8")
    assert write_tokenizer(tmp_path / "tokenizer") == 161
    assert file.read_bytes() == (source / "tokenizer.json").read_bytes() != changed.encode()


def test_two_experts_become_one_with_a_time_for_every_token(tmp_path):
    source = locate("embedded")
    write_one_transformer(source, tmp_path / "one")
    folder, spec = open_wan_folder(tmp_path / "one")
    assert spec.experts == ("transformer",)
    assert spec.time_per_token
    assert sorted(path.name for path in folder.root.iterdir()) == sorted(
        path.name for path in source.iterdir() if path.name != "transformer_2"
    )
    for name in ("config.json", "diffusion_pytorch_model.safetensors"):
        low = (source / "transformer_2" / name).read_bytes()
        assert (tmp_path / "one" / "transformer" / name).read_bytes() == low
