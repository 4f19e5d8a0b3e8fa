"""Every exchange gives the same bits on one, two and four processes with eight devices in all."""

import numpy as np
from multihost.launching import ROOT, run

WORKER = ROOT / "tests" / "multihost" / "worker.py"


def test_attention_does_not_depend_on_how_devices_are_shared_out(tmp_path):
    for processes in (1, 2, 4):
        run(processes, (WORKER, "exchanges", tmp_path))
    alone, *shared = (np.load(tmp_path / f"exchanges_{count}.npz") for count in (1, 2, 4))
    assert [len(held.files) for held in (alone, *shared)] == [3, 3, 1]
    for found in shared:
        for name in found.files:
            assert found[name].std() > 0.1
            np.testing.assert_array_equal(found[name], alone[name], err_msg=name)
