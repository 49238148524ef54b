"""Memory that captured regions share, and references to it that do not keep it.

A pool belongs to regions that are never replayed at the same time, the buckets of one model: what one has written, the next may
overwrite. This module captures nothing.
"""

from __future__ import annotations

import threading
import warnings
from contextlib import contextmanager

import torch
from torch.utils._pytree import tree_map_only

from pcg_ref.arena import Arena, alias_of_host_memory, with_lazy_bits
from pcg_ref.tape import CaptureError

# subtle: two threads must not capture on CUDA at the same time, each on its stream though they are: the default random generator belongs
# to one capture, and a CUDAGraph that it has turned away takes the process down when it is destroyed.
capture_lock = threading.RLock()


class GraphPool:
    """Memory shared by captured regions that are never replayed at the same time.

    Args:
        device: Where the regions run.

    Attributes:
        device: The device.
        stream: The side stream of every capture on CUDA, ``None`` on CPU.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        if self.device.type == "cuda":
            self.device = torch.device("cuda", self.device.index if self.device.index is not None else torch.cuda.current_device())
            self.stream = torch.cuda.Stream(self.device)
            self._handles: list[tuple[int, int]] = []
            self._anchors: list[torch.cuda.CUDAGraph] = []
            self.renew()
            self._segments: list[tuple[int, int]] = []  # (start, end) addresses, as far as known
            self._foreign: set[int] = set()  # addresses seen that are not the pool's
        elif self.device.type == "cpu":
            self.stream = None
            self.arena = Arena()
        else:
            raise ValueError(f"no capture on device {str(device)!r}: use 'cuda', or 'cpu' for the simulation")

    @property
    def bytes(self) -> int:
        """Device memory reserved by the pool, in bytes."""
        if self.stream is None:
            return self.arena.bytes
        return sum(end - start for start, end in self._device_segments())

    @property
    def handle(self) -> tuple[int, int]:
        """The caching allocator's name for the pool, for ``capture_begin``."""
        return self._handles[-1]

    def renew(self) -> None:
        """Go on in fresh memory, because torch will not capture into the old any more; graphs captured before keep theirs.

        # subtle: torch forgets a pool in which no graph is left, and then fails to capture into it. The empty graph captured here stays
        # in it. Its successful end also tells the random generator that a failed capture before it is over.
        """
        if torch.cuda.is_current_stream_capturing():
            raise CaptureError("a capture is already running; captures do not nest, and no pool can be made inside one")
        anchor, handle = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        with capture_lock, self.on_stream(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*graph is empty.*", category=UserWarning)
            anchor.capture_begin(pool=handle, capture_error_mode="thread_local")
            anchor.capture_end()
        self._handles.append(handle)
        self._anchors.append(anchor)

    def _device_segments(self) -> list[tuple[int, int]]:
        own = [s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) in self._handles]
        return [(s["address"], s["address"] + s["total_size"]) for s in own]

    def poison(self) -> None:
        """Fill the pool with bytes of 255, NaN in every floating dtype, so that what a replay reads without having written it shows."""
        if self.stream is None:
            self.arena.fill(255)
            return
        for start, end in self._device_segments():
            torch.as_tensor(_DeviceMemory(start, end - start), device=self.device).fill_(255)

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's memory is this pool's."""
        if self.stream is None:
            return self.arena.owns(tensor)
        address = tensor.untyped_storage().data_ptr()
        if not self._in_known_segments(address) and address not in self._foreign:
            self._segments = self._device_segments()
            if not self._in_known_segments(address):
                self._foreign.add(address)  # looking at a snapshot is slow, and parameters are asked for again and again
        return self._in_known_segments(address)

    def _in_known_segments(self, address: int) -> bool:
        return any(start <= address < end for start, end in self._segments)

    @contextmanager
    def on_stream(self):
        """Run the block on the side stream, ordered after what came before and before what comes after."""
        if self.stream is None:
            yield
            return
        outer = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(outer)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            outer.wait_stream(self.stream)


def weak_ref(value: object, pool: GraphPool | None = None) -> object:
    """Every tensor in ``value`` replaced by an alias on the same memory that does not keep it alive.

    With ``pool``, only the tensors whose memory is the pool's; the others are returned themselves, and kept alive by whoever keeps
    the result.

    Capture keeps its results this way, so that one region's memory can serve the next; a captured graph holds its pool, and so the
    alias stays valid for as long as the graph lives. Mirrors ``weak_ref_tensors`` of SGLang and vLLM, which is a compiled extension.
    """

    def weak(tensor: torch.Tensor) -> torch.Tensor:
        if pool is not None and not pool.owns(tensor):
            return tensor
        if tensor.is_cuda:
            return _alias_of_device_memory(tensor)
        return alias_of_host_memory(tensor) if pool is None else pool.arena.alias(tensor)

    return tree_map_only(torch.Tensor, weak, value)


class _DeviceMemory:
    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 2}


def _alias_of_device_memory(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    usable = storage.nbytes() // tensor.element_size() * tensor.element_size()
    flat = torch.as_tensor(_DeviceMemory(storage.data_ptr(), usable), device=tensor.device).view(tensor.dtype)
    return with_lazy_bits(flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()), tensor)
