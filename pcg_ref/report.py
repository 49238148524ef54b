"""What a runner has captured and run: a dictionary underneath, a table when printed."""

from __future__ import annotations


class RunnerReport(dict):
    """Keys: ``strategy``, ``compiler``, ``replay``, ``debug``, ``device``, ``pool_bytes``, ``setup_s``, ``compile_count``, ``policies``,
    ``buckets``, ``bridged``, ``eager`` and ``refused``.

    ``setup_s`` holds the seconds spent to trace, compile and capture, as far as the strategy does so; ``compile_count`` how often the
    compiler's backend was called, once unless something is wrong, or ``None`` without a trace.

    ``policies`` holds what was chosen for fresh outputs, recompiles and batches that no bucket fits. What followed from each choice, with
    its reason: ``bridged`` holds for each function that returns fresh memory its name and the bytes that are copied for it at the largest
    bucket, ``eager`` for each reason how many batches ran eagerly for it, ``refused`` for each reason how many were an error.

    ``buckets`` holds for each captured size ``graphs``, ``eager_segments``, ``replays``, ``capture_ms``, ``pool_bytes`` (what capturing
    it added) and ``bridge_bytes``.
    """

    def __init__(self, runner) -> None:
        super().__init__(
            strategy=runner.strategy,
            compiler=runner.compiler,
            replay="stitched" if runner.debug and runner.strategy == "tc_piecewise" else runner.replay,
            debug=runner.debug,
            device=str(runner.device),
            pool_bytes=runner.pool.bytes,
            setup_s={**(runner.implementation.setup_s if runner.implementation else {}), "capture": sum(runner._capture_ms.values()) / 1e3},
            compile_count=runner.compile_count,
            policies={name: getattr(runner, name) for name in ("on_fresh_output", "on_recompile", "on_oversize", "max_padding_factor")},
            buckets={
                bucket: {
                    "graphs": sequence.num_graphs,
                    "eager_segments": sequence.num_eager,
                    "replays": runner._replays[bucket],
                    "capture_ms": runner._capture_ms[bucket],
                    "pool_bytes": runner._pool_bytes[bucket],
                    "bridge_bytes": sequence.bridged_bytes(),
                }
                for bucket, sequence in sorted(runner.sequences.items())
            },
            bridged=runner.sequences[max(runner.sequences)].bridged() if runner.sequences else {},
            eager=dict(runner._eager),
            refused=dict(runner._refused),
        )

    def __str__(self) -> str:
        simulated = " (tape simulation)" if self["device"] == "cpu" else ""
        lines = [
            f"strategy {self['strategy']}, compiler {self['compiler']}, {self['replay']} replay on {self['device']}{simulated}; "
            f"pool {self['pool_bytes'] / 2**20:.1f} MiB; " + ", ".join(f"{what} {s:.2f} s" for what, s in self["setup_s"].items()),
            f"{'bucket':>8} {'graphs':>7} {'eager':>6} {'replays':>8} {'capture ms':>11} {'pool KiB':>9} {'bridge KiB':>11}",
        ]
        for bucket, row in self["buckets"].items():
            lines.append(
                f"{bucket:>8} {row['graphs']:>7} {row['eager_segments']:>6} {row['replays']:>8} {row['capture_ms']:>11.1f} "
                f"{row['pool_bytes'] / 1024:>9.0f} {row['bridge_bytes'] / 1024:>11.0f}"
            )
        for name, size in self["bridged"].items():
            lines.append(f"{name} returns fresh memory: {size} bytes are copied at every replay of the largest bucket")
        for what, reasons in (("ran eagerly", self["eager"]), ("refused", self["refused"])):
            lines += [f"{count} batch{'es' if count > 1 else ''} {what}: {reason}" for reason, count in reasons.items()]
        if not any(row["replays"] for row in self["buckets"].values()) and self["eager"]:
            lines.append("nothing was replayed")
        return "\n".join(lines)
