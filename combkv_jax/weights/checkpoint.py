"""Native folders: config.json, tokenizer files, and weights/ in orbax checkpoints.

One checkpoint a layer, so that neither writing nor reading holds more than a layer (or the
embedding) in memory. This is the only file that knows orbax.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from combkv_jax import distributed
from combkv_jax.config import CombConfig
from combkv_jax.console import note
from combkv_jax.errors import RequestError
from combkv_jax.weights.source import (
    BLOCK_BYTES,
    DTYPES,
    Source,
    Tensor,
    copy_tokenizer,
    folder_tokenizer,
    plain_errors,
)

WEIGHTS = "weights"
ROOM_BYTES = 1 << 22  # for the metadata of one checkpoint
SWEEP_SECONDS = 5  # the most that deleting what a failed save left may take
INDEX = "tensors.json"  # in WEIGHTS: name -> [dtype, shape], the order of the checkpoint
_GROUP = re.compile(r"(?:decoder\.layers|history|encoder\.\w+)\.\d+|decoder\.\w+")

_SYSTEM_ERROR = re.compile(r"os_error_code='(\d+)'")  # in tensorstore's words
_PARTIAL = ".orbax-checkpoint-tmp"

Layout = Mapping[str, tuple[tuple[int, ...], np.dtype]]


def groups(names) -> dict[str, list[str]]:
    """Tensor names by the checkpoint they lie in: one a layer."""
    result: dict[str, list[str]] = {}
    for name in names:
        result.setdefault(_GROUP.match(name)[0], []).append(name)
    return result


def _handler() -> ocp.PyTreeCheckpointHandler:
    # Weights do not compress; chunks of a bounded size keep orbax's copies small.
    return ocp.PyTreeCheckpointHandler(use_compression=False)


def write(
    folder: Path,
    config: CombConfig,
    layout: Layout,
    arrays: Callable[[str], np.ndarray | jax.Array],
    write_tokenizer: Callable[[Path], None],
    written: Callable[[str], None] = lambda name: None,
) -> None:
    """Fills the empty `folder`; config.json comes last, and without it nothing loads.

    layout: name -> (shape, dtype). arrays: gives one tensor when its turn comes. written: told
    each name once it is on disk.
    """
    with ocp.Checkpointer(_handler()) as checkpointer:
        for group, names in groups(layout).items():
            needed = sum(math.prod(layout[n][0]) * layout[n][1].itemsize for n in names)
            if shutil.disk_usage(folder).free < needed + ROOM_BYTES:  # orbax would print tracebacks
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            tree = {name: arrays(name) for name in names}
            save = ocp.SaveArgs(chunk_byte_size=BLOCK_BYTES)
            checkpointer.save(
                (folder / WEIGHTS / group).absolute(),
                args=ocp.args.PyTreeSave(tree, save_args=dict.fromkeys(tree, save)),
            )
            del tree
            for name in names:
                written(name)
    index = {name: [dtype.name, list(shape)] for name, (shape, dtype) in layout.items()}
    (folder / WEIGHTS / INDEX).write_text(json.dumps(index, indent=0) + "\n")
    write_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(config.to_json(), indent=2) + "\n")


def read_layout(folder: Path) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Shape and dtype of each tensor of a native folder."""
    path = folder / WEIGHTS / INDEX
    with plain_errors(path, "list of tensors"):
        index = json.loads(path.read_text())
        layout = {n: (tuple(map(int, shape)), DTYPES[d]) for n, (d, shape) in index.items()}
        groups(layout)
    return layout


def restore(
    folder: Path,
    dtypes: Mapping[str, np.dtype],
    shardings: Mapping[str, jax.sharding.Sharding] | None,
    restored: Callable[[int], None] = lambda count: None,
) -> dict[str, jax.Array]:
    """The named tensors of a native folder as device arrays, group by group.

    shardings: where each goes, by name; None: all on the first device. Whatever devices wrote the
    folder, it is read onto these. restored: told how many tensors each
    finished group has.
    """
    layout = read_layout(folder)
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    arrays = {}
    for group, names in groups(dtypes).items():
        target = {
            n: ocp.ArrayRestoreArgs(
                restore_type=jax.Array,
                dtype=dtypes[n],
                sharding=shardings[n] if shardings else here,
            )
            for n in names
        }
        arrays |= _restore(folder, group, target, layout)
        restored(len(names))
    return {name: arrays[name] for name in dtypes}


def _restore(
    folder: Path, group: str, restore_args: Mapping[str, ocp.RestoreArgs], layout: Layout
) -> dict:
    path = (folder / WEIGHTS / group).absolute()
    if not path.is_dir():
        raise RequestError(f"{folder} is damaged: {WEIGHTS}/{group} is missing.")
    with plain_errors(path, "checkpoint"), ocp.Checkpointer(_handler()) as checkpointer:
        arrays = checkpointer.restore(
            path,
            args=ocp.args.PyTreeRestore(
                item=dict.fromkeys(restore_args, 0),
                restore_args=dict(restore_args),
                partial_restore=True,
            ),
        )
        # A name that is not there comes back as what `item` has in its place.
        if any(np.shape(arrays[name]) != layout[name][0] for name in restore_args):
            raise ValueError(f"it does not hold what {INDEX} says")
    return arrays


def open_native(folder: Path, config: CombConfig) -> Source:
    """Opens a native folder as a source to convert or export from, tensor by tensor."""

    layout = read_layout(folder)

    def reader(name: str):
        def read(dtype: np.dtype) -> np.ndarray:
            group = _GROUP.match(name)[0]
            args = {name: ocp.RestoreArgs(restore_type=np.ndarray)}
            return np.asarray(_restore(folder, group, args, layout)[name]).astype(dtype, copy=False)

        return read

    tensors = {
        name: Tensor(name, shape, dtype.name, reader(name))
        for name, (shape, dtype) in layout.items()
    }
    return Source(
        kind="native folder",
        path=folder,
        config=config,
        tensors=tensors,
        unknown=(),
        tokenizer=lambda: folder_tokenizer(folder),
        write_tokenizer=lambda target: copy_tokenizer(folder, target),
    )


class TrainingCheckpoints:
    """What a training run needs to go on: (step, tree of arrays), the newest `keep` of them.

    Written in the background and renamed when complete, so that a kill at any moment leaves the
    ones before. A failed save, such as on a full disk, is said and the run goes on.
    """

    def __init__(self, folder: Path, keep: int):
        self.folder = folder.absolute()
        # What goes wrong is said here in a line; orbax would log the same with tracebacks.
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, create=True, cleanup_tmp_directories=True
        )
        self.manager = ocp.CheckpointManager(self.folder, options=options)

    def save(self, step: int, tree) -> None:
        """Begins to save; the arrays may be donated as soon as this returns. Of several processes
        each must call it."""
        with self._said():  # of the save before, whose failure is known once it has ended
            self.manager.wait_until_finished()
        if step == self.manager.latest_step():
            return
        with self._said():
            needed = sum(x.nbytes for x in jax.tree.leaves(tree)) + ROOM_BYTES
            full = shutil.disk_usage(self.folder).free < needed  # orbax would print tracebacks
            if distributed.any_of_all(full):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            leaves = {f"{i:05}": _copy(x) for i, x in enumerate(jax.tree.leaves(tree))}
            self.manager.save(step, args=ocp.args.StandardSave(leaves))

    def restore(self, like):
        """(step, tree) of the newest checkpoint with the structure and places of `like`; None when
        there is none. Raises RequestError when it is of another model."""
        step = self.manager.latest_step()
        if step is None:
            return None
        leaves, structure = jax.tree.flatten(like)
        abstract = {
            f"{i:05}": jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
            for i, x in enumerate(leaves)
        }
        with plain_errors(self.folder / str(step), "checkpoint of this run"):
            restored = self.manager.restore(step, args=ocp.args.StandardRestore(abstract))
        return step, jax.tree.unflatten(structure, [restored[name] for name in abstract])

    def close(self) -> None:
        """Waits for what is being written."""
        with self._said():
            self.manager.wait_until_finished()
        self.manager.close()

    @contextlib.contextmanager
    def _said(self):
        try:
            yield
        except Exception as error:  # orbax and tensorstore raise what they like on a full disk
            reason = getattr(error, "strerror", None) or str(error).strip().split("\n")[0][:200]
            if cause := _SYSTEM_ERROR.search(str(error)):
                reason = os.strerror(int(cause[1]))
            note(f"A checkpoint in {self.folder} was not written: {reason}.")
            if jax.process_index() == 0:
                self._sweep()

    def _sweep(self) -> None:
        """Deletes what a failed save left: it only takes room. Other threads of that save may
        still put files there, so until nothing has come for a while."""
        until = time.monotonic() + SWEEP_SECONDS
        quiet = 0
        while quiet < 4 and time.monotonic() < until:  # what is left then, the next run deletes
            left = list(self.folder.glob(f"*{_PARTIAL}*"))
            quiet = 0 if left else quiet + 1
            for partial in left:
                shutil.rmtree(partial, ignore_errors=True)
            time.sleep(0.05)


def _copy(array: jax.Array) -> np.ndarray | jax.Array:
    """On the host, or where other processes hold parts of it, on the devices. A real copy: on a
    CPU a view of a donated array would change under the writer."""
    return np.array(array) if array.is_fully_addressable else jnp.copy(array)
