"""Arguments of train_wan for a run of seconds: eight clips of 32x32 on eight devices."""

from pathlib import Path

CONFIG = Path(__file__).parents[2] / "configs" / "train_embedded.yml"


def small_run(model: Path | str, tmp_path: Path, *more: str) -> list[str]:
    """Returns the arguments for `model`, with the latent cache in `tmp_path`; `more` come last."""
    return [
        str(CONFIG),
        f"pretrained_model_name_or_path={model}",
        "model_name=wan2.1",
        *("num_frames=5", "height=32", "width=32", "seed=0"),
        *("synthetic_clips=8", "synthetic_pair_share=0"),
        *("global_batch_size=8", "ici_data_parallelism=8"),
        f"latent_cache_dir={tmp_path / 'cache'}",
        *more,
    ]
