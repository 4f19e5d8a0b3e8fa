"""Checkpoints of a run: written in the background, complete or absent, checked when read.

    <folder>/<step>/state       every array of the state, by its path
    <folder>/<step>/notes       position of the data, a fingerprint of every array, and the base:
                                what adapters were trained on, empty for trainings of all weights
    <folder>/<step>/files.json  sizes and checksums of these files

A damaged checkpoint (unreadable, or with other files or arrays than were written) is renamed with
a message, and the one before it is used.
"""

import hashlib
import json
import logging
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax import lax

from maxdiffusion.distributed.coordination import assert_same_result, barrier, broadcast_from_first
from maxdiffusion.errors import Collector, Problem, ProblemsFound, RunFailed
from maxdiffusion.models.abstract import check_same_shapes
from maxdiffusion.runtime.files import FilePath, as_path, move_folder
from maxdiffusion.training.step import TrainState

INVENTORY = "files.json"
THREADS, PIECE = 8, 2**24
logger = logging.getLogger(__name__)


def write_inventory(folder: Path, parts: Sequence[str]) -> None:
    """Writes the list of all files below `parts` of a folder."""
    files = sorted(file for part in parts for file in (folder / part).rglob("*") if file.is_file())
    names = [file.relative_to(folder).as_posix() for file in files]
    (folder / INVENTORY).write_text(json.dumps(dict(zip(names, _states(files), strict=True))))


def find_damage(folder: Path) -> str | None:
    """Returns a phrase about the first file that differs from the list, or None."""
    inventory = folder / INVENTORY
    if not inventory.exists():
        return None
    try:
        listed = json.loads(inventory.read_text())
    except ValueError:
        return f"{INVENTORY} cannot be read"
    return next(_damaged(folder, listed), None)


def _damaged(folder: Path, listed: dict[str, list[int]]) -> Iterator[str]:
    """Yields phrases about files that are missing, of another size, or of other content."""
    for name, (size, _) in listed.items():
        file = folder / name
        if not file.is_file():
            yield f"{name} is missing"
        elif file.stat().st_size != size:
            yield f"{name} has {file.stat().st_size} bytes instead of {size}"
    files = [folder / name for name in listed]
    for name, found in zip(listed, _states(files), strict=True):
        if found != listed[name]:
            yield f"{name} has other content than was written"


def _states(files: Sequence[Path]) -> list[list[int]]:
    with ThreadPoolExecutor(THREADS) as pool:  # zlib and reading release the GIL
        return list(pool.map(_state, files))


def _state(file: Path) -> list[int]:
    """Returns the size and the CRC-32 of a file."""
    size = checksum = 0
    with file.open("rb") as stream:
        while piece := stream.read(PIECE):
            size, checksum = size + len(piece), zlib.crc32(piece, checksum)
    return [size, checksum]


STATE, NOTES = "state", "notes"
DAMAGED = "damaged-"
UNFINISHED = ".orbax-checkpoint-tmp"


class CheckpointFailed(RunFailed):
    """A checkpoint could not be written."""


@dataclass(frozen=True, kw_only=True)
class Restored:
    """A state that was read back, and the position of its data."""

    state: TrainState
    data: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run; keeps the last `keep`, and reads those of its own `base`."""

    def __init__(self, folder: FilePath, *, keep: int = 2, base: Mapping[str, str] | None = None):
        if keep < 1:
            raise ValueError(f"keep={keep}: must be at least 1")
        self.folder = as_path(os.fspath(folder))
        self._keep = keep
        self._base = dict(base or {})
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
        """Starts to write the state; returns as soon as its arrays may change."""
        self.wait()  # raises errors of the previous checkpoint under its own name
        step = self._writing = int(state.step)
        arrays = flat_arrays(state)
        notes = {"data": dict(data), "fingerprints": fingerprints(arrays), "base": self._base}
        text = json.dumps(notes, sort_keys=True).encode()
        assert_same_result(f"the state after step {step}", hashlib.sha256(text).hexdigest())
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
        """Waits until everything is on the disk. Raises CheckpointFailed."""
        try:
            self._manager.wait_until_finished()
            self._manager.check_for_errors()
        except (OSError, ValueError, RuntimeError) as error:
            raise self._failed(self._writing, error) from error

    def close(self) -> None:
        """Waits and stops the threads."""
        try:
            self.wait()
        finally:
            self._manager.close()

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps of complete checkpoints, oldest first."""
        return tuple(sorted(self._manager.all_steps()))

    def restore(self, like: TrainState) -> Restored | None:
        """Returns the newest undamaged state in the shardings of `like`, or None."""
        for step in reversed(self.steps):
            try:
                return self._read(step, like)
            except ProblemsFound:
                raise
            except (OSError, ValueError, KeyError, RuntimeError) as error:
                self._set_aside(step, error)
        return None

    def check_base(self) -> None:
        """Raises ProblemsFound if the newest checkpoint is of a training on another base."""
        for step in self.steps[-1:]:
            if isinstance(self.folder, Path) and find_damage(self.folder / str(step)):
                return  # `restore` sets it aside
            check_base(self._notes(step), self._base, step)

    def _notes(self, step: int) -> Mapping[str, Any]:
        notes: Mapping[str, Any] = self._items(step, **{NOTES: ocp.args.JsonRestore()})[NOTES]
        return notes

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
        """Lists the files of the checkpoint that is about to become complete."""
        if jax.process_index() != 0 or not isinstance(self.folder, Path):
            return  # object storage has checksums of its own
        names = (str(self._writing), f"{self._writing}{UNFINISHED}*")
        for unfinished in (found for name in names for found in self.folder.glob(name)):
            write_inventory(unfinished, (STATE, NOTES))

    def _read(self, step: int, like: TrainState) -> Restored:
        # A failed read of orbax stays in a thread and fails there again, so check files first.
        if isinstance(self.folder, Path):
            damage = find_damage(self.folder / str(step))
            if damage is not None:
                raise ValueError(damage)
        check_base(self._notes(step), self._base, step)
        wanted = {
            path: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
            for path, array in flat_arrays(like).items()
        }
        stored = self._manager.item_metadata(step)[STATE]
        found = None if stored is None else stored.tree
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
        read = self._items(step, **items)
        return read[STATE], read[NOTES]

    def _items(self, step: int, **items: ocp.args.CheckpointArgs) -> Any:
        """Returns parts of a checkpoint by name."""
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**items))
        except Exception as error:  # orbax raises plain ones for damaged files
            raise ValueError(f"its files cannot be read: {error}") from error

    def _set_aside(self, step: int, error: Exception) -> None:
        """Renames a damaged checkpoint and logs it."""
        reason = first_line(error)
        aside = self.folder / broadcast_from_first("a free name", lambda: self._free_name(step))
        self._manager.close()
        barrier("a damaged checkpoint")
        if jax.process_index() == 0:
            move_folder(self.folder / str(step), aside)
        barrier("a damaged checkpoint")
        self._manager = self._open()
        before = [other for other in self.steps if other < step]
        then = f"continuing from step {before[-1]}" if before else "there is none before it"
        logger.info(
            f"checkpoint of step {step} is damaged ({type(error).__name__}: {reason}); "
            f"it is now {aside}; {then}"
        )

    def _free_name(self, step: int) -> str:
        """Returns a free name for a damaged checkpoint."""
        names = (f"{DAMAGED}{step}{'' if number == 1 else f'-{number}'}" for number in count(1))
        return next(name for name in names if not (self.folder / name).exists())

    def _failed(self, step: int, error: Exception) -> CheckpointFailed:
        """Returns the error for a failed checkpoint, after removing its files."""
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


def check_base(notes: Mapping[str, Any], base: Mapping[str, str], step: int) -> None:
    """Raises ProblemsFound if a checkpoint belongs to a training on another base."""
    written: Mapping[str, str] = notes.get("base", {})
    remedy = "Continue with the config that it was made with, or name another checkpoint_dir"
    if bool(written) != bool(base):
        held = "adapters" if written else "all weights"
        rule = f"checkpoint {step} is of a training of {held}"
        raise ProblemsFound(
            [Problem(name="train_lora", value=bool(base), rule=rule, remedy=remedy)]
        )
    Collector(
        [
            Problem(
                name=name,
                value=base.get(name),
                rule=f"the adapters of checkpoint {step} were trained with {written.get(name)!r}",
                remedy=remedy,
            )
            for name in sorted({*written, *base})
            if written.get(name) != base.get(name)
        ]
    ).raise_if_any()


def first_line(error: Exception) -> str:
    """Returns the first line of an error; orbax adds pages."""
    return (str(error).strip().splitlines() or [""])[0][:300]


def flat_arrays(state: TrainState) -> dict[str, jax.Array]:
    """Returns every array of a state by its path; the PRNG key as key data."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): _plain(leaf)
        for path, leaf in leaves
    }


def like_state(arrays: Mapping[str, jax.Array], like: TrainState) -> TrainState:
    """Returns the state with the structure of `like` and these arrays."""
    names = list(flat_arrays(like))
    leaves, structure = jax.tree_util.tree_flatten(like)
    keyed = [
        jax.random.wrap_key_data(arrays[name]) if _is_key(leaf) else arrays[name]
        for name, leaf in zip(names, leaves, strict=True)
    ]
    return jax.tree_util.tree_unflatten(structure, keyed)


def fingerprints(arrays: Mapping[str, jax.Array]) -> dict[str, int]:
    """Returns a hash of the bits of every array, the same under any sharding."""
    found = _fingerprints({path: on_device(array) for path, array in arrays.items()})
    return {path: int(value) for path, value in jax.device_get(found).items()}


def on_device(array: jax.Array) -> jax.Array:
    """Returns the array in device memory, where it can be computed with."""
    if array.sharding.memory_kind in (None, "device"):
        return array
    return jax.device_put(array, array.sharding.with_memory_kind("device"))


@jax.jit
def _fingerprints(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {path: _fingerprint(array) for path, array in arrays.items()}


def _fingerprint(array: jax.Array) -> jax.Array:
    """Returns the sum of all values' bits times odd numbers of their positions, modulo 2^32."""
    own = jnp.dtype(f"uint{8 * array.dtype.itemsize}")
    bits = array if array.dtype == own else lax.bitcast_convert_type(array, own)
    words = bits.astype(jnp.uint32)
    positions = jnp.zeros(words.shape, jnp.uint32)
    stride = 1
    for axis in reversed(range(words.ndim)):
        positions += np.uint32(stride % 2**32) * lax.broadcasted_iota(jnp.uint32, words.shape, axis)
        stride *= words.shape[axis]
    return jnp.sum(words * (2 * positions + 1), dtype=jnp.uint32)


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _plain(leaf: Any) -> jax.Array:
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf
