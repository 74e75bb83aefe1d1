"""The picture of `benchmarks/throughput.py`: rates, and KV memory and running sequences over time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from serving import Trace

from jpaged.viz import canvas


def draw(result: dict[str, Any], traces: dict[str, Trace], path: Path) -> None:
    """Draws output tokens/s by engine, and memory over time for each of ours; PNG or SVG by the ending.

    Raises:
      ImportError: matplotlib is not installed.
    """
    _, figure = canvas(width=6 * (2 + len(traces)) / 1.5, height=4)
    figure.set_layout_engine("constrained")
    rates, running, *memories = figure.subplots(1, 2 + len(traces))
    rows = result["engines"][::-1]
    bars = rates.barh([row["name"] for row in rows], [row["output_tokens_per_s"] for row in rows])
    rates.bar_label(bars, fmt="%.4g", fontsize="small")
    rates.margins(x=0.15)
    rates.set(xlabel="output tokens/s", title=f"{result['workload']}, {result['requests']} requests")
    for (name, trace), axes in zip(traces.items(), memories, strict=True):
        times = [sample.time for sample in trace.samples]
        running.step(times, [sample.running for sample in trace.samples], where="post", label=name)
        used = [sample.used for sample in trace.samples]
        reserved = [sample.reserved for sample in trace.samples]
        axes.fill_between(times, used, step="post", color="#2060a0", label="used")
        axes.fill_between(times, used, reserved, step="post", color="#e0a0a0", label="reserved, wasted")
        waste = next(row["kv_waste"] for row in result["engines"] if row["name"] == name)
        axes.set(xlabel="seconds", ylabel="KV slots", title=f"{name}: {waste:.1%} wasted")
        axes.legend(fontsize="small")
    running.set(xlabel="seconds", ylabel="running sequences", title="Running sequences")
    if traces:
        running.legend(fontsize="small")
    top = max((axes.get_ylim()[1] for axes in memories), default=1.0)
    right = max((axes.get_xlim()[1] for axes in memories), default=1.0)
    for axes in memories:
        axes.set(xlim=(0, right), ylim=(0, top))
    figure.savefig(path)
