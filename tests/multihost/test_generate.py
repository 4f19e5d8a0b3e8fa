"""A prompts file on two processes, cut short twice, gives the files of one process, bit for bit."""

import signal
import time
from pathlib import Path

import pytest
from multihost.launching import TINY, launched, run

PROMPTS = ("a red circle moves right", "a blue square stands still", "a green star grows")
NAMES = tuple(f"wan_output_5_{index}.mp4" for index in range(len(PROMPTS)))
HEARTBEAT = 20  # so a dead process is named after 10 seconds


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    (folder / "prompts.txt").write_text("\n".join(PROMPTS), encoding="utf-8")
    return folder


def command(folder: Path, output: str) -> tuple[object, ...]:
    return (
        *("-m", "maxdiffusion.generate_wan", TINY),
        *("height=48", "width=32", "num_frames=5", "num_inference_steps=4", "num_videos=1"),
        *("seed=5", f"prompts_file={folder / 'prompts.txt'}", f"output_dir={folder / output}"),
        f"jax_distributed_heartbeat_timeout_seconds={HEARTBEAT}",
        f"jax_cache_dir={folder / 'cache'}",
    )


def files(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def test_a_job_that_is_killed_and_preempted_ends_as_if_nothing_happened(folder: Path) -> None:
    run(1, command(folder, "alone"))
    assert files(folder / "alone") == [*NAMES]

    # kill -9 in the middle of the second video ends the other process, which names the dead one.
    with launched(2, command(folder, "shared")) as (first, second):
        first.wait_for(f"wrote {folder / 'shared' / NAMES[0]}")
        second.kill()
        killed = time.monotonic()
        assert first.end() == 1
        assert time.monotonic() - killed < HEARTBEAT / 2 + 15
        assert "stopped: process 1 (host" in first.said
        assert f"pid {second.process.pid}) gave no sign for" in first.said
    kept = (folder / "shared" / NAMES[0]).read_bytes()
    assert NAMES[2] not in files(folder / "shared")

    # SIGTERM to one process stops both, after what they were at.
    with launched(2, command(folder, "shared")) as (first, second):
        first.wait_for("videos are there already")
        first.wait_for(f"wrote {folder / 'shared' / NAMES[1]}")
        second.kill(signal.SIGTERM)
        assert [first.end(), second.end()] in ([1, 1], [0, 0])
        if first.process.returncode == 1:
            assert "stopped: as asked, with " in first.said
            assert "The same command makes the rest." in second.said
            assert "Traceback" not in first.said + second.said

    said = run(2, command(folder, "shared"))
    assert "videos are there already" in said[0]
    assert files(folder / "shared") == [*NAMES]
    assert (folder / "shared" / NAMES[0]).read_bytes() == kept
    for name in NAMES:
        same = (folder / "alone" / name).read_bytes() == (folder / "shared" / name).read_bytes()
        assert same, name
    for one in said:
        assert one.count("wrote ") in (0, 1)
