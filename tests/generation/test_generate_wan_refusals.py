"""Bad input: every problem at once, with a way out, exit code 2, no traceback, nothing written."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from maxdiffusion.generate_wan import main
from tests.generation.command_line import ROOT, TINY, generate_wan

GOLDEN = ROOT / "tests" / "goldens" / "wan22_t2v"
Refused = Callable[..., str]


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Runs the command, which must refuse, and returns what it said."""

    def run(*overrides: object, config: Path = TINY) -> str:
        output = tmp_path / "videos"
        code = main([str(config), f"output_dir={output}", *map(str, overrides)])
        captured = capsys.readouterr()
        assert code == 2
        assert "nothing was run" in captured.err
        assert "Traceback" not in captured.err
        assert not output.exists()
        return captured.err

    return run


@pytest.mark.parametrize(
    ("override", "named", "way_out"),
    [
        ("attention=flsh", "attention='flsh'", "flash"),
        ("heigth=64", "heigth", "height"),
        ("height=50", "height='50'", "48 or 64"),
        ("width=100", "width='100'", "96 or 112"),
        ("num_frames=8", "num_frames='8'", "5 or 9"),
        ("ici_tensor_parallelism=8", "ici_tensor_parallelism=8", "1, 2, 4"),
        ("ici_context_parallelism=3", "ici_", "product is 8"),
        ("ici_data_parallelism=8", "ici_data_parallelism=8", "per_device_batch_size"),
        ("per_device_batch_size=0.01", "per_device_batch_size=0.01", "0.125"),
        ("weights_dtype=float8", "weights_dtype='float8'", "float32"),
        ("num_inference_steps=many", "num_inference_steps='many'", ""),
        ("num_inference_steps=0", "num_inference_steps='0'", "Use 1"),
        ("seed=null", "seed='null'", "The default is 0"),
        ("fps=nan", "fps=", ""),
        ("pretrained_model_name_or_path=/no/such/folder", "/no/such/folder", ""),
        ("prompts_file=/no/such/prompts.txt", "/no/such/prompts.txt", "one prompt per line"),
    ],
)
def test_a_bad_value_is_named_with_a_way_out(
    override: str, named: str, way_out: str, refused: Refused
) -> None:
    said = refused(override)
    assert said.startswith("1 problem, nothing was run:")
    assert named in said
    assert way_out in said


def test_everything_wrong_is_said_at_once(refused: Refused) -> None:
    said = refused("height=50", "attention=flsh", "num_frames=8", "seed=null")
    for name in ("height", "attention", "num_frames", "seed"):
        assert f"{name}=" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "empty"),
        ("seed: [1\n", "YAML"),
        ("seed: 1\nseed: 2\n", "seed"),
        ("- a\n- b\n", ""),
        ("base_config: gone.yml\n", "gone.yml"),
    ],
    ids=["empty", "not-yaml", "duplicate-key", "list", "missing-base"],
)
def test_a_bad_file_is_refused(text: str, said: str, refused: Refused, tmp_path: Path) -> None:
    file = tmp_path / "job.yml"
    file.write_text(text)
    complaint = refused(config=file)
    assert said in complaint
    assert "job.yml" in complaint or "gone.yml" in complaint


def broken_copy(tmp_path: Path, change: Callable[[Path], None]) -> str:
    """Returns an override that names a copy of a checkpoint with something wrong in it."""
    folder = shutil.copytree(GOLDEN, tmp_path / "model")
    change(folder)
    return f"pretrained_model_name_or_path={folder}"


def cut_in_half(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda folder: shutil.rmtree(folder / "vae"), "vae"),
        (lambda folder: shutil.rmtree(folder / "tokenizer"), "tokenizer"),
        (lambda folder: shutil.rmtree(folder / "transformer_2"), "transformer_2"),
        (lambda folder: (folder / "model_index.json").unlink(), "model_index.json"),
        (lambda folder: (folder / "model_index.json").write_text("{"), "model_index.json"),
        (
            lambda folder: cut_in_half(folder / "vae" / "diffusion_pytorch_model.safetensors"),
            "diffusion_pytorch_model.safetensors",
        ),
        (
            lambda folder: (folder / "text_encoder" / "model.safetensors").unlink(),
            "text_encoder",
        ),
    ],
    ids=["no-vae", "no-tokenizer", "no-expert", "no-index", "bad-index", "truncated", "no-weights"],
)
def test_a_broken_checkpoint_is_refused(
    change: Callable[[Path], None], named: str, refused: Refused, tmp_path: Path
) -> None:
    assert named in refused(broken_copy(tmp_path, change))


def test_weights_that_do_not_fit_their_config_are_listed(refused: Refused, tmp_path: Path) -> None:
    def widen(folder: Path) -> None:
        for expert in ("transformer", "transformer_2"):
            file = folder / expert / "config.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | {"ffn_dim": 200}))

    said = refused(broken_copy(tmp_path, widen))
    for expert in ("transformer", "transformer_2"):
        assert f"{expert}: blocks.0.ffn.net.0.proj.weight" in said
        assert f"{expert}: blocks.1.ffn.net.2.weight" in said


@pytest.mark.parametrize("override", ["model_name=wan2.1", "model_type=I2V"])
def test_a_model_of_another_kind_is_refused(override: str, refused: Refused) -> None:
    assert override.split("=")[0] in refused(override)


def test_the_process_ends_with_code_2_and_no_traceback() -> None:
    result = generate_wan(TINY, "height=50", "heigth=64")
    assert result.returncode == 2
    assert result.stdout == ""
    assert "2 problems, nothing was run:" in result.stderr
    assert "Traceback" not in result.stderr


def test_without_arguments_the_usage_is_printed() -> None:
    result = generate_wan()
    assert result.returncode == 2
    assert result.stdout.startswith("usage: python -m maxdiffusion.generate_wan")
