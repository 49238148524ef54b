"""What is compared: one model and one attention operator, run in different ways."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from pcg_ref.context import PackedBatch, forward_context
from pcg_ref.models.tiny import TinyDecoder
from pcg_ref.runner import PrefillRunner
from pcg_ref.tracing import with_own_code

MODELS = ("tiny", "qwen3-0.6b-shape", "smollm2")


def load_model(name: str, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """``"tiny"``, ``"qwen3-0.6b-shape"`` (Qwen3-0.6B's configuration with random weights, needs no download), ``"smollm2"``, or what
    transformers finds by ``name``. Raises as ``load_packed``."""
    if name == "tiny":
        return TinyDecoder(layers=4).to(device, dtype)
    if name != "qwen3-0.6b-shape":
        from pcg_ref.models.loading import load_packed

        return load_packed(name, dtype, device)[0]
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from pcg_ref.models.packed_causal_lm import PackedCausalLM

    config = Qwen3Config(
        vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    with device:
        return PackedCausalLM(Qwen3ForCausalLM(config).to(dtype))


@dataclass
class System:
    """One way to run the model.

    Attributes:
        name: As printed.
        run: A batch to ``[T, D]``, the caller's to keep.
        setup_s: Seconds before the first batch, by what for.
        pool_bytes: Memory reserved for graphs.
        executable_bytes: Device memory that setting up took beyond the allocator's: graph executables, loaded kernels.
        runner: The runner behind it, if any.
    """

    name: str
    run: Callable[[PackedBatch], torch.Tensor]
    setup_s: dict[str, float] = field(default_factory=dict)
    pool_bytes: int = 0
    executable_bytes: int = 0
    runner: PrefillRunner | None = None


def build(model: nn.Module, sizes: Sequence[int], names: Sequence[str] = ()) -> Iterator[System]:
    """Set up the systems one after the other, each whole before it is yielded; with ``names`` only those.

    Raises:
        ValueError: An unknown name.
    """
    makers: dict[str, Callable[[str], System]] = {
        "eager": lambda name: System(name, lambda batch: _eager(model, batch)),
        "torch.compile": lambda name: _compiled(name, model, sizes),
        "reduce-overhead": lambda name: _compiled(name, model, sizes, mode="reduce-overhead"),
        "full": lambda name: _captured(name, model, sizes, strategy="full"),
        "full inductor": lambda name: _captured(name, model, sizes, strategy="full", compiler="inductor"),
        "breakable": lambda name: _captured(name, model, sizes, strategy="breakable"),
        "piecewise": lambda name: _captured(name, model, sizes),
        "piecewise inductor": lambda name: _captured(name, model, sizes, compiler="inductor"),
    }
    if not next(model.parameters()).is_cuda:
        del makers["reduce-overhead"]  # torch's CUDA graphs; there is nothing like it on CPU
    unknown = set(names) - makers.keys()
    if unknown:
        raise ValueError(f"no system {sorted(unknown)} here; choose from {list(makers)}")
    for name, make in makers.items():
        if names and name not in names:
            continue
        gc.collect()
        before = _beyond_allocator(model)
        system = make(name)
        system.executable_bytes = max(0, _beyond_allocator(model) - before)
        yield system
        if system.runner is not None and "piecewise" in name:
            yield System(f"{name} stitched", lambda batch, runner=system.runner: _stitched(runner, batch))


@torch.no_grad()
def _eager(model: nn.Module, batch: PackedBatch) -> torch.Tensor:
    with forward_context(batch):
        return model(batch.tokens, batch.positions)


def _captured(name: str, model: nn.Module, sizes: Sequence[int], **choices) -> System:
    runner = PrefillRunner(model, buckets=sizes, **choices)
    report = runner.capture(progress=False)
    return System(name, runner.run, report["setup_s"], report["pool_bytes"], runner=runner)


def _stitched(runner: PrefillRunner, batch: PackedBatch) -> torch.Tensor:
    runner.replay = "stitched"  # the same graphs, found through guards, split module and dispatch
    try:
        return runner.run(batch)
    finally:
        runner.replay = "flat"


def _compiled(name: str, model: nn.Module, sizes: Sequence[int], **options) -> System:
    """``torch.compile`` as a user would write it, with one dynamic token dimension."""
    compiled = torch.compile(with_own_code(model), fullgraph=True, **options)

    @torch.no_grad()
    def run(batch: PackedBatch) -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        tokens, positions = batch.tokens, batch.positions
        for tensor in (tokens, positions):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        with forward_context(batch):
            return compiled(tokens, positions).clone()  # reduce-overhead returns graph memory, as replay does

    start = time.perf_counter()
    for size in (67, *sorted(sizes, reverse=True) * 3):  # a size that is no width first; three runs, until the graphs are recorded
        run(PackedBatch(torch.zeros(size, dtype=torch.int64, device=next(model.parameters()).device), [size]))
    return System(name, run, {"compile": time.perf_counter() - start})


def _beyond_allocator(model: nn.Module) -> int:
    if not next(model.parameters()).is_cuda:
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()
