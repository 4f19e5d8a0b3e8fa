"""Writes the checkpoints and recordings that the tests without torch compare with.

python -m tests.oracle.goldens            # everything, into tests/goldens
python -m tests.oracle.goldens --check    # run again and compare with the files
"""

import argparse
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from tests.oracle.arrays import Record
from tests.oracle.pipeline import record_wan21_run, record_wan22_runs
from tests.oracle.samplers import record_samplers
from tests.oracle.schedulers import record_schedulers
from tests.oracle.text import PROMPT, SECOND_PROMPT, embed, record_text, tokenise
from tests.oracle.tiny_checkpoints import wan21_t2v, wan22_t2v, write_checkpoint
from tests.oracle.transformer import record_transformer
from tests.oracle.vae import record_vae

GOLDENS = Path(__file__).parent.parent / "goldens"


def write_checkpoints() -> None:
    """Writes both checkpoints in bfloat16, which halves the files; diffusers runs them upcast."""
    for name, tiny in {
        "wan22_t2v": wan22_t2v(seed=22, dtype=torch.bfloat16),
        "wan21_t2v": wan21_t2v(seed=21, dtype=torch.bfloat16),
    }.items():
        shutil.rmtree(GOLDENS / name, ignore_errors=True)
        write_checkpoint(GOLDENS / name, tiny)


def transformers_of(name: str, *parts: str) -> Record:
    """Returns the recordings of a checkpoint's experts on two real prompts."""
    text = embed(GOLDENS / name, *tokenise(GOLDENS / name, [PROMPT, SECOND_PROMPT]))
    record: Record = {}
    for part in parts:
        record |= record_transformer(GOLDENS / name, part, text, seed=300)
    return record


RECORDINGS: dict[str, Callable[[], Record]] = {
    "scheduler": record_schedulers,
    "samplers": record_samplers,
    "text": lambda: record_text(GOLDENS / "wan22_t2v"),
    "transformer": lambda: transformers_of("wan22_t2v", "transformer", "transformer_2"),
    "transformer_wan21": lambda: transformers_of("wan21_t2v", "transformer"),
    "vae": lambda: record_vae(GOLDENS / "wan22_t2v"),
    "pipe": lambda: record_wan22_runs(GOLDENS / "wan22_t2v"),
    "pipe_wan21": lambda: record_wan21_run(GOLDENS / "wan21_t2v"),
}


def compare(name: str, record: Record) -> bool:
    """Prints how a new recording differs from the stored one; returns True if it does not."""
    with np.load(GOLDENS / f"{name}.npz") as stored:
        if set(stored.files) != set(record):
            print(f"{name}.npz: DIFFERENT, in {sorted(set(stored.files) ^ set(record))}")
            return False
        differences = {
            key: np.abs(stored[key].astype(np.float64) - value.astype(np.float64)).max()
            if value.dtype.kind == "f" and stored[key].shape == value.shape
            else np.inf
            for key, value in record.items()
            if not np.array_equal(stored[key], value)
        }
    if not differences:
        print(f"{name}.npz: the same")
        return True
    worst = max(differences, key=lambda key: differences[key])
    print(f"{name}.npz: DIFFERENT, by at most {differences[worst]:.1e} in {worst}")
    return False


def main() -> int:
    """Writes or checks every recording; returns 1 if a check fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    check = parser.parse_args().check
    torch.set_grad_enabled(False)
    torch.set_num_threads(2)
    if not check:
        write_checkpoints()
    verdicts = []
    for name, make in RECORDINGS.items():
        record = make()
        if check:
            verdicts.append(compare(name, record))
            continue
        np.savez_compressed(GOLDENS / f"{name}.npz", **record)
        print(f"{name}.npz: {len(record)} arrays")
    return 0 if all(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
