"""Output folders: refused early, filled under a temporary name, renamed when complete."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from combkv_jax.config import read_config
from combkv_jax.errors import RequestError

SPARE_BYTES = 64 << 20  # config, tokenizer, metadata and file-system blocks on top of the weights


def check(target: Path, needed: int, overwrite: bool, source: Path) -> None:
    """Raises RequestError when `target` may not be written or does not fit on its disk.

    needed: bytes of weights. Replacing a folder needs room for both until the end, so that a
    failure leaves the old one.
    """
    target, source = target.absolute(), source.resolve()
    _put_back(target)
    if target.resolve() in (source, *source.parents):
        raise RequestError(f"{target} holds the source itself; choose another folder.")
    if target.exists() or target.is_symlink():
        if not overwrite:
            raise RequestError(f"{target} exists; choose another folder, or pass --overwrite.")
        if not target.is_dir() or target.is_symlink():
            raise RequestError(f"{target} is not a folder; choose another name.")
        if any(target.iterdir()) and not _holds_model(target):
            raise RequestError(
                f"{target} is not a model folder (no config.json with a model_type), so it is not "
                "overwritten; choose another name."
            )
    parent = _existing_parent(target)
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise RequestError(f"{parent} cannot be written to; choose another folder.")
    free = shutil.disk_usage(parent).free
    if needed + SPARE_BYTES > free:
        raise RequestError(
            f"{target} needs {(needed + SPARE_BYTES) / 2**30:.2f} GiB and its disk has "
            f"{free / 2**30:.2f} GiB free; free some space or choose another folder."
        )


def _holds_model(folder: Path) -> bool:
    try:
        return "model_type" in read_config(folder)
    except RequestError:
        return False


def _old(target: Path) -> Path:
    """Where `target` waits while another takes its place."""
    return target.with_name(f".{target.name}.old")


def _put_back(target: Path) -> None:
    """Undoes the first of `staged`'s two renames where the second never came."""
    old = _old(target)
    if old.exists() and not target.exists():
        old.rename(target)


def _existing_parent(path: Path) -> Path:
    while not path.parent.exists():
        path = path.parent
    return path.parent


@contextlib.contextmanager
def staged(target: Path) -> Iterator[Path]:
    """An empty folder beside `target` that takes its place, old content and all, at the end.

    On an error the old content is there as before. A kill may leave `.NAME.partial`, which the
    next attempt removes (it has no config.json until all weights are in it, so nothing loads it),
    or the old content as `.NAME.old`, which the next attempt puts back.
    """
    target = target.absolute()
    with _alone(target):
        yield from _staged(target)


@contextlib.contextmanager
def _alone(target: Path) -> Iterator[None]:
    """Holds the lock of an output folder; another process that writes there is refused."""
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = target.with_name(f".{target.name}.lock")
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RequestError(
                f"{target} is being written by another process; wait for it or choose another "
                "folder."
            ) from None
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def _staged(target: Path) -> Iterator[Path]:
    partial, old = target.with_name(f".{target.name}.partial"), _old(target)
    _put_back(target)
    try:
        for left in (partial, old):
            shutil.rmtree(left, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        if target.exists():
            target.rename(old)
        partial.rename(target)
        if old.exists():  # under a name that is never put back: it may be left half removed
            old = old.rename(partial)
            shutil.rmtree(old, ignore_errors=True)
    except BaseException as error:
        _put_back(target)
        shutil.rmtree(partial, ignore_errors=True)
        # tensorstore reports a full disk as a ValueError, with the system's words in it
        full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        if full or os.strerror(errno.ENOSPC) in str(error):
            raise RequestError(
                f"the disk became full while {target} was written; nothing is left of it. Free "
                "some space or choose another folder."
            ) from error
        raise
