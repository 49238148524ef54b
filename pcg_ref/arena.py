"""Host memory that behaves like a device's caching allocator: fixed addresses, blocks, reuse when a block's last tensor dies.

The CPU simulation allocates here what a CUDA graph would take from its private pool, so that shared memory, stale addresses and
overwritten outputs look alike on both. This module records nothing.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
import weakref

import torch

_ALIGNMENT = 512  # bytes, the caching allocator's; it also keeps vectorised kernels on the same path as in eager
_SEGMENT_BYTES = 2 << 20  # the caching allocator's small segment


class Arena:
    """Memory at fixed addresses, handed out in blocks and reused when a block's last tensor dies."""

    def __init__(self) -> None:
        self._segments: list[tuple[int, memoryview]] = []  # (address, memory)
        self._free: list[tuple[int, int]] = []  # (address, bytes), sorted, never adjacent
        # subtle: the garbage collector may free blocks in the middle of the search below; they wait here for the next search.
        self._returned: list[tuple[int, int]] = []

    @property
    def bytes(self) -> int:
        """Reserved memory, in use or not."""
        return sum(memory.nbytes for _, memory in self._segments)

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's memory is this arena's."""
        address = tensor.untyped_storage().data_ptr()
        return any(start <= address < start + memory.nbytes for start, memory in self._segments)

    def fill(self, byte: int) -> None:
        """Overwrite all of the memory, in use or not."""
        for _, memory in self._segments:
            torch.frombuffer(memory, dtype=torch.uint8).fill_(byte)

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor on the same memory of this arena that does not keep its block.

        It keeps the segment mapped: what outlives its block, or the arena, reads stale numbers and never crashes.
        """
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), tensor.element_size()
        start, memory = next((s, m) for s, m in self._segments if s <= address < s + m.nbytes)
        flat = torch.frombuffer(memory, dtype=torch.uint8, offset=address - start, count=storage.nbytes() // size * size)
        return with_lazy_bits(flat.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()), tensor)

    def empty_strided(self, like: torch.Tensor) -> torch.Tensor:
        """An uninitialised tensor with the shape, strides and dtype of ``like``, in a block of its own."""
        extent = 1 + sum((size - 1) * stride for size, stride in zip(like.shape, like.stride())) if like.numel() else 1
        nbytes = extent * like.element_size()
        block = self._allocate(-(-nbytes // _ALIGNMENT) * _ALIGNMENT)
        # frombuffer keeps the memoryview alive for as long as any tensor uses the memory: its death is the block's.
        flat = torch.frombuffer(block, dtype=torch.uint8, count=nbytes).view(like.dtype)
        return flat.as_strided(like.shape, like.stride())

    def _allocate(self, nbytes: int) -> memoryview:
        while self._returned:
            self._release(*self._returned.pop())
        fitting = [(size, address) for address, size in self._free if size >= nbytes]
        if not fitting:
            self._add_segment(nbytes)
            return self._allocate(nbytes)
        size, address = min(fitting)  # best fit
        self._free.remove((address, size))
        if size > nbytes:
            bisect.insort(self._free, (address + nbytes, size - nbytes))
        start, memory = next((s, m) for s, m in self._segments if s <= address < s + m.nbytes)
        return self._block(memory, address - start, nbytes, address)

    def _block(self, memory: memoryview, offset: int, nbytes: int, address: int) -> memoryview:
        block = memory[offset : offset + nbytes]
        weakref.finalize(block, self._returned.append, (address, nbytes)).atexit = False
        return block

    def _release(self, address: int, nbytes: int) -> None:
        i = bisect.bisect(self._free, (address, nbytes))
        self._free.insert(i, (address, nbytes))
        for j in (i, i - 1):  # merge with the neighbours, within one segment
            if 0 <= j < len(self._free) - 1:
                (a, n), (b, m) = self._free[j : j + 2]
                if a + n == b and all(b != start for start, _ in self._segments):
                    self._free[j : j + 2] = [(a, n + m)]

    def _add_segment(self, nbytes: int) -> None:
        size = -(-nbytes // _SEGMENT_BYTES) * _SEGMENT_BYTES
        memory = memoryview(mmap.mmap(-1, size))
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._segments.append((address, memory))
        bisect.insort(self._free, (address, size))


def with_lazy_bits(alias: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """``alias``, conjugated and negated as ``tensor`` is: such bits are the tensor object's, and not in the memory."""
    alias = alias.conj() if tensor.is_conj() else alias
    return torch._neg_view(alias) if tensor.is_neg() else alias  # private: the only way to set the bit


def alias_of_host_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the same memory that does not keep it alive."""
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    usable = storage.nbytes() // tensor.element_size() * tensor.element_size()
    flat = torch.frombuffer(memory, dtype=torch.uint8)[:usable].view(tensor.dtype)
    return with_lazy_bits(flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()), tensor)
