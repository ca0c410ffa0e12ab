"""Several processes that work on one model: on the hosts of a cluster, or on one machine.

Each process holds its part of every array and does all that the others do; the first one speaks
and writes. JAX's own start ends a process with a stack trace when a number is wrong or a process
is missing, so processes that are started by hand meet here first (`_report`, `_gather`), in words.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import time
import warnings
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from combkv_jax import console
from combkv_jax.errors import RequestError

PATIENCE = 300.0  # seconds in which all processes of a run must have come
POLL = 0.2  # seconds between two tries to reach the first process
HEARING = 5.0  # seconds in which whoever comes must have said its number
REPLY = 4096  # bytes of the longest line that processes exchange when they meet

# Launchers that JAX knows: (number of processes, number of this one) in the environment.
# Kubernetes tells the number to those who ask its server only.
LAUNCHERS = {
    "Slurm": ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    "Open MPI": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    "Kubernetes": (None, "JOB_COMPLETION_INDEX"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--coordinator, --processes and --process."""
    group = parser.add_argument_group(
        "several hosts", "found by themselves under Slurm, Open MPI and Kubernetes"
    )
    group.add_argument(
        "--coordinator", metavar="HOST:PORT", help="process 0 (or JAX_COORDINATOR_ADDRESS)"
    )
    group.add_argument(
        "--processes", type=console.positive_int, metavar="N", help="(or JAX_NUM_PROCESSES)"
    )
    group.add_argument("--process", metavar="I", help="this one, 0 to N - 1 (or JAX_PROCESS_ID)")


def start(
    coordinator: str | None = None,
    processes: int | None = None,
    process: str | None = None,
    patience: float = PATIENCE,
) -> int:
    """Joins the other processes of a run, if there are any. Returns how many there are.

    To be called before anything touches a device. What is not given is looked for in the
    environment: JAX's variables, then those of a launcher. Of several processes all but the first
    are silent from here on. patience: seconds that the processes wait for each other. Raises
    RequestError when the numbers do not fit or a process does not come.
    """
    coordinator = coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS")
    launcher, count, number = _launched()
    by_hand = coordinator or processes or process or "JAX_NUM_PROCESSES" in os.environ
    if not by_hand:
        if count == 1:
            return 1
        return _start_launched(launcher, count, number, patience)
    if processes is None:
        processes = _whole("JAX_NUM_PROCESSES", os.environ.get("JAX_NUM_PROCESSES"))
        processes = processes or (count if launcher else None)
    if processes == 1 and (coordinator, process) == (None, None):
        return 1  # alone, whatever launcher there is
    process = process if process is not None else os.environ.get("JAX_PROCESS_ID")
    number = number if process is None else _whole("process", process)
    given = {"--coordinator": coordinator, "--processes": processes, "--process": number}
    missing = [name for name, value in given.items() if value is None]
    if missing:
        raise RequestError(f"processes started by hand need {' and '.join(missing)} too.")
    if not 0 <= number < processes:
        raise RequestError(
            f"process is {number}; of {processes} processes it is 0 to {processes - 1}."
        )
    if processes == 1:
        return 1
    host, port = _address(coordinator)
    deadline = time.monotonic() + patience
    if number:
        _report(host, port, processes, number, deadline)
    else:
        _gather(port, processes, deadline, patience)
    # Nothing is detected: JAX would give each process under a launcher one device alone.
    jax.distributed.initialize(
        coordinator, processes, number, cluster_detection_method="deactivate"
    )
    console.join(number)
    return processes


def fetch(tree: Any) -> Any:
    """Arrays on the host, whole. Of several processes each must call it, and each gets them."""
    if jax.process_count() == 1:
        return jax.device_get(tree)

    def whole(x):
        if not isinstance(x, jax.Array) or x.is_fully_addressable:
            return np.asarray(x)
        return multihost_utils.process_allgather(x, tiled=True)

    return jax.tree.map(whole, tree)


def any_of_all(flag: bool) -> bool:
    """Whether the flag is set in any process; each must ask."""
    if jax.process_count() == 1:
        return flag
    return bool(np.any(multihost_utils.process_allgather(np.array(flag))))


def wait_for_all() -> None:
    """Returns once every process has come here."""
    any_of_all(True)


def is_first() -> bool:
    """Whether this process writes and speaks for all."""
    return jax.process_index() == 0


# Launchers


def _launched() -> tuple[str | None, int | None, int | None]:
    """(launcher, processes or None where it does not say, this process); (None, 1, None) without
    one."""
    for name, (total, own) in LAUNCHERS.items():
        number = _whole(own, os.environ.get(own))
        if number is None or (name == "Kubernetes" and "KUBERNETES_SERVICE_HOST" not in os.environ):
            continue
        if total is None:
            return name, None, number
        count = _whole(total, os.environ.get(total))
        if count and count > 1:
            return name, count, number
    return None, 1, None


def _start_launched(launcher: str, count: int | None, number: int | None, patience: float) -> int:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a package is missing is said below
            jax.distributed.initialize(
                num_processes=count, process_id=number, initialization_timeout=int(patience)
            )
    except (ValueError, RuntimeError, KeyError) as error:
        package = " (its pods are found with pip install 'jax[k8s]')" if count is None else ""
        raise RequestError(
            f"the processes that {launcher} started could not be joined{package}: {error}. Give "
            "--coordinator, --processes and --process, or --processes 1 to run this one alone."
        ) from error
    console.join(number)
    return count or jax.process_count()


# By hand


def _whole(name: str, text: str | None) -> int | None:
    """The number in a flag or variable, None when it is not there."""
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise RequestError(f"{name} is {text[:40]!r}; a whole number is needed.")
    return int(text)


def _address(coordinator: str) -> tuple[str, int]:
    host, _, port = coordinator.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and 0 < int(port) < 2**16):
        raise RequestError(
            f"coordinator {coordinator!r} cannot be read; give HOST:PORT, such as 10.0.0.1:1234."
        )
    return host.strip("[]"), int(port)


def _report(host: str, port: int, processes: int, number: int, deadline: float) -> None:
    """Tells the first process that this one is there, and waits until all are."""
    reason = "nothing answered"
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((host, port), timeout=left) as line:
                line.sendall(f"{processes} {number}\n".encode())
                line.settimeout(max(deadline - time.monotonic(), POLL))
                answer = line.makefile(encoding="utf-8").readline(REPLY).strip()
        except OSError as error:  # it may not have been started yet
            reason = error.strerror or str(error)
            time.sleep(POLL)
            continue
        if answer == "go":
            return
        if answer:
            raise RequestError(answer)
        reason = "process 0 ended before all had come"
        break
    raise RequestError(f"process 0 was not reached at {host}:{port}: {reason}.")


def _gather(port: int, processes: int, deadline: float, patience: float) -> None:
    """Waits for the other processes; whoever gives a number that does not fit is told so."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        server = socket.create_server(("", port), family=family, dualstack_ipv6=both)
    except OSError as error:
        raise RequestError(
            f"port {port} cannot be used by process 0: {error.strerror}; choose another one."
        ) from error
    there: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(server)
        while len(there) < processes - 1:
            server.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                line, _ = server.accept()
            except TimeoutError as error:
                missing = sorted(set(range(1, processes)) - set(there))
                listed = ", ".join(map(str, missing))
                raise RequestError(
                    f"of {processes} processes number {listed} did not come in {patience:.0f} s."
                ) from error
            stack.enter_context(line)
            line.settimeout(HEARING)
            try:
                theirs, number = map(int, line.makefile(encoding="utf-8").readline(REPLY).split())
            except (OSError, ValueError):  # somebody else who tries this port
                continue
            complaint = None
            if theirs != processes:
                complaint = f"processes is {theirs} here and {processes} in process 0."
            elif number in there or not 0 < number < processes:
                complaint = f"another process came as number {number} before this one."
            if complaint:
                with contextlib.suppress(OSError):
                    line.sendall(f"{complaint}\n".encode())
            else:
                there[number] = line
        for line in there.values():
            with contextlib.suppress(OSError):  # JAX tells if it has gone meanwhile
                line.sendall(b"go\n")
                line.recv(1)  # it closes first, so that the port is free at once
