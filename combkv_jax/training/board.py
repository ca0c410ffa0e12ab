"""The log for TensorBoard: an event file beside log.jsonl."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from combkv_jax.errors import RequestError


class Board:
    """Writes the numbers of log records as scalars into `folder`, at once and in this thread: a
    full disk is an OSError of `write`, and the run goes on.

    done: steps that earlier event files of the run may show; what they have beyond is hidden.
    """

    def __init__(self, folder: Path, done: int):
        try:
            from tensorboardX import summary
            from tensorboardX.event_file_writer import EventsWriter
            from tensorboardX.proto import event_pb2
        except ImportError as error:
            raise RequestError(
                "--tensorboard needs the package tensorboardX: pip install tensorboardX."
            ) from error
        self._scalar, self._event = summary.scalar, event_pb2.Event
        self._writer = EventsWriter(str(folder / "events"))
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        event = self._event(wall_time=time.time(), step=done + 1, session_log=start)
        self._writer.write_event(event)
        self._writer.flush()

    def write(self, record: Mapping[str, Any]) -> None:
        """A record of log.jsonl: {"step": ..., names: numbers, "check": {names: numbers}}."""
        step = record["step"]
        for name, value in _numbers(record):
            summary = self._scalar(name, value)
            event = self._event(wall_time=time.time(), step=step, summary=summary)
            self._writer.write_event(event)
        self._writer.flush()

    def close(self) -> None:
        """Ends the file."""
        self._writer.close()


def _numbers(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    kind = "check" if "check" in record else "train"
    flat = {**record, **record.get("check", {})}
    for name, value in flat.items():
        if name != "step" and isinstance(value, (int, float)):
            yield f"{kind}/{name}".replace(" ", "_"), float(value)
