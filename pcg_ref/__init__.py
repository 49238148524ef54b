"""Piecewise CUDA Graph, readable: trace, split, capture, replay.

The modules in reading order: breaks, ops, context, explain, tracing, effects, splitting, boundaries, compilers, arena, tape, pools,
graphs, segments, pieces, piecewise, state, watch, strategies, buckets, validation, report, runner; then attention and models, show for
the pictures, and hazards for what goes wrong in practice.
"""

from pcg_ref.attention import unified_attention_with_output
from pcg_ref.boundaries import Boundary, boundaries
from pcg_ref.breaks import eager_on_graph
from pcg_ref.buckets import bucket_for, default_buckets
from pcg_ref.compilers import EagerCompiler, InductorCompiler
from pcg_ref.context import ForwardContext, PackedBatch, current_context, forward_context
from pcg_ref.explain import RecompileError, TraceError
from pcg_ref.graphs import CapturedGraph, CudaGraph, TapeGraph, capture, gc_held_off
from pcg_ref.models.tiny import TinyDecoder
from pcg_ref.ops import register_custom_op, register_split_op, split_ops
from pcg_ref.pieces import ConcreteSizeEntry, PiecewiseBackend
from pcg_ref.piecewise import PiecewiseModel
from pcg_ref.pools import GraphPool, weak_ref
from pcg_ref.runner import PrefillRunner
from pcg_ref.segments import EagerSegment, GraphSegment, SegmentSequence
from pcg_ref.splitting import SplitItem, split_graph
from pcg_ref.tape import CaptureError
from pcg_ref.tracing import Trace, trace

__version__ = "0.1.0"
