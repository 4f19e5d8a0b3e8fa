"""A prompts file on two processes, cut short twice, gives the files of one process, bit for bit.

The two keep everything in object storage; the one has a disk.
"""

import signal
import time
from pathlib import Path

from tests.multihost.in_buckets import DIES_BEFORE
from tests.multihost.launching import ROOT, TINY, launched, run
from tests.object_storage import served

PROMPTS = ("a red circle moves right", "a blue square stands still", "a green star grows")
NAMES = tuple(f"wan_output_5_{index}.mp4" for index in range(len(PROMPTS)))
LATENTS = "wan_output_5_1.latents.safetensors"
MODEL = ROOT / "tests" / "goldens" / "wan22_t2v"
IN_BUCKETS = ROOT / "tests" / "multihost" / "in_buckets.py"


def arguments(folder: Path) -> tuple[object, ...]:
    return (
        *(TINY, f"pretrained_model_name_or_path={MODEL}", f"prompts_file={folder / 'prompts.txt'}"),
        *("height=48", "width=32", "num_frames=5", "num_inference_steps=6", "num_videos=1"),
        *("seed=5", "ici_data_parallelism=2", "ici_context_parallelism=4"),
        "per_device_batch_size=0.125",
    )


def stored(bucket: str) -> tuple[str, ...]:
    return (
        *(f"output_dir={bucket}/videos", f"timing_file={bucket}/timing.json"),
        *(f"pretrained_orbax_dir={bucket}/weights", f"jax_cache_dir={bucket}/programs"),
        f"prompt_embeddings_cache_dir={bucket}/prompts",
    )


def files(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def test_a_job_that_is_killed_and_preempted_ends_as_if_nothing_happened(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS), encoding="utf-8")
    alone, bucket = tmp_path / "alone", tmp_path / "buckets" / "bucket"
    with served(bucket.parent) as variables:
        command = (IN_BUCKETS, *arguments(tmp_path), *stored("gs://bucket"))

        # kill -9 of the writer ends the other process, which names it.
        dying = {**variables, DIES_BEFORE: NAMES[1]}
        with launched(2, command, variables=dying) as (first, second):
            assert first.end() == -signal.SIGKILL
            killed = time.monotonic()
            assert second.end() == 1
            assert time.monotonic() - killed < 15  # 5 on a machine that has the time
            assert f"pid {first.process.pid}), which runs the coordination service" in second.output
        assert f"wrote gs://bucket/videos/{NAMES[0]}" in first.output
        kept = (bucket / "videos" / NAMES[0]).read_bytes()
        # The second video was denoised; only the third, which was in work, is lost.
        assert files(bucket / "videos") == [NAMES[0], LATENTS]

        # SIGTERM to one process stops both, after what they were at.
        with launched(2, command, variables=variables) as (first, second):
            first.wait_for("1 of 3 videos are there already; 2 to make")
            first.wait_for("1 of them denoised before, and now only decoded")
            first.wait_for("weights of vae: taken from gs://bucket/weights/vae")
            assert "prompt embeddings: 0 of" not in first.output  # the negative prompt's at least
            first.wait_for(f"wrote gs://bucket/videos/{NAMES[1]}")
            second.kill(signal.SIGTERM)
            assert [first.end(), second.end()] in ([1, 1], [0, 0])
            if first.process.returncode == 1:
                assert "stopped: as asked, with " in first.output
                assert "The same command makes the rest." in second.output
                assert "Traceback" not in first.output + second.output

        said = run(2, command, variables=variables)
    assert "videos are there already" in said[0]
    assert files(bucket / "videos") == [*NAMES]
    assert (bucket / "videos" / NAMES[0]).read_bytes() == kept

    run(1, ("-m", "maxdiffusion.generate_wan", *arguments(tmp_path), f"output_dir={alone}"))
    assert files(alone) == [*NAMES]
    for name in NAMES:
        assert (alone / name).read_bytes() == (bucket / "videos" / name).read_bytes(), name
    for one in said:
        assert one.count("wrote ") in (0, 1)
