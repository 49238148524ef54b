"""Serving one batch at a time: static buffers, capture of every bucket, dispatch, fallback, statistics.

Letters: ``T`` tokens of a batch, ``D`` width.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

import torch

from pcg_ref.buckets import bucket_for, default_buckets
from pcg_ref.context import PackedBatch, forward_context
from pcg_ref.explain import RecompileError
from pcg_ref.graphs import gc_held_off
from pcg_ref.pools import GraphPool
from pcg_ref.report import RunnerReport
from pcg_ref.segments import SegmentSequence
from pcg_ref.state import Writes, device_of, preserved_state
from pcg_ref.strategies.breakable import BreakableStrategy
from pcg_ref.strategies.full import FullStrategy
from pcg_ref.strategies.tc_piecewise import TcPiecewiseStrategy
from pcg_ref.tracing import no_autocast_cache
from pcg_ref.validation import require_hidden, validate_batch, validate_choices, validated_buckets
from pcg_ref.watch import AttributeWatch, ParameterWatch

# subtle: tensors made in inference mode can be written nowhere else and fail guards everywhere else, so that a runner made there would
# be unusable outside. Nothing is made in it, whatever the caller does.
_outside_inference_mode = torch.inference_mode(False)


class PrefillRunner:
    """Runs packed prefill batches through captured graphs, and eagerly where no graph fits.

    Args:
        model: Called as ``model(tokens[T], positions[T]) -> hidden[T, D]``, both int64, under ``forward_context(batch)``. If it has
            ``vocab_size`` (or ``max_request_length``), batches are checked against it.
        strategy: ``"tc_piecewise"``, ``"breakable"``, ``"full"`` or ``"eager"``.
        buckets: Sizes to capture, each at least 2; ``default_buckets(1024)`` by default.
        compiler: What runs inside the graphs, ``"eager"`` or ``"inductor"``.
        replay: For ``tc_piecewise``: ``"flat"`` runs the recorded sequence; ``"stitched"`` calls the traced model, guards included.
        device: Where to run; by default where the model's parameters are, or else its other tensors.
        max_padding_factor: A batch whose bucket has more than this many rows for each token runs eagerly.
        copy_output: Return a copy. Without it ``run`` returns graph memory, valid until the next ``run``.
        on_fresh_output: ``"bridge"`` or ``"error"``, for a split operator that returns fresh tensors.
        on_recompile: When what the graphs froze has changed: ``"error"`` raises ``RecompileError``, ``"eager"`` runs that batch eagerly
            and reports it.
        on_oversize: For a batch that no bucket fits: ``"eager"``, or ``"error"`` for a ``ValueError``.
        max_requests: For ``full``: request slots in the graph; a batch with more runs eagerly.
        debug: Before every replay compare the addresses of all parameters and buffers, and fill graph memory with NaN, so that a read of
            what was not written anew shows. ``tc_piecewise`` is then replayed stitched, guards included, and the addresses of every tensor
            input of every piece and of what every eager segment writes are compared. Slow.

    Raises:
        ValueError: An unknown choice, or buckets that cannot be captured.

    Attributes:
        sequences: The ``SegmentSequence`` of each captured bucket.
        buckets: The sizes, ascending.
        implementation: The strategy at work, ``None`` before ``capture`` and for ``"eager"``. Of ``"tc_piecewise"`` its ``piecewise`` is
            the ``PiecewiseModel``.
    """

    @_outside_inference_mode
    def __init__(
        self,
        model: Callable,
        strategy: str = "tc_piecewise",
        buckets: Sequence[int] | None = None,
        compiler: str = "eager",
        replay: str = "flat",
        device: torch.device | str | None = None,
        max_padding_factor: float = 2.0,
        copy_output: bool = True,
        on_fresh_output: str = "bridge",
        on_recompile: str = "error",
        on_oversize: str = "eager",
        max_requests: int = 16,
        debug: bool = False,
    ) -> None:
        validate_choices(strategy, compiler, replay, on_fresh_output, on_recompile, on_oversize, max_padding_factor, max_requests)
        self.buckets = validated_buckets(default_buckets(1024) if buckets is None else buckets)
        self.model, self.strategy, self.compiler, self.replay = model, strategy, compiler, replay
        self.max_padding_factor, self.copy_output, self.max_requests = max_padding_factor, copy_output, max_requests
        self.on_fresh_output, self.on_recompile, self.on_oversize = on_fresh_output, on_recompile, on_oversize
        self.debug = debug
        self.device = torch.empty(0, device=device or device_of(model)).device  # with its index
        # Static inputs: every bucket's graphs read the head of these.
        self._tokens = torch.zeros(self.buckets[-1], dtype=torch.int64, device=self.device)
        self._positions = torch.zeros(self.buckets[-1], dtype=torch.int64, device=self.device)
        self.pool = GraphPool(self.device)
        self.sequences: dict[int, SegmentSequence] = {}
        self._ascending: list[int] = []  # the captured sizes
        self.implementation = None
        self._watch, self._attributes = ParameterWatch(model), AttributeWatch(model)
        self._stateful = False  # whether the forward writes to tensors of the model
        self._autocast = _autocast(self.device)
        self._at_work = threading.Lock()
        self._replays: Counter[int] = Counter()
        self._eager: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._capture_ms: dict[int, float] = {}
        self._pool_bytes: dict[int, int] = {}

    @_outside_inference_mode
    def capture(self, progress: bool = True) -> RunnerReport:
        """Capture every bucket, the largest first, so that the smaller ones fit into its memory.

        Args:
            progress: Show a progress bar, if ``tqdm`` is installed.

        Returns:
            The report.

        Raises:
            Exception: Whatever tracing, compilation or capture raises. Buckets captured before it keep working, the others run
                eagerly; calling ``capture`` again goes on where it stopped.
            RuntimeError: The forward writes to a parameter, or replaces a tensor that it reads. Nothing is kept.

        Side effects: runs the model on zeros. Tensors of its state (see ``preserved_state``) and the default random generators are
            restored afterwards, Python attributes that its forward sets are not.
        """
        if self.strategy == "eager":
            return self.report()
        writes, failed = Writes(), True
        try:
            generators = torch.random.fork_rng([self.device] if self.device.type == "cuda" else [])
            with preserved_state(self.model, writes), generators, no_autocast_cache(), gc_held_off(), torch.no_grad():
                self._capture_remaining(progress)
            failed = False
        finally:
            self._stateful = self._stateful or bool(writes.state)
            if reason := self._unfit(writes):
                self.sequences, self._ascending, self.implementation = {}, [], None
            if reason or failed:
                writes.undo_replacing()
        if reason:
            raise RuntimeError(f"the forward {reason}")
        return self.report()

    def _unfit(self, writes: Writes) -> str | None:
        """Why what was captured must not be replayed."""
        if writes.parameters:
            return (
                f"writes to the parameters {writes.parameters}, which warm-up has already done and replay would repeat; make them buffers, "
                f"whose values are restored"
            )
        read = [name for name, tensor in writes.replaced.items() if self.implementation and self.implementation.reads(tensor)]
        if read:
            return (
                f"puts a new tensor in place of {read}, and reads it at the next call; replay runs no Python, and would read the first one "
                f"for ever. Write into it (copy_, add_)"
            )
        return None

    def _capture_remaining(self, progress: bool) -> None:
        if self.implementation is None:
            self.implementation = self._make_strategy()
        if self.sequences:
            self._check_model(self._ascending[0])  # an earlier call captured some: all buckets must freeze the same
        else:
            self._watch.remember()
            self._autocast = _autocast(self.device)
        self._attributes.remember(self.implementation.guarded_names())
        for bucket in _bar([b for b in reversed(self.buckets) if b not in self.sequences], progress):
            start, before = time.perf_counter(), self.pool.bytes
            sequence = self.implementation.capture(bucket, self._tokens[:bucket], self._positions[:bucket])
            self._attributes.settle()
            self._watch.check()  # a forward that replaces a buffer, self.count = self.count + 1, would do so at no replay
            require_hidden(sequence.output, bucket)
            self.sequences[bucket] = sequence
            self._ascending = sorted(self.sequences)
            self._capture_ms[bucket] = (time.perf_counter() - start) * 1e3
            self._pool_bytes[bucket] = self.pool.bytes - before

    def _make_strategy(self):
        if self.strategy == "full":
            return FullStrategy(self.model, self.pool, self.buckets, self.compiler, self.max_requests)
        if self.strategy == "breakable":
            return BreakableStrategy(self.model, self.pool, self.on_fresh_output)
        return TcPiecewiseStrategy(self.model, self.pool, self.buckets, self.compiler, self.on_fresh_output, self.debug)

    def run(self, batch: PackedBatch) -> torch.Tensor:
        """One forward of the batch.

        Flat replay runs none of the model's Python and checks none of its guards: hooks, globals and numbers inside what an attribute
        refers to are those of capture. What ``ParameterWatch`` and ``AttributeWatch`` look at, and autocast, is noticed when it has
        changed. A runner is for one thread at a time.

        Returns:
            ``[T, D]``, the real rows. The caller's to keep; with ``copy_output=False`` it is graph memory, valid until the next call.

        Raises:
            ValueError: The batch is on another device, has ids outside the vocabulary, a prefix (there is no KV cache), a request
                longer than the model allows, or no bucket fits it and ``on_oversize="error"``. Nothing was written.
            RuntimeError: A parameter or buffer has moved since capture; the message names it. No state was written, and what the stale
                weights gave is dropped. Or the runner is at work already, in another thread or in an eager segment of its own.
            RecompileError: An attribute that the graphs depend on has changed, or stitched replay met a failed guard, and
                ``on_recompile="error"``.
        """
        validate_batch(batch, self.device, self.model)
        bucket, reason = self._choose_bucket(batch)
        if bucket is None:
            return self._run_eagerly(batch, reason)
        # The checks come when the device has its work: looking at every weight takes the host as long as a few layers. Nothing but graph
        # memory was written then, and the watch keeps the captured weights alive, so that stale ones are old numbers and no illegal
        # access. A model that keeps state is looked at before it is written.
        check_first = self._stateful or self.debug
        if not self._at_work.acquire(blocking=False):
            raise RuntimeError("this runner is at work already, in another thread or in an eager segment of its own; make one for each")
        try:
            if check_first:
                self._check_model(bucket)
            hidden = self._replay(batch, bucket)
            rows = hidden[: batch.num_tokens]
            # subtle: the rows are weak references into graph memory, and the next replay of any bucket overwrites them.
            rows = rows.clone() if self.copy_output else rows
            if not check_first:
                self._check_model(bucket)
        except RecompileError as error:
            if self.on_recompile == "error":
                self._refused[f"recompile: {error.guard}"] += 1
                raise
            return self._run_eagerly(batch, f"recompile: {error.guard}")
        finally:
            self._at_work.release()
        self._replays[bucket] += 1
        return rows

    def _check_model(self, bucket: int) -> None:
        self._watch.check()
        self._attributes.check()
        if (autocast := _autocast(self.device)) != self._autocast:
            raise RecompileError(f"torch.autocast was {self._autocast} at capture and is {autocast}")
        if change := self._attributes.change():
            self.implementation.check_guards(change, self._tokens[:bucket], self._positions[:bucket])
            self._attributes.accept()

    def _choose_bucket(self, batch: PackedBatch) -> tuple[int | None, str | None]:
        if self.strategy == "eager":
            return None, "strategy 'eager'"
        bucket, reason = bucket_for(batch.num_tokens, self._ascending, self.max_padding_factor)
        if bucket is None and self.on_oversize == "error":
            self._refused[reason] += 1
            raise ValueError(f"no bucket for {batch.num_tokens} tokens: {reason}; captured are {self._ascending}")
        if bucket is not None and (refusal := self.implementation.refuses(batch)):
            return None, refusal
        return bucket, reason

    def _replay(self, batch: PackedBatch, bucket: int) -> torch.Tensor:
        self._fill(batch, bucket)
        with self.implementation.context(batch, bucket):
            if self.strategy == "tc_piecewise" and (self.replay == "stitched" or self.debug):
                return self.implementation.piecewise(self._tokens[:bucket], self._positions[:bucket])
            if self.debug:
                self.pool.poison()
            return self.sequences[bucket].replay()

    def _run_eagerly(self, batch: PackedBatch, reason: str) -> torch.Tensor:
        with forward_context(batch), torch.no_grad():
            hidden = self.model(batch.tokens, batch.positions)
        self._eager[reason] += 1
        return hidden.clone() if self.copy_output else hidden  # a model may return memory of its own

    def _fill(self, batch: PackedBatch, bucket: int) -> None:
        """Copy the batch into the static inputs; padded rows are token 0 at position 0."""
        n = batch.num_tokens
        for static, values in ((self._tokens, batch.tokens), (self._positions, batch.positions)):
            static[:n].copy_(values, non_blocking=True)
            if n < bucket:
                static[n:bucket].zero_()

    @property
    def compile_count(self) -> int | None:
        """Calls of the compiler's backend; ``None`` without a trace."""
        piecewise = getattr(self.implementation, "piecewise", None)
        return piecewise.trace.compile_count if piecewise is not None else None

    def report(self) -> RunnerReport:
        """What was captured and what ran, so far."""
        return RunnerReport(self)


def _autocast(device: torch.device) -> torch.dtype | None:
    """The dtype that operators run in by ``torch.autocast``, ``None`` when it is off."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def _bar(items: Sequence[int], progress: bool):
    if not progress:  # and no import either: in a notebook without widgets tqdm.auto warns
        return items
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return items
    return tqdm(items, desc="capture", unit="bucket")
