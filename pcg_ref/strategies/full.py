"""``full``: nobody looks for boundaries. One graph per bucket, attention inside.

Possible only if what attention reads is on the device at fixed addresses: request boundaries in a static buffer with a fixed number
of slots. Mirrors SGLang's ``FullCudaGraphBackend`` and vLLM's ``CUDAGraphMode.FULL``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from itertools import accumulate

import torch

from pcg_ref.context import PackedBatch, forward_context
from pcg_ref.explain import RecompileError
from pcg_ref.graphs import capture, gc_held_off
from pcg_ref.piecewise import PiecewiseModel
from pcg_ref.pools import GraphPool, weak_ref
from pcg_ref.segments import GraphSegment, SegmentSequence
from pcg_ref.state import Reads, preserved
from pcg_ref.strategies.tc_piecewise import general_run, trace_with_example


class FullStrategy:
    """One graph per bucket.

    Args:
        model: Called as ``model(tokens[T], positions[T])``. Its operators may read device tensors alone: asking the context for
            lengths or counts on the host is an error during capture.
        pool: Memory for the graphs.
        buckets: Every size that will be captured.
        compiler: ``"eager"`` captures the model as it is, untraced; ``"inductor"`` traces and compiles it whole first.
        max_requests: Request slots; a batch with more runs eagerly.
    """

    def __init__(
        self, model: Callable, pool: GraphPool, buckets: Sequence[int], compiler: str = "eager", max_requests: int = 16
    ) -> None:
        self.model, self.pool, self.max_requests = model, pool, max_requests
        # The boundaries of max_requests requests and of the padding.
        self.cu_seqlens = torch.zeros(max_requests + 2, dtype=torch.int32, device=pool.device)
        # A compiler needs the FX graph; uncut, it is one piece, and lives as any piece does.
        self.piecewise = None
        self._reads = Reads()
        self.setup_s: dict[str, float] = {}
        if compiler != "eager":
            start = time.perf_counter()
            traced = trace_with_example(model, pool.device)
            traced_at = time.perf_counter()
            self.piecewise = PiecewiseModel(traced, (), compiler, buckets, pool=pool, allow_none=True)
            general_run(self.piecewise, self.context, lambda tokens: PackedBatch(tokens, [len(tokens)]))
            self.setup_s = {"trace": traced_at - start, "compile": time.perf_counter() - traced_at}

    def capture(self, bucket: int, tokens: torch.Tensor, positions: torch.Tensor) -> SegmentSequence:
        """Capture one bucket; see ``Strategy.capture``."""
        with self.context(PackedBatch(torch.zeros_like(tokens), [bucket]), bucket), gc_held_off(), torch.no_grad():
            if self.piecewise is not None:
                with preserved(self.piecewise.written):
                    return self.piecewise.capture(tokens, positions)
            with self.pool.on_stream(), self._reads:
                self.model(tokens, positions)  # warm-up
            graph = capture(self.model, tokens, positions, pool=self.pool)
        output, graph.output = weak_ref(graph.output, self.pool), None
        return SegmentSequence([GraphSegment("model", graph)], output, keeps=(tokens, positions, self.cu_seqlens, self.model))

    def refuses(self, batch: PackedBatch) -> str | None:
        """See ``Strategy.refuses``."""
        return f"more than {self.max_requests} requests" if batch.num_requests > self.max_requests else None

    def reads(self, tensor: torch.Tensor) -> bool:
        """See ``Strategy.reads``."""
        return self.piecewise.trace.reads(tensor) if self.piecewise is not None else tensor in self._reads

    def guarded_names(self) -> frozenset[str] | None:
        """See ``Strategy.guarded_names``; without a trace, any."""
        return self.piecewise.trace.guarded_names() if self.piecewise is not None else None

    def check_guards(self, change: str, tokens: torch.Tensor, positions: torch.Tensor) -> None:
        """See ``Strategy.check_guards``."""
        if self.piecewise is None:
            raise RecompileError(change)
        self.piecewise.trace.check_guards(tokens, positions)

    @contextmanager
    def context(self, batch: PackedBatch, bucket: int):
        """Fill the static boundaries: the requests, the padding as one more, then zero-length sentinels at the end of the bucket."""
        ends = [*accumulate(batch.lengths, initial=0)]
        ends += [bucket] * (len(self.cu_seqlens) - len(ends))
        self.cu_seqlens.copy_(torch.tensor(ends, dtype=torch.int32), non_blocking=True)
        with forward_context(batch, bucket, static_cu_seqlens=self.cu_seqlens) as context:
            yield context
