"""Every context-parallel scheme, and 8-bit weights, on one, two and four processes."""

import numpy as np

from maxdiffusion.runtime.video import read_video
from tests.multihost.launching import ROOT, launched, run

WORKER = ROOT / "tests" / "multihost" / "worker.py"


def test_a_video_does_not_depend_on_how_devices_are_shared_out(tmp_path):
    with launched(1, (WORKER, "context_parallel", tmp_path)) as (alone,):
        for processes in (2, 4):
            run(processes, (WORKER, "context_parallel", tmp_path))
        assert alone.end() == 0, alone.output
    latents = {count: np.load(tmp_path / f"latents_{count}.npz") for count in (1, 2, 4)}
    assert [len(held.files) for held in latents.values()] == [5, 5, 2]
    for count in (2, 4):
        for name in latents[count].files:
            expected = latents[1][name]
            assert expected.std() > 0.1
            np.testing.assert_array_equal(latents[count][name], expected, err_msg=name)
            written = [tmp_path / f"{name}_{n}" / "wan_output_5_0.mp4" for n in (1, count)]
            assert written[0].read_bytes() == written[1].read_bytes()
    frames, _ = read_video(written[0])
    assert frames.shape == (5, 32, 32, 3)
