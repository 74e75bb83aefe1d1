"""Pictures of KV memory: who owns each block at each step, and the tree of cached prefixes.

Draws what `Engine.snapshot` returns, as PNG or SVG by the file's ending. Needs matplotlib:
pip install "jpaged[viz]".
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

Snapshot = dict[str, Any]

_FREE, _CACHED, _SHARED = 0, 1, 2  # colours before those of the requests
_COLOURS = ("#ffffff", "#d0d0d0", "#404040")


def draw_blocks(snapshots: Sequence[Snapshot], path: str | os.PathLike[str]) -> None:
    """Draws blocks (rows) over steps (columns): free, cached, shared, or of one request's colour.

    Raises:
      ValueError: there are no snapshots.
      ImportError: matplotlib is not installed.
    """
    if not snapshots:
        raise ValueError("snapshots is empty; at least 1 is needed")
    matplotlib, figure = canvas(width=max(6.0, 0.12 * len(snapshots)), height=6.0)
    colours: dict[str, int] = {}
    grid = [[_colour(owners, colours) for owners in snapshot["blocks"]] for snapshot in snapshots]
    palette = [*_COLOURS, *(_request_colour(matplotlib, i, len(colours)) for i in range(len(colours)))]
    axes = figure.add_subplot()
    columns = [list(column) for column in zip(*grid, strict=True)]
    axes.imshow(
        columns,
        aspect="auto",
        interpolation="nearest",
        cmap=matplotlib.colors.ListedColormap(palette),
        vmin=-0.5,
        vmax=len(palette) - 0.5,
        extent=(snapshots[0]["step"] - 0.5, snapshots[-1]["step"] + 0.5, len(columns) + 0.5, 0.5),
    )
    axes.set(xlabel="step", ylabel="block", title="KV blocks by owner")
    names = ["free", "cached, unused", "shared", *colours]
    shown = list(zip(palette, names, strict=True))[:12]
    handles = [matplotlib.patches.Patch(facecolor=c, edgecolor="#888888", label=n) for c, n in shown]
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.01, 1), fontsize="small")
    figure.savefig(path, bbox_inches="tight")


def draw_tree(snapshot: Snapshot, path: str | os.PathLike[str]) -> None:
    """Draws the tree of cached prefixes: a bar per node, as long as its tokens, children below.

    Raises:
      ImportError: matplotlib is not installed.
    """
    _, figure = canvas(width=8.0, height=6.0)
    axes = figure.add_subplot()
    line = 0
    for root in snapshot["tree"]:
        for node in root["children"]:
            line = _draw_node(axes, node, line)
    axes.set(xlabel="token", title="Cached prefixes (dark: in use)", yticks=[])
    axes.set_ylim(max(line, 1) + 0.5, -0.5)
    figure.savefig(path, bbox_inches="tight")


def _draw_node(axes: Any, node: dict[str, Any], line: int) -> int:
    """Draws a node, and its children from the next line on; returns the next free line."""
    start, length = node["start"], len(node["token_ids"])
    colour = "#2060a0" if any(node["references"]) else "#a0c0e0"
    axes.barh(line, length, left=start, height=0.7, color=colour, edgecolor="k")
    axes.text(start + length / 2, line, str(length), ha="center", va="center", fontsize="x-small")
    own, line = line, line + 1
    for child in node["children"]:
        axes.plot([child["start"]] * 2, [own, line], color="k", linewidth=0.8)
        line = _draw_node(axes, child, line)
    return line


def _colour(owners: list[str] | None, colours: dict[str, int]) -> int:
    if owners is None:
        return _FREE
    if not owners:
        return _CACHED
    if len(set(owners)) > 1:
        return _SHARED
    return colours.setdefault(owners[0], len(_COLOURS) + len(colours))


def _request_colour(matplotlib: Any, index: int, count: int) -> Any:
    return matplotlib.colormaps["turbo"](0.05 + 0.9 * index / max(1, count - 1))


def canvas(*, width: float, height: float) -> tuple[Any, Any]:
    """matplotlib and an empty figure of so many inches.

    Raises:
      ImportError: matplotlib is not installed.
    """
    try:
        import matplotlib
        import matplotlib.colors
        import matplotlib.patches
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('drawing needs matplotlib: pip install "jpaged[viz]"') from error
    return matplotlib, Figure(figsize=(width, height), dpi=120)
