"""What the front doors share: arguments, plain-sentence errors, progress, tables, JSON, memory."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import errno
import json
import math
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax

from combkv_jax.errors import RequestError

PLAIN_INTERVAL = 5.0  # seconds between progress lines when nobody watches
GPU_MEMORY_FRACTION = 0.95  # JAX takes 75 % of a GPU unless told; an 8B model needs more of 24 GB


class Parser(argparse.ArgumentParser):
    """An argument parser with --debug, whose complaints are RequestErrors."""

    def __init__(self, description: str, **options):
        super().__init__(description=description, allow_abbrev=False, **options)
        self.add_argument("--debug", action="store_true", help="show the traceback of an error")

    def error(self, message: str) -> NoReturn:
        raise RequestError(f"{message[0].upper()}{message[1:]} (--help lists what is accepted).")


def positive_int(text: str) -> int:
    """An argument type: a whole number of at least 1 (and at most 2**31 - 1, as JAX counts)."""
    if text.isascii() and text.isdigit() and len(text) < 11 and 0 < int(text) < 2**31:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a positive whole number below 2**31")


def output_file(text: str) -> Path:
    """An argument type: a file that can be written, checked before the work and not after it."""
    path = Path(text)
    if not text or path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not a file name")
    if path.exists():  # a device or a pipe is written to, not replaced
        if not os.access(path, os.W_OK):
            raise argparse.ArgumentTypeError(f"'{path}' cannot be written")
    elif not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"folder '{path.parent}' is missing or cannot be written")
    return path


def run(
    main: Callable[[argparse.Namespace], None], parser: Parser, argv: Sequence[str] | None = None
) -> int:
    """Runs a front door and returns its exit code: 0 done, 1 failed, 2 wrong request.

    Whatever goes wrong becomes one sentence on stderr; --debug puts the traceback before it.
    Ctrl-C gives 130, and a reader of stdout that went away 141, as in a shell.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    _usable_streams()
    try:
        main(parser.parse_args(argv))
        sys.stdout.flush()
        return 0
    except KeyboardInterrupt:
        return _end(130, "Interrupted.")
    except BrokenPipeError:
        # Python flushes stdout once more at exit; that must not fail a second time.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        if "--debug" in argv:
            traceback.print_exc()
        code, sentence = _explain(error)
        return _end(code, f"{parser.prog}: {sentence}")


_process: int | None = None  # the number of this process, where there are several


def join(process: int) -> None:
    """Makes this process one of several: all but the first are silent, and one that fails ends at
    once (at a normal exit JAX would have it wait for the others, which wait for it)."""
    global _process
    _process = process


def _end(code: int, sentence: str) -> int:
    if _process is None:
        note(sentence)
        return code
    print(f"Process {_process}: {sentence}", file=sys.stderr, flush=True)
    os._exit(code)


def _usable_streams() -> None:
    """A closed stream becomes one that leads nowhere, and text that a terminal's encoding lacks
    is shown with question marks instead of ending the work."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def _explain(error: Exception) -> tuple[int, str]:
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    if isinstance(error, RequestError):
        return 2, " ".join(str(error).split())
    if isinstance(error, OSError) and error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
        return 2, f"a file's name cannot be used ({text[:120]}); choose another one."
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return 2, f"the disk is full ({text}); free some space or choose another folder."
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text:
        return 1, f"out of memory ({text or 'host'}); ask for a shorter context or a smaller batch."
    text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return 1, f"the work failed with {text.rstrip('.')} (--debug shows where)."


def note(text: str) -> None:
    """One line for the person at the terminal, on stderr, so that stdout stays the result."""
    if not _process:
        print(text, file=sys.stderr, flush=True)


def prepare_jax() -> None:
    """Settings of JAX that a front door wants; call it before anything touches a device.

    Compiled programs are kept in JAX_COMPILATION_CACHE_DIR, by default ~/.cache/combkv_jax. What
    the environment already sets is left alone.
    """
    settings = {
        # JAX's own threshold of one second would leave the cache empty for small models.
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    with contextlib.suppress(RuntimeError):  # a user without a home has no cache
        settings["jax_compilation_cache_dir"] = str(Path.home() / ".cache" / "combkv_jax")
    for name, value in settings.items():
        if name.upper() not in os.environ:
            jax.config.update(name, value)
    if any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg")):
        if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:
            os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", str(GPU_MEMORY_FRACTION))
    else:
        # The CUDA plugin without a GPU: its version check would print a traceback.
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")


@contextlib.contextmanager
def progress(total: int, label: str, unit: str = "tokens") -> Iterator[Callable[[int], None]]:
    """Shows how far long work is: `with progress(n, "Encoding") as advance: advance(384)`.

    A bar with the time left when stderr is a terminal; otherwise a line every few seconds, and
    none at all for work that is over sooner.
    """
    if _process or not sys.stderr.isatty():
        yield _PlainProgress(total, label, unit).advance
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = ["{task.description}", BarColumn(), MofNCompleteColumn(), TextColumn(unit)]
    columns += [TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn()]
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(label, total=total)
        yield lambda amount: bar.advance(task, amount)


class _PlainProgress:
    def __init__(self, total: int, label: str, unit: str):
        self.total, self.label, self.unit = total, label, unit
        self.done, self.start, self.spoke = 0, time.monotonic(), False
        self.last = self.start

    def advance(self, amount: int) -> None:
        self.done += amount
        now = time.monotonic()
        finished = self.done >= self.total
        if now - self.last < PLAIN_INTERVAL and not (finished and self.spoke):
            return
        self.last, self.spoke = now, not finished  # one closing line, not one per late advance
        elapsed = now - self.start
        if finished:
            note(f"{self.label}: {self.total} {self.unit} in {duration(elapsed)}")
        elif self.done > 0:
            left = elapsed * (self.total - self.done) / self.done
            percent = 100 * self.done // self.total
            note(f"{self.label}: {percent} % of {self.total} {self.unit}, {duration(left)} left")


def print_table(rows: Sequence[Sequence[Any]], header: Sequence[str] | None = None) -> None:
    """Prints aligned columns to stdout: numbers to the right, text to the left; no colours."""
    body = [[_cell(value) for value in row] for row in rows]
    table = ([list(header)] if header else []) + body
    if not table:
        return
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    right = [
        bool(rows) and all(isinstance(row[i], (int, float)) for row in rows)
        for i in range(len(widths))
    ]
    if header:
        table.insert(1, ["-" * width for width in widths])
    for row in table:
        cells = zip(row, widths, right, strict=True)
        print("  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in cells).rstrip())


def markdown(rows: Sequence[Sequence[Any]], header: Sequence[str]) -> str:
    """A table for a Markdown file."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(map(_cell, line))} |\n" for line in lines)


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def size(nbytes: int) -> str:
    """Bytes for people: `size(24_700_000_000) == "23.00 GiB"`."""
    if abs(nbytes) < 1024:
        return f"{nbytes} B"
    power = min(int(math.log(abs(nbytes), 1024)), 4)
    return f"{nbytes / 1024**power:.{2 if power > 2 else 1}f} {' KMGT'[power]}iB"


def duration(seconds: float) -> str:
    """Seconds for people: `duration(83) == "1 min 23 s"`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    parts = [f"{hours} h"] * bool(hours) + [f"{minutes} min"] * bool(hours or minutes)
    return " ".join(parts + [f"{seconds} s"] * (not hours))


def write_json(path: Path, data: Any) -> None:
    """Writes `data` as JSON, all or nothing: beside the target first, then renamed.

    Dataclasses, paths, and NumPy and JAX numbers and arrays are taken; NaN and infinity, which JSON
    does not have, become null. Raises RequestError when the file cannot be written.
    """
    write_text(path, json.dumps(jsonable(data), indent=2, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes a text, all or nothing. Raises RequestError when the file cannot be written."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file beside `path` to be written, which then takes its place (a device or a pipe is written
    as it is). Raises RequestError when it cannot be written."""
    path = Path(path).resolve()  # what a link leads to is written, and the link stays
    # The ending stays, by which some tell what is to be written.
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.tmp{path.suffix}")
    try:
        if path.exists() and not path.is_file():  # a device or a pipe
            yield path
            return
        yield temporary
        temporary.replace(path)
    except OSError as error:
        raise RequestError(f"{path} cannot be written: {error.strerror}.") from error
    finally:
        temporary.unlink(missing_ok=True)


def jsonable(value: Any) -> Any:
    """`value` as JSON can have it, as `write_json` says."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, dict):
        return {str(k): jsonable(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(v) for v in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):
        return jsonable(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value


def peak_memory() -> dict[str, int | None]:
    """Most bytes this process has held: "host", and "device" (the fullest one; None if unknown)."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [s["peak_bytes_in_use"] for s in stats if "peak_bytes_in_use" in s]
    return {"host": _host_peak(), "device": max(peaks, default=None)}


def _host_peak() -> int:
    # Linux counts what the parent held before exec in ru_maxrss; VmHWM starts anew.
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
