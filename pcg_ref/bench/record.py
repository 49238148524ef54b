"""Keep a run with everything that it depended on, and show it as tables and as a plot."""

from __future__ import annotations

import datetime
import json
import platform
import shutil
import subprocess
from pathlib import Path

import torch

# Okabe-Ito colours; the marker differs as well, so that colour is never alone.
_STYLE = {
    "eager": ("#000000", "o"),
    "torch.compile": ("#E69F00", "v"),
    "reduce-overhead": ("#F0E442", "^"),
    "full": ("#CC79A7", "s"),
    "full inductor": ("#CC79A7", "D"),
    "breakable": ("#56B4E9", "<"),
    "piecewise": ("#009E73", ">"),
    "piecewise stitched": ("#009E73", "x"),
    "piecewise inductor": ("#0072B2", "P"),
    "piecewise inductor stitched": ("#0072B2", "X"),
}


def provenance(device: torch.device, dtype: torch.dtype, command: str) -> dict[str, str]:
    """Everything that the numbers depend on and that can be asked."""
    facts = {
        "date": datetime.date.today().isoformat(),
        "command": command,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()}), tape simulation",
        "dtype": str(dtype).removeprefix("torch."),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
    }
    if device.type == "cuda" and shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        facts["driver"] = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip().split("\n")[0]
    return facts


def tables(run: dict) -> str:
    """The run as text."""
    facts = run["provenance"]
    lines = [", ".join(f"{key} {value}" for key, value in facts.items() if key != "command"), ""]
    if "simulation" in facts["device"]:
        lines += ["On CPU graphs are simulated by a tape: these times say nothing about speed.", ""]
    lines.append(f"{'system':<28} {'trace s':>8} {'compile s':>9} {'capture s':>9} {'pool MiB':>9} {'exec MiB':>9} {'worst error':>12}")
    for name, system in run["systems"].items():
        setup = [f"{system['setup_s'][key]:.2f}" if key in system["setup_s"] else "-" for key in ("trace", "compile", "capture")]
        lines.append(
            f"{name:<28} {setup[0]:>8} {setup[1]:>9} {setup[2]:>9} {system['pool_bytes'] / 2**20:>9.1f} "
            f"{system['executable_bytes'] / 2**20:>9.1f} {system['worst_error']:>12.2g}"
        )
    lines += [
        "Set up in this order in one process: a later system finds the compiler's caches warmed by the earlier ones.",
        "",
        "total: until the device is done. host: until the call returns. busy: while at least one kernel or copy ran, by the profiler.",
    ]
    for size in run["sizes"]:
        lines += ["", f"T = {size:<6} {'total ms':>27} {'p10-p90':>16} {'host ms':>8} {'busy ms':>8} {'kernels':>8} {'segments':>9}"]
        for row in (row for row in run["results"] if row["T"] == size):
            total, host = row["total_ms"], row["host_ms"]
            busy, kernels = (f"{row['busy_ms']:.3f}", row["kernels"]) if "busy_ms" in row else ("-", "-")
            lines.append(
                f"{row['system']:<28} {total['median']:>9.3f} {total['p10']:>8.3f}-{total['p90']:<8.3f} {host['median']:>7.3f} "
                f"{busy:>8} {kernels:>8} {row.get('segments', '-'):>9}"
            )
    return "\n".join([*lines, "", *ratios(run)])


def ratios(run: dict) -> list[str]:
    """What the comparison is about, as ratios within the run, a line each."""
    rows = {(row["system"], row["T"]): row for row in run["results"]}
    pairs = [
        ("flat over stitched", "piecewise inductor", "piecewise inductor stitched"),
        ("flat over full", "piecewise inductor", "full inductor"),
        ("eager over flat", "eager", "piecewise inductor"),
        ("reduce-overhead over flat", "reduce-overhead", "piecewise inductor"),
    ]
    table = {
        f"{label}, inductor": [_ratio(rows.get((above, t)), rows.get((below, t))) for t in run["sizes"]] for label, above, below in pairs
    }
    for name in ("piecewise inductor", "full inductor", "piecewise", "breakable", "full"):
        table[f"{name}: total over its GPU-busy"] = [
            f"{rows[name, t]['total_ms']['median'] / rows[name, t]['busy_ms']:.2f}" if "busy_ms" in rows.get((name, t), {}) else "-"
            for t in run["sizes"]
        ]
    lines = [f"{'ratio of total ms':<44}" + "".join(f"{f'T={size}':>9}" for size in run["sizes"])]
    for label, values in table.items():
        if any(value != "-" for value in values):  # else one of the two systems did not run
            lines.append(f"{label:<44}" + "".join(f"{value:>9}" for value in values))
    lines = lines if len(lines) > 1 else []
    for t, cost in run["loop"].items():
        own = (cost["sequence_us"] - cost["graphs_us"] - cost["eager_us"]) / max(1, cost["eager_segments"])
        lines.append(
            f"host, T={t}: one flat replay {cost['sequence_us']:.0f} µs, its graph launches {cost['graphs_us']:.0f}, its attention "
            f"calls {cost['eager_us']:.0f}: {own:.2f} µs a layer of its own"
        )
    return lines


def _ratio(above: dict | None, below: dict | None) -> str:
    return f"{above['total_ms']['median'] / below['total_ms']['median']:.2f}" if above and below else "-"


def save(run: dict, folder: Path) -> list[Path]:
    """Write ``bench-<model>.json`` and ``bench-<model>.svg`` into ``folder`` and return their paths. Needs matplotlib."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    data, picture = folder / f"bench-{run['model']}.json", folder / f"bench-{run['model']}.svg"
    data.write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for name in run["systems"]:
        points = [(row["T"], row["total_ms"]["median"]) for row in run["results"] if row["system"] == name]
        color, marker = _STYLE.get(name, ("#999999", "."))
        style = "--" if name.endswith("stitched") else "-"
        axes.plot(*zip(*points), style, color=color, marker=marker, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(run["sizes"], [str(size) for size in run["sizes"]])
    axes.set_xlabel("tokens in the batch")
    axes.set_ylabel("ms for one prefill, median")
    facts = run["provenance"]
    axes.set_title(f"{run['model']}, {facts['dtype']}, {facts['device']}, torch {facts['torch']}, {facts['date']}", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    plt.rcParams["svg.hashsalt"] = run["model"]  # the same numbers give the same file
    figure.savefig(picture, metadata={"Date": None})
    plt.close(figure)
    return [data, picture]


def summary(run: dict) -> str:
    """A Markdown table of median milliseconds, for the README."""
    header = "| system | " + " | ".join(f"T = {size}" for size in run["sizes"]) + " |"
    lines = [header, "|---|" + "---|" * len(run["sizes"])]
    for name in run["systems"]:
        cells = [f"{row['total_ms']['median']:.2f}" for row in run["results"] if row["system"] == name]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
