"""The front doors' shared behaviour: exit codes, sentences, progress, tables, JSON, memory."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from combkv_jax import console
from combkv_jax.errors import RequestError

ROOT = Path(__file__).parents[1]


def parser() -> console.Parser:
    parser = console.Parser("a test", prog="door.py")
    parser.add_argument("--ctx", type=console.positive_int, default=1)
    parser.add_argument("--json", type=console.output_file)
    return parser


def raising(error: BaseException):
    def main(args):
        raise error

    return main


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (RequestError("mesh 'x'\ncannot be read."), 2, "door.py: mesh 'x' cannot be read."),
        (OSError(errno.ENOSPC, "No space left on device", "out.bin"), 2, "disk is full"),
        (ValueError("first line\nsecond line"), 1, "ValueError: first line (--debug"),
        (KeyError(), 1, "KeyError"),
        (MemoryError(), 1, "out of memory"),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 byte"), 1, "out of memory"),
        (KeyboardInterrupt(), 130, "Interrupted."),
    ],
)
def test_errors_become_one_line(error, code, words, capsys):
    assert console.run(raising(error), parser(), []) == code
    out, err = capsys.readouterr()
    assert not out
    assert err.count("\n") == 1
    assert words in err


def test_debug_shows_the_traceback(capsys):
    assert console.run(raising(RequestError("no.")), parser(), ["--debug"]) == 2
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.endswith("door.py: no.\n")


def test_done_is_0():
    seen = []
    assert console.run(lambda args: seen.append(args.ctx), parser(), ["--ctx", "131072"]) == 0
    assert seen == [131072]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--ctx", "0"], "'0' is not a positive whole number"),
        (["--ctx", "-3"], "--ctx"),
        (["--ctx", "1.5"], "'1.5' is not a positive whole number"),
        (["--ctx"], "expected one argument"),
        (["--contxt", "3"], "--contxt"),
        (["--json", str(ROOT)], "is not a file name"),
        (["--json", "/no/such/folder/x.json"], "'/no/such/folder' is missing"),
    ],
)
def test_wrong_arguments_are_one_sentence(argv, words, capsys):
    assert console.run(raising(AssertionError()), parser(), argv) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert words in err


def run_python(code: str, **options) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, text=True, timeout=120, **options
    )


def test_a_reader_that_went_away_is_no_failure():
    code = (
        "import sys\nfrom combkv_jax import console\n"
        "main = lambda args: [print('x' * 100) for _ in range(10000)]\n"
        "sys.exit(console.run(main, console.Parser('a test')))\n"
    )
    reader, writer = os.pipe()
    os.close(reader)
    done = run_python(code, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert done.returncode == 141
    assert done.stderr == ""


def test_prepare_jax_keeps_compiled_programs_and_what_the_environment_says(tmp_path):
    code = (
        "from combkv_jax import console\nconsole.prepare_jax()\n"
        "import jax, jax.numpy as jnp\n"
        "print(jax.config.jax_compilation_cache_dir)\n"
        "jax.block_until_ready(jax.jit(lambda x: x + 1)(jnp.ones(3)))\n"
    )
    clean = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    clean |= {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}

    def run(**extra):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=clean | extra,
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        # Without a GPU nothing is said about the CUDA plugin that could not find one.
        assert "Traceback" not in done.stderr
        return Path(done.stdout.strip())

    default = run()
    assert default == tmp_path / ".cache" / "combkv_jax"
    assert list(default.glob("*-cache"))
    chosen = run(JAX_COMPILATION_CACHE_DIR=str(tmp_path / "mine"))
    assert chosen == tmp_path / "mine"
    assert list(chosen.glob("*-cache"))


class Clock:
    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(console.time, "monotonic", lambda: self.now)


def test_plain_progress_speaks_seldom_and_tells_the_time_left(monkeypatch, capsys):
    clock = Clock(monkeypatch)
    with console.progress(1000, "Encoding", "tokens") as advance:
        for _ in range(100):  # 10 tokens a second
            clock.now += 1
            advance(10)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 20  # every 5 seconds
    assert lines[0] == "Encoding: 5 % of 1000 tokens, 1 min 35 s left"
    assert lines[-1] == "Encoding: 1000 tokens in 1 min 40 s"


def test_short_work_is_silent(monkeypatch, capsys):
    Clock(monkeypatch)
    with console.progress(3, "Encoding") as advance:
        for _ in range(3):
            advance(1)
    assert capsys.readouterr().err == ""


def test_a_watched_progress_is_a_bar(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    with console.progress(4, "Encoding", "chunks") as advance:
        advance(4)
    out, err = capsys.readouterr()
    assert not out
    assert "4/4" in err
    assert "chunks" in err


def test_table(capsys):
    console.print_table([("context", 131072), ("a", 7)], header=("what", "tokens"))
    assert capsys.readouterr().out == (
        "what     tokens\n-------  ------\ncontext  131072\na             7\n"
    )
    console.print_table([("cache", "4.00 GiB", 0.123456)])
    assert capsys.readouterr().out == "cache  4.00 GiB  0.1235\n"
    console.print_table([])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (24_700_000_000, "23.00 GiB"),
        (2**40, "1.00 TiB"),
        (2**51, "2048.00 TiB"),
    ],
)
def test_size(nbytes, text):
    assert console.size(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (9.94, "9.9 s"),
        (59.6, "1 min 0 s"),
        (83, "1 min 23 s"),
        (7265, "2 h 1 min"),
    ],
)
def test_duration(seconds, text):
    assert console.duration(seconds) == text


@dataclasses.dataclass
class Result:
    tokens: np.ndarray
    rate: float


def test_json_round_trip(tmp_path):
    path = tmp_path / "result.json"
    path.write_text("old")
    data = {
        "result": Result(np.arange(3), float("nan")),
        "loss": jnp.float32(0.5),
        "path": tmp_path,
        "rows": [(1, None), (np.int64(2), True)],
    }
    console.write_json(path, data)
    assert json.loads(path.read_text()) == {
        "result": {"tokens": [0, 1, 2], "rate": None},
        "loss": 0.5,
        "path": str(tmp_path),
        "rows": [[1, None], [2, True]],
    }
    assert os.listdir(tmp_path) == ["result.json"]


def test_json_that_cannot_be_written_leaves_nothing(tmp_path):
    target = tmp_path / "folder"
    target.mkdir()
    with pytest.raises(RequestError, match="cannot be written"):
        console.write_json(target, {})
    with pytest.raises(TypeError):
        console.write_json(tmp_path / "x.json", {"what": object()})
    assert os.listdir(tmp_path) == ["folder"]


def test_peak_memory_is_this_process_alone():
    done = run_python(
        "import numpy as np\nfrom combkv_jax import console\n"
        "before = console.peak_memory()['host']\n"
        "x = np.ones(2**27, np.uint8)\ndel x\n"
        "print(before, console.peak_memory()['host'], console.peak_memory()['device'])",
        stdout=subprocess.PIPE,
        check=True,
    )
    before, after, device = done.stdout.split()
    assert 2**26 < int(before) < 2**30
    assert int(after) - int(before) > 2**26
    assert device == "None"


def test_json_goes_through_links_and_into_pipes(tmp_path):
    real, link, pipe = tmp_path / "real.json", tmp_path / "link.json", tmp_path / "pipe"
    real.write_text("old")
    link.symlink_to(real)
    console.write_json(link, {"a": 1})
    assert link.is_symlink()
    assert json.loads(real.read_text()) == {"a": 1}
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    console.write_json(pipe, [2])
    assert json.loads(os.read(reader, 100)) == [2]
    os.close(reader)
    assert pipe.is_fifo()


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-"])
def test_a_closed_stream_is_no_failure(closed):
    code = "from combkv_jax import console\nimport sys\n"
    code += "def main(args): console.note('said'); print('\u00e9', sys.stdin.read())\n"
    code += "sys.exit(console.run(main, console.Parser('x'), []))"
    command = f'{sys.executable} -c "$CODE" {closed if closed == "<&-" else "</dev/null " + closed}'
    environment = os.environ | {"CODE": code, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        ["bash", "-c", command], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ("" if closed == ">&-" else "? \n")
    assert done.stderr == ("" if closed == "2>&-" else "said\n")


def test_a_name_that_is_too_long_is_a_wrong_request(tmp_path, capsys):
    def main(args):
        (tmp_path / ("x" * 300)).read_text()

    assert console.run(main, console.Parser("x"), []) == 2
    assert "File name too long" in capsys.readouterr().err


def test_a_user_without_a_home_has_no_cache(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(console.Path, "home", no_home)
    monkeypatch.setattr(console.jax.config, "update", lambda *setting: None)
    console.prepare_jax()
