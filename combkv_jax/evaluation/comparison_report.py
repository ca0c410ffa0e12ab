"""What a comparison of caches found: tables, figures and numbers for programs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from combkv_jax import console

NAME = "comparison"
Cell = Mapping[str, Any]  # what `comparison.compare` keeps of a cache, a length and a task

# What is shown of a cell by the first of these numbers that it has: heading and format of each.
NUMBERS = {
    "score": (("score", "{task}", ".2f"),),
    "nll": (("nll", "NLL of novels", ".3f"),),
    "equal": (("equal", "same next token as full", ".3f"), ("kl", "KL from full", ".4f")),
}


def write(folder: Path, command: str, cells: Sequence[Cell]) -> None:
    """Prints a table of each length, and writes `comparison.md`, `comparison.json`, the figures
    `quality.svg` and `.png`, and `needle.svg` where depths were asked for."""
    console.write_json(folder / f"{NAME}.json", {"command": command, "cells": cells})
    quality(folder, cells)
    parts = [
        "# Caches compared",
        f"    {command}",
        "Device and host are bytes of live arrays behind the context; fetched is what each decoded "
        "token brings from the host at most. Novels go on behind a page of theirs, and what is "
        "decoded sees what the cache shows. Tokens/s are one row's, measured once.",
        "![Quality against bytes on the device](quality.svg)",
    ]
    if needle(folder, cells):
        parts.append("![Needles found by depth and length](needle.svg)")
    for tokens, some in _groups(cells, "tokens"):
        header, body = table(some)
        print(f"{tokens} tokens of context")
        console.print_table(body, header)
        print()
        parts += [f"## {tokens} tokens of context", console.markdown(body, header)]
        texts = [cell for cell in some if "by_position" in cell]
        if texts:
            parts.append("NLL by place behind the page:")
            parts.append(console.markdown(*by_position(texts)))
    console.write_text(folder / f"{NAME}.md", "\n\n".join(x.rstrip("\n") for x in parts) + "\n")


def table(cells: Sequence[Cell]) -> tuple[list[str], list[list[str]]]:
    """Header and rows, a row for each cache, of the cells of one length."""
    header = ["cache", "options", "device", "host", "fetched", "times smaller"]
    body = []
    for row in caches(cells):
        first = row[0]
        line = [first["policy"], options(first)]
        line += [console.size(first[place]) for place in ("device", "host", "fetched")]
        line.append(f"{first['full'] / first['device']:.2f}")
        for cell in row:
            for name, heading, form in numbers(cell):
                line.append(format(cell[name], form))
                if not body:
                    header.append(heading.format(**cell))
        line.append(f"{max(cell['tokens_per_second'] for cell in row):.1f}")
        body.append(line)
    return [*header, "tokens/s"], body


def numbers(cell: Cell) -> tuple[tuple[str, str, str], ...]:
    """Of NUMBERS those of a cell."""
    return next(some for name, some in NUMBERS.items() if name in cell)


def by_position(cells: Sequence[Cell]) -> tuple[list[list[str]], list[str]]:
    """Rows and header: each cache's NLL by the place of the token."""
    bins = len(cells[0]["by_position"])
    each = cells[0]["predicted_each"] // bins
    header = [f"{i * each + 1}-{(i + 1) * each}" for i in range(bins)]
    body = [
        [cell["policy"], options(cell), *(f"{x:.3f}" for x in cell["by_position"])]
        for cell in cells
    ]
    return body, ["cache", "options", *header]


def options(cell: Cell) -> str:
    """A cell's options as `--cache` takes them."""

    def value(x: Any) -> str:
        return "+".join(map(str, x)) or "none" if isinstance(x, (list, tuple)) else str(x)

    return ",".join(f"{name}={value(x)}" for name, x in cell["options"].items())


def caches(cells: Sequence[Cell]) -> list[list[Cell]]:
    """The cells of each cache, in their order."""
    rows: dict[str, list[Cell]] = {}
    for cell in cells:
        rows.setdefault(f"{cell['policy']}:{options(cell)}", []).append(cell)
    return list(rows.values())


def _groups(cells: Sequence[Cell], name: str) -> Iterator[tuple[Any, list[Cell]]]:
    for value in dict.fromkeys(cell[name] for cell in cells):
        yield value, [cell for cell in cells if cell[name] == value]


def quality(folder: Path, cells: Sequence[Cell]) -> None:
    """Every number of every task against bytes on the device, a row of panels for each length. The
    settings of one policy are joined."""
    from matplotlib.figure import Figure  # slow to import

    lengths = list(_groups(cells, "tokens"))
    shown = [
        (task, *number[:2])
        for task, some in _groups(lengths[0][1], "task")
        for number in numbers(some[0])
    ]
    figure = Figure(figsize=(4 * len(shown), 3.5 * len(lengths) + 1), layout="constrained")
    grid = figure.subplots(len(lengths), len(shown), squeeze=False)
    names = list(dict.fromkeys(cell["policy"] for cell in cells))
    for panels, (tokens, some) in zip(grid, lengths, strict=True):
        for axes, (task, name, heading) in zip(panels, shown, strict=True):
            for number, policy in enumerate(names):
                points = sorted(
                    (cell["device"], cell[name])
                    for cell in some
                    if cell["policy"] == policy and cell["task"] == task
                )
                marker = "osDv^<>P*X"[number % 10]
                axes.plot(*zip(*points, strict=True), marker=marker, label=policy)
            axes.set_xscale("log")
            axes.set_title(f"{heading.format(task=task)}, {tokens} tokens")
            axes.set_xlabel("bytes on the device")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5)
    for ending in ("svg", "png"):
        _save(figure, folder / f"quality.{ending}")


def needle(folder: Path, cells: Sequence[Cell]) -> bool:
    """Where needles were found, depth against length, a panel for each cache: the first of a policy
    at one length is the first at another. Says whether any were sought."""
    from matplotlib.figure import Figure

    found = [cell for cell in cells if cell["task"] == "needle"]
    if not found:
        return False
    lengths = list(dict.fromkeys(cell["tokens"] for cell in found))
    panels: dict[str, dict[int, Cell]] = {}
    for tokens, some in _groups(found, "tokens"):
        for policy, rows in _groups(some, "policy"):
            for number, cell in enumerate(rows):
                name = f"{policy} {number + 1}" if len(rows) > 1 else policy
                panels.setdefault(name, {})[tokens] = cell
    depths = sorted({place["depth"] for cell in found for place in cell["by_place"]})
    figure = Figure(figsize=(2.2 * len(panels) + 1, 3.5), layout="constrained")
    grid = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axes, (name, by_length) in zip(grid, panels.items(), strict=True):
        shares = [[float("nan")] * len(lengths) for _ in depths]
        for tokens, cell in by_length.items():
            for place in cell["by_place"]:
                shares[depths.index(place["depth"])][lengths.index(tokens)] = place["score"]
        image = axes.imshow(shares, vmin=0, vmax=1, cmap="viridis", aspect="auto")
        axes.set_title(name)
        axes.set_xticks(range(len(lengths)), lengths)
        axes.set_yticks(range(len(depths)), [f"{depth:.2f}" for depth in depths])
        axes.set_xlabel("tokens")
    grid[0].set_ylabel("depth")
    figure.colorbar(image, ax=grid, label="share found")
    _save(figure, folder / "needle.svg")
    return True


def _save(figure: Any, path: Path) -> None:
    """The same bytes for the same figure."""
    import matplotlib

    fixed = {"metadata": {"Date": None}} if path.suffix == ".svg" else {"dpi": 120}
    with (
        console.replacing(path) as temporary,
        matplotlib.rc_context({"svg.hashsalt": NAME}),
    ):
        figure.savefig(temporary, **fixed)
