"""What a model owns beside its inputs: parameters whose addresses the graphs hold, and buffers that a warm-up could change."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager

import torch
from torch import nn


def _slots(model: Callable) -> list[tuple[str, dict, str]]:
    """Where each parameter and buffer is kept: its name, and the dictionary and key that hold it."""
    module = getattr(model, "__self__", model)
    if not isinstance(module, nn.Module):
        return []
    return [
        (f"{prefix}.{key}" if prefix else key, owner, key)
        for prefix, child in module.named_modules()
        for owner in (child._parameters, child._buffers)  # the dictionaries themselves: looking names up costs more than the check
        for key, tensor in owner.items()
        if tensor is not None
    ]


class ParameterWatch:
    """Notices a parameter or buffer that is no longer where the graphs read it.

    ``module.half()``, ``load_state_dict(assign=True)`` or a new ``nn.Parameter`` give weights a new address; graphs would go on with
    the old numbers. Costs about 0.1 µs of host time a tensor and check.
    """

    def __init__(self, model: Callable) -> None:
        self.model = model
        self._slots: list[tuple[str, dict, str]] = []
        self._addresses: list[int] = []

    def remember(self) -> None:
        """Take the addresses of now as those of capture."""
        self._slots = _slots(self.model)
        self._addresses = self._current()

    def _current(self) -> list[int]:
        return [owner[key].data_ptr() for _, owner, key in self._slots]

    def check(self) -> None:
        """Raises ``RuntimeError`` with the name of the first tensor that has moved."""
        current = self._current()
        if current == self._addresses:
            return
        name, old, new = next((s[0], a, b) for s, a, b in zip(self._slots, self._addresses, current) if a != b)
        raise RuntimeError(
            f"{name} is at {new:#x}, and was at {old:#x} at capture; the graphs read the old address. Change weights in place "
            f"(parameter.copy_, load_state_dict), or build a new runner and capture"
        )


@contextmanager
def preserved_buffers(model: Callable):
    """Put every buffer of the model back to its value when the block ends, also by an exception.

    Raises:
        RuntimeError: The block wrote to a parameter. Parameters are not copied, being most of the memory, so that a model that trains
            itself in its forward is refused.
    """
    module = getattr(model, "__self__", model)
    if not isinstance(module, nn.Module):
        yield
        return
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    versions = {name: parameter._version for name, parameter in module.named_parameters()}
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
    written = [name for name, parameter in module.named_parameters() if versions.get(name) != parameter._version]
    if written:
        raise RuntimeError(f"the forward writes to the parameters {written}, and warm-up has already done so; make them buffers")
