"""Several processes: how they meet, and what they say when they do not."""

from __future__ import annotations

import socket
import threading
import time

import jax
import pytest

from combkv_jax import console, distributed
from combkv_jax.errors import RequestError

LAUNCHED = {
    "Slurm": {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3"},
    "Open MPI": {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"},
}
PODS = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"}


@pytest.fixture
def port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture
def started(monkeypatch):
    """What JAX is asked to start with; it is not started."""
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *a, **k: calls.append((a, k)))
    monkeypatch.setattr(console, "_process", None)
    return calls


def meet(port, *numbers, patience=20.0):
    """What each (processes, process) of `numbers` gets from `start`; None for going on."""
    out = {}

    def come(key, processes, process):
        try:
            distributed.start(f"127.0.0.1:{port}", processes, str(process), patience)
        except RequestError as error:
            out[key] = str(error)
        else:
            out[key] = None

    threads = []
    for key, (processes, process) in enumerate(numbers):
        threads.append(threading.Thread(target=come, args=(key, processes, process)))
        threads[-1].start()
        time.sleep(0.3)  # they come in this order
    for thread in threads:
        thread.join()
    return [out[key] for key in range(len(numbers))]


def test_processes_meet_in_any_order(port, started):
    assert meet(port, (3, 2), (3, 0), (3, 1)) == [None] * 3
    address = f"127.0.0.1:{port}"
    assert sorted(a for a, _ in started) == [(address, 3, i) for i in range(3)]
    assert all(k == {"cluster_detection_method": "deactivate"} for _, k in started)


def test_numbers_that_do_not_fit_are_told_to_whoever_gave_them(port, started):
    first, second, again, other = meet(port, (3, 0), (3, 1), (3, 1), (2, 1), patience=2.0)
    assert "number 2 did not come in 2 s" in first
    assert "process 0 ended before all had come" in second
    assert "another process came as number 1" in again
    assert "processes is 2 here and 3 in process 0" in other
    assert not started


def test_nobody_answers(port, started):
    (said,) = meet(port, (2, 1), patience=0.5)
    assert f"process 0 was not reached at 127.0.0.1:{port}: Connection refused." in said


def test_a_port_that_is_taken(started):
    with socket.create_server(("", 0)) as server:
        (said,) = meet(server.getsockname()[1], (2, 0), patience=0.5)
    assert "cannot be used by process 0: Address already in use" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("host:1", 2, None), "need --process too"),
        ((None, None, "0"), "need --coordinator and --processes too"),
        (("host:1", 2, "2"), "process is 2; of 2 processes it is 0 to 1"),
        (("host:1", 2, "-1"), "process is '-1'; a whole number"),
        (("host", 2, "1"), "'host' cannot be read; give HOST:PORT"),
        (("host:99999", 2, "1"), "'host:99999' cannot be read"),
    ],
)
def test_wrong_flags_are_one_sentence(arguments, words, started):
    with pytest.raises(RequestError) as error:
        distributed.start(*arguments)
    assert words in str(error.value)
    assert not started


def test_alone(started, monkeypatch):
    assert distributed.start() == 1
    for name, value in LAUNCHED["Slurm"].items():
        monkeypatch.setenv(name, value)
    assert distributed.start(processes=1) == 1
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    assert distributed.start() == 1
    assert not started


@pytest.mark.parametrize("launcher", LAUNCHED)
def test_launchers_start_by_themselves(launcher, started, monkeypatch):
    for name, value in LAUNCHED[launcher].items():
        monkeypatch.setenv(name, value)
    assert distributed.start() == 4
    ((_, options),) = started
    assert (options["num_processes"], options["process_id"]) == (4, 3)
    assert console._process == 3


def test_variables_are_as_good_as_flags(port, started, monkeypatch):
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", f"127.0.0.1:{port}")
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    monkeypatch.setenv("JAX_PROCESS_ID", "2")
    with pytest.raises(RequestError, match="process is 2; of 2 processes"):
        distributed.start()


def test_pods_that_cannot_be_asked_for(monkeypatch):
    for name, value in PODS.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RequestError, match=r"jax\[k8s\].*--processes 1 to run this one alone"):
        distributed.start()


def test_a_second_process_is_silent(capsys, monkeypatch):
    monkeypatch.setattr(console, "_process", 1)
    console.note("a line")
    with console.progress(1, "Reading") as advance:
        advance(1)
    assert capsys.readouterr().err == ""
    ended = []
    monkeypatch.setattr(console.os, "_exit", ended.append)
    parser = console.Parser("A program.", prog="program")

    def fail(args):
        raise RequestError("it is wrong.")

    console.run(fail, parser, [])
    assert ended == [2]  # at once: JAX would wait for the others at an exit
    assert capsys.readouterr().err == "Process 1: program: it is wrong.\n"
