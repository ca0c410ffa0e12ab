"""What a comparison has measured so far, a line a cell, so that one that was stopped goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from combkv_jax import console
from combkv_jax.errors import RequestError

NAME = "cells.jsonl"
KEY = ("policy", "options", "tokens", "room", "task", "cases")  # what tells a cell
Cell = dict[str, Any]


class Cells:
    """The cells of a folder's file, by KEY. Its first line says with which settings they were
    measured; a line that was cut is measured again."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]):
        """Raises RequestError for a file of other settings, or that is none."""
        self.path = folder / NAME
        self.cells: dict[str, Cell] = {}
        settings = console.jsonable(settings)
        lines, whole = self._read()
        if not lines:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                console.write_text(self.path, _line({"settings": settings}))
            except OSError as error:
                raise RequestError(
                    f"{self.path} cannot be written: {error.strerror}; name another --report."
                ) from None
            return
        self._check(lines[0].get("settings"), settings)
        self.cells = {_key(cell): cell for cell in lines[1:]}
        if self.path.stat().st_size != whole:
            os.truncate(self.path, whole)

    def __contains__(self, key: Mapping[str, Any]) -> bool:
        return _key(key) in self.cells

    def get(self, key: Mapping[str, Any]) -> Cell | None:
        """The cell with that KEY."""
        return self.cells.get(_key(key))

    def add(self, cell: Mapping[str, Any]) -> None:
        """Keeps a cell, here and in the file."""
        cell = console.jsonable(cell)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_line(cell))
            file.flush()
            os.fsync(file.fileno())
        self.cells[_key(cell)] = cell

    def _read(self) -> tuple[list[Cell], int]:
        """The lines, and how many bytes of the file they are: the last may be cut."""
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return [], 0
        except OSError as error:
            raise RequestError(
                f"{self.path} cannot be read: {error.strerror}; name another --report."
            ) from None
        content = content[: content.rfind(b"\n") + 1]
        try:
            lines = [json.loads(line) for line in content.splitlines()]
            wanted = all(isinstance(line, dict) for line in lines)
            if wanted and all(line.keys() >= set(KEY) for line in lines[1:]):
                return lines, len(content)
        except (ValueError, RecursionError):
            pass
        raise RequestError(
            f"{self.path} does not hold a comparison; remove it or name another --report."
        )

    def _check(self, known: Any, settings: Mapping[str, Any]) -> None:
        known = known if isinstance(known, dict) else {}
        for name, value in settings.items():
            if known.get(name) != value:
                raise RequestError(
                    f"{self.path} was begun with {name} {known.get(name)}, not {value}; give the "
                    "same, or another --report."
                )


def _key(cell: Mapping[str, Any]) -> str:
    return json.dumps(console.jsonable([cell[name] for name in KEY]), sort_keys=True)


def _line(data: Mapping[str, Any]) -> str:
    return json.dumps(data, allow_nan=False) + "\n"
