"""``tc_piecewise``: the compiler finds the boundaries. Trace, split, capture each piece, lay the pieces flat.

Mirrors SGLang's TC piecewise backend (``runner_backend/tc_piecewise_cuda_graph_backend.py``) and vLLM's ``PiecewiseBackend``; the flat
replay is ours.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch

from pcg_ref.context import PackedBatch, forward_context
from pcg_ref.graphs import gc_held_off
from pcg_ref.piecewise import PiecewiseModel
from pcg_ref.pools import GraphPool
from pcg_ref.segments import SegmentSequence
from pcg_ref.state import preserved
from pcg_ref.strategies import stand_in
from pcg_ref.tracing import Trace, trace

# subtle: a prime that is no model's width or head dimension. A compiler that sees equal sizes may take them for the same size.
_EXAMPLE_TOKENS = 67


def trace_with_example(model: Callable, device: torch.device) -> Trace:
    """Trace ``model(tokens, positions)`` on zeros of an odd size, as no bucket's size is typical. Raises ``TraceError``."""
    # Tensors of their own: a slice of a static buffer cannot be marked dynamic.
    return trace(model, *(torch.zeros(_EXAMPLE_TOKENS, dtype=torch.int64, device=device) for _ in range(2)))


def general_run(piecewise: PiecewiseModel, context: Callable, stand_in: Callable) -> None:
    """The first run of every piece, at the example's size: here inductor generates its code, for a size that is no width either.

    What the trace writes to is restored, wherever the model keeps it.
    """
    tokens, positions = (torch.zeros(_EXAMPLE_TOKENS, dtype=torch.int64, device=piecewise.pool.device) for _ in range(2))
    with context(stand_in(tokens), _EXAMPLE_TOKENS), preserved(piecewise.written):
        piecewise(tokens, positions)


class TcPiecewiseStrategy:
    """Graphs between the split operators of one FX graph.

    Args:
        model: Called as ``model(tokens[T], positions[T])``.
        pool: Memory for the graphs.
        buckets: Every size that will be captured.
        compiler: What runs inside a piece, ``"eager"`` or ``"inductor"``.
        on_fresh_output: ``"bridge"`` or ``"error"``, see ``PiecewiseModel``.
        debug: See ``PiecewiseModel``.

    Raises:
        TraceError: The model cannot be traced as one graph.
        ValueError: As for ``PiecewiseModel``.

    Side effects: traces the model and runs it once, on zeros.

    Attributes:
        piecewise: The ``PiecewiseModel``; calling it with the static inputs is the stitched replay.
        setup_s: See ``Strategy.setup_s``.
    """

    def __init__(
        self,
        model: Callable,
        pool: GraphPool,
        buckets: Sequence[int],
        compiler: str = "eager",
        on_fresh_output: str = "bridge",
        debug: bool = False,
    ) -> None:
        self.model = model
        start = time.perf_counter()
        traced = trace_with_example(model, pool.device)
        traced_at = time.perf_counter()
        self.piecewise = PiecewiseModel(
            traced,
            compiler=compiler,
            capture_sizes=buckets,
            on_fresh_output=on_fresh_output,
            pool=pool,
            debug=debug,
        )
        general_run(self.piecewise, self.context, partial(stand_in, model))
        self.setup_s = {"trace": traced_at - start, "compile": time.perf_counter() - traced_at}

    def capture(self, bucket: int, tokens: torch.Tensor, positions: torch.Tensor) -> SegmentSequence:
        """Capture one bucket; see ``Strategy.capture``."""
        with self.context(stand_in(self.model, tokens), bucket), gc_held_off(), preserved(self.piecewise.written):
            return self.piecewise.capture(tokens, positions)

    def refuses(self, batch: PackedBatch) -> str | None:
        """Nothing: eager segments read whatever the batch is."""
        return None

    def reads(self, tensor: torch.Tensor) -> bool:
        """See ``Strategy.reads``."""
        return self.piecewise.trace.reads(tensor)

    def guarded_names(self) -> frozenset[str] | None:
        """See ``Strategy.guarded_names``."""
        return self.piecewise.trace.guarded_names()

    def check_guards(self, change: str, tokens: torch.Tensor, positions: torch.Tensor) -> None:
        """See ``Strategy.check_guards``; Dynamo's guards know."""
        self.piecewise.trace.check_guards(tokens, positions)

    def context(self, batch: PackedBatch, bucket: int) -> AbstractContextManager:
        """See ``Strategy.context``."""
        return forward_context(batch, bucket)
