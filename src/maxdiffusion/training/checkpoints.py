"""Checkpoints of a run: written in the background, complete or not there, checked when read.

    <folder>/<step>/state   every array of the state, by its path
    <folder>/<step>/notes   where the data stands, and a fingerprint of every array
    <folder>/<step>/files.json  the sizes and checksums of all these files

A checkpoint that cannot be read, or whose files or arrays are not what was written, is set aside
with a message and the one before it is used.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax import lax

from maxdiffusion.runtime.agreement import agree_on_result
from maxdiffusion.runtime.coordination import barrier, from_first
from maxdiffusion.runtime.places import move_folder, place
from maxdiffusion.runtime.problems import Problem, ProblemsFound, RunFailed
from maxdiffusion.training.inventory import find_damage, write_inventory
from maxdiffusion.training.parts import check_same_shapes
from maxdiffusion.training.state import TrainState

Say = Callable[[str], None]
STATE, NOTES = "state", "notes"
DAMAGED = "damaged-"
UNFINISHED = ".orbax-checkpoint-tmp"


class CheckpointFailed(RunFailed):
    """A checkpoint could not be written."""


@dataclass(frozen=True, kw_only=True)
class Restored:
    """A state that was read back, and where its data stands."""

    state: TrainState
    data: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run; the last `keep` are kept."""

    def __init__(self, folder: Path, *, keep: int = 2, say: Say = print):
        if keep < 1:
            raise ValueError(f"keep={keep}: at least one checkpoint is kept")
        self.folder = place(os.fspath(folder))
        self._keep = keep
        self._say = say
        self._writing = 0
        try:
            self._manager = self._open()
        except OSError as error:
            rule = f"is not a folder that can be written ({error.strerror})"
            name, remedy = "checkpoint_dir", "Name another folder"
            raise ProblemsFound(
                [Problem(name=name, value=str(self.folder), rule=rule, remedy=remedy)]
            ) from error

    def save(self, state: TrainState, data: Mapping[str, Any]) -> None:
        """Writes the state; returns when it may change, while files are still written."""
        self.wait()  # what went wrong with the one before is said of that one
        step = self._writing = int(state.step)
        arrays = flat_arrays(state)
        notes = {"data": dict(data), "fingerprints": fingerprints(arrays)}
        told = json.dumps(notes, sort_keys=True).encode()
        agree_on_result(f"the state after step {step}", hashlib.sha256(told).hexdigest())
        try:
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    **{STATE: ocp.args.StandardSave(arrays), NOTES: ocp.args.JsonSave(notes)}
                ),
                force=True,
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise self._failed(step, error) from error

    def wait(self) -> None:
        """Returns when everything is on the disk; raises what went wrong there."""
        try:
            self._manager.wait_until_finished()
            self._manager.check_for_errors()
        except (OSError, ValueError, RuntimeError) as error:
            raise self._failed(self._writing, error) from error

    def close(self) -> None:
        """Waits, and frees the threads."""
        try:
            self.wait()
        finally:
            self._manager.close()

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that there are whole checkpoints of, oldest first."""
        return tuple(sorted(self._manager.all_steps()))

    def restore(self, like: TrainState) -> Restored | None:
        """The newest state that is whole, placed as `like` is; None if there is none."""
        for step in reversed(self.steps):
            try:
                return self._read(step, like)
            except ProblemsFound:
                raise
            except (OSError, ValueError, KeyError, RuntimeError) as error:
                self._set_aside(step, error)
        return None

    def _open(self) -> ocp.CheckpointManager:
        options = ocp.CheckpointManagerOptions(
            max_to_keep=self._keep,
            create=True,
            enable_async_checkpointing=True,
            async_options=ocp.AsyncOptions(post_finalization_callback=self._list_files),
        )
        handlers = {STATE: ocp.StandardCheckpointHandler(), NOTES: ocp.JsonCheckpointHandler()}
        return ocp.CheckpointManager(self.folder, options=options, item_handlers=handlers)

    def _list_files(self) -> None:
        """Notes the files of the checkpoint that is about to become whole."""
        if jax.process_index() != 0 or "://" in os.fspath(self.folder):
            return  # object storage has checksums of its own
        names = (str(self._writing), f"{self._writing}{UNFINISHED}*")
        for unfinished in (found for name in names for found in self.folder.glob(name)):
            write_inventory(unfinished, (STATE, NOTES))

    def _read(self, step: int, like: TrainState) -> Restored:
        # Reads of orbax that fail are left behind in threads, and fail there once more, loudly.
        damage = find_damage(self.folder / str(step))
        if damage is not None:
            raise ValueError(damage)
        wanted = {
            path: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
            for path, array in flat_arrays(like).items()
        }
        stored = self._manager.item_metadata(step)[STATE]
        found = getattr(stored, "tree", stored)
        if not isinstance(found, Mapping):
            raise ValueError("the list of its arrays cannot be read")
        check_same_shapes(found, wanted, name=f"checkpoint {step}")
        arrays, notes = self._arrays_and_notes(step, wanted)
        written, now = notes["fingerprints"], fingerprints(arrays)
        changed = sorted(path for path in now if now[path] != written.get(path))
        if changed:
            raise ValueError(f"{len(changed)} arrays are not what was written, as {changed[0]}")
        return Restored(state=like_state(arrays, like), data=notes["data"])

    def _arrays_and_notes(self, step: int, wanted: Mapping[str, Any]) -> tuple[Any, Any]:
        items = {STATE: ocp.args.StandardRestore(wanted), NOTES: ocp.args.JsonRestore()}
        try:
            read = self._manager.restore(step, args=ocp.args.Composite(**items))
        except Exception as error:  # orbax raises plain ones for damaged files
            raise ValueError(f"its files cannot be read: {error}") from error
        return read[STATE], read[NOTES]

    def _set_aside(self, step: int, error: Exception) -> None:
        """Moves a damaged checkpoint out of the way, and says so."""
        reason = first_line(error)
        aside = self.folder / from_first("a free name", lambda: self._free_name(step))
        self._manager.close()
        barrier("a damaged checkpoint")
        if jax.process_index() == 0:
            move_folder(self.folder / str(step), aside)
        barrier("a damaged checkpoint")
        self._manager = self._open()
        before = [other for other in self.steps if other < step]
        then = f"continuing from step {before[-1]}" if before else "there is none before it"
        self._say(
            f"checkpoint of step {step} is damaged ({type(error).__name__}: {reason}); "
            f"it is now {aside}; {then}"
        )

    def _free_name(self, step: int) -> str:
        """A name for a damaged checkpoint that is not taken."""
        names = (f"{DAMAGED}{step}{'' if number == 1 else f'-{number}'}" for number in count(1))
        return next(name for name in names if not (self.folder / name).exists())

    def _failed(self, step: int, error: Exception) -> CheckpointFailed:
        """The error for a checkpoint that could not be written; what there is of it is removed."""
        self._remove_unfinished()
        last = self.steps[-1] if self.steps else None
        kept = (
            "there is none before it" if last is None else f"the last whole one is of step {last}"
        )
        return CheckpointFailed(
            f"the checkpoint of step {step} could not be written to {self.folder} "
            f"({first_line(error)}); {kept}. "
            "Make room there, or set another checkpoint_dir, and start the same command again."
        )

    def _remove_unfinished(self) -> None:
        if jax.process_index() == 0 and "://" not in os.fspath(self.folder):
            for unfinished in self.folder.glob(f"*{UNFINISHED}*"):
                shutil.rmtree(unfinished, ignore_errors=True)


def first_line(error: Exception) -> str:
    """What an error says, without the pages that orbax adds."""
    return (str(error).strip().splitlines() or [""])[0][:300]


def flat_arrays(state: TrainState) -> dict[str, jax.Array]:
    """Every array of a state by its path; the key as its numbers."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): _plain(leaf)
        for path, leaf in leaves
    }


def like_state(arrays: Mapping[str, jax.Array], like: TrainState) -> TrainState:
    """The state with the structure of `like` and these arrays."""
    names = list(flat_arrays(like))
    leaves, structure = jax.tree_util.tree_flatten(like)
    keyed = [
        jax.random.wrap_key_data(arrays[name]) if _is_key(leaf) else arrays[name]
        for name, leaf in zip(names, leaves, strict=True)
    ]
    return jax.tree_util.tree_unflatten(structure, keyed)


def fingerprints(arrays: Mapping[str, jax.Array]) -> dict[str, int]:
    """A number for the bits of every array, the same however the array is spread over devices."""
    found = _fingerprints(dict(arrays))
    return {path: int(value) for path, value in jax.device_get(found).items()}


@jax.jit
def _fingerprints(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {path: _fingerprint(array) for path, array in arrays.items()}


def _fingerprint(array: jax.Array) -> jax.Array:
    """The sum of all 32-bit words, each times an odd number of its place, modulo 2^32."""
    words = array if array.dtype == jnp.uint32 else lax.bitcast_convert_type(array, jnp.uint32)
    places = jnp.zeros(words.shape, jnp.uint32)
    stride = 1
    for axis in reversed(range(words.ndim)):
        places += np.uint32(stride % 2**32) * lax.broadcasted_iota(jnp.uint32, words.shape, axis)
        stride *= words.shape[axis]
    return jnp.sum(words * (2 * places + 1), dtype=jnp.uint32)


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _plain(leaf: Any) -> jax.Array:
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf
