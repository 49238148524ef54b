"""What a runner has captured and run: a dictionary underneath, a table when printed."""

from __future__ import annotations


class RunnerReport(dict):
    """Keys: ``strategy``, ``compiler``, ``replay``, ``device``, ``pool_bytes``, ``setup_s``, ``buckets`` and ``eager``.

    ``setup_s`` holds the seconds spent to trace, compile and capture, as far as the strategy does so.

    ``buckets`` holds for each captured size ``graphs``, ``eager_segments``, ``replays``, ``capture_ms``, ``pool_bytes`` (what capturing
    it added) and ``bridge_bytes``. ``eager`` holds for each reason how many batches ran eagerly for it.
    """

    def __init__(self, runner) -> None:
        super().__init__(
            strategy=runner.strategy,
            compiler=runner.compiler,
            replay=runner.replay,
            device=str(runner.device),
            pool_bytes=runner.pool.bytes,
            setup_s={**(runner.implementation.setup_s if runner.implementation else {}), "capture": sum(runner._capture_ms.values()) / 1e3},
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
            eager=dict(runner._eager),
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
        for reason, count in self["eager"].items():
            lines.append(f"{count} batch{'es' if count > 1 else ''} ran eagerly: {reason}")
        return "\n".join(lines)
