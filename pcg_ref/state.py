"""What a model owns beside its inputs: parameters whose addresses the graphs hold, and buffers that a warm-up could change."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager

import torch
from torch import nn


def _slots(model: Callable) -> list[tuple[str, dict, str]]:
    """Where each submodule, parameter and buffer is kept: its name, and the dictionary and key that hold it."""
    module = getattr(model, "__self__", model)
    if not isinstance(module, nn.Module):
        return []
    return [
        (f"{prefix}.{key}" if prefix else key, owner, key)
        for prefix, child in module.named_modules()
        # The dictionaries themselves: looking names up costs more than the check.
        for owner in (child._modules, child._parameters, child._buffers)
        for key in owner  # also one that holds None: a bias may come later
    ]


class ParameterWatch:
    """Notices a parameter or buffer that is no longer where the graphs read it.

    ``module.half()``, ``load_state_dict(assign=True)``, a new ``nn.Parameter`` or a new submodule give weights a new address; graphs
    would go on with the old numbers. A check costs host time for every tensor, 0.1 µs if the processor's cache holds them all and up
    to 1 µs if not.
    """

    def __init__(self, model: Callable) -> None:
        self.model = model
        self._slots: list[tuple[str, dict, str]] = []
        self._identities: list[int] = []

    def remember(self) -> None:
        """Take the addresses of now as those of capture."""
        slots = _slots(self.model)
        # Tensors first, so that check() can tell the two apart by their place.
        self._slots = sorted(slots, key=lambda slot: not isinstance(slot[1][slot[2]], torch.Tensor))
        self._owners, self._keys = [s[1] for s in self._slots], [s[2] for s in self._slots]
        tensors = [owner[key] for owner, key in zip(self._owners, self._keys) if isinstance(owner[key], torch.Tensor)]
        self._num_tensors = len(tensors)
        self._keeps = [tensor.detach() for tensor in tensors]  # the memory, also when the parameter itself is given other
        self._identities = self._current()

    def _current(self) -> list[int]:
        # map and no comprehension: the check runs once a batch, over every parameter.
        values = list(map(dict.get, self._owners, self._keys))
        return [*map(_identity, values[: self._num_tensors]), *map(id, values[self._num_tensors :])]

    def check(self) -> None:
        """Raises ``RuntimeError`` with the name of the first tensor that has moved."""
        if not self._slots:
            return
        current = self._current()
        if current == self._identities:
            return
        name, old, new = next((s[0], a, b) for s, a, b in zip(self._slots, self._identities, current) if a != b)
        raise RuntimeError(
            f"{name} is at {new:#x}, and was at {old:#x} at capture; the graphs read the old address. Change weights in place "
            f"(parameter.copy_, load_state_dict), or build a new runner and capture"
        )


def _identity(value: torch.Tensor | None) -> int:
    return 0 if value is None else value.data_ptr()


class Writes:
    """The names of the buffers and of the parameters that a block has written to."""

    def __init__(self) -> None:
        self.buffers: list[str] = []
        self.parameters: list[str] = []


@contextmanager
def preserved_buffers(model: Callable, writes: Writes):
    """Put every registered buffer of the model back to its value when the block ends, also by an exception.

    Parameters are not copied, being most of the memory; that one was written to is only reported.

    Args:
        model: A module or a method of one; for any other callable nothing is done.
        writes: Filled in when the block ends.
    """
    module = getattr(model, "__self__", model)
    if not isinstance(module, nn.Module):
        yield
        return
    values = [(buffer, buffer.clone()) for buffer in module.buffers()]
    named = [(writes.parameters, *item) for item in module.named_parameters()]
    named += [(writes.buffers, *item) for item in module.named_buffers()]
    # A tensor made in inference mode counts no versions, and torch itself refuses to write to it elsewhere.
    versions = [(names, name, tensor, tensor._version) for names, name, tensor in named if not tensor.is_inference()]
    try:
        yield
    finally:
        for names, name, tensor, version in versions:
            if tensor._version != version:
                names.append(name)
        with torch.inference_mode():  # where both kinds of tensors may be written
            for buffer, value in values:
                buffer.copy_(value)
