"""The tokenizer of an untrained model is the one that the embedded model was trained with."""

import shutil

from maxdiffusion.checkpoints.diffusers_folder import locate
from maxdiffusion.training.random_init import write_tokenizer


def test_the_tokenizer_is_that_of_the_embedded_model(tmp_path):
    source = locate("embedded") / "tokenizer"
    shutil.copytree(source, tmp_path / "tokenizer")
    file = tmp_path / "tokenizer" / "tokenizer.json"
    changed = file.read_text(encoding="utf-8").replace("circle", "square")
    file.write_text(changed, encoding="utf-8")
    assert write_tokenizer(tmp_path / "tokenizer") == 161
    assert file.read_bytes() == (source / "tokenizer.json").read_bytes() != changed.encode()
