"""The state that a model keeps beside its parameters, which a warm-up would change, and capture puts back."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pcg_ref.tracing import module_of

OF_EVERY_MODULE = vars(nn.Module()).keys() - {"training"}  # hooks and the dictionaries of submodules, parameters and buffers


def named_modules(model: Callable) -> Iterable[tuple[str, nn.Module]]:
    """Every module of the model by its name; none for a function."""
    module = module_of(model)
    return module.named_modules() if isinstance(module, nn.Module) else ()


class Writes:
    """The names of the tensors of state and of the parameters that a block has written to, and the tensors in attributes that it has put
    another tensor in place of."""

    def __init__(self) -> None:
        self.state: list[str] = []
        self.parameters: list[str] = []
        self.replaced: dict[str, torch.Tensor] = {}


def named_state(model: Callable) -> Iterable[tuple[str, torch.Tensor]]:
    """Registered buffers, tensors in attributes, and tensors that a function closes over."""
    for prefix, child in named_modules(model):
        for _, key, value in _bindings_of(child):
            yield from ((f"{prefix}.{key}" if prefix else key, tensor) for tensor in tensors_in(value))
    if inspect.isfunction(function := module_of(model)):
        for key, value in inspect.getclosurevars(function).nonlocals.items():
            yield from ((key, tensor) for tensor in tensors_in(value))


def _bindings_of(module: nn.Module) -> list[tuple[dict, str, object]]:
    """Each buffer and attribute: the dictionary that keeps it, its key and its value."""
    attributes = [(vars(module), key, value) for key, value in vars(module).items() if key not in OF_EVERY_MODULE]
    return [(module._buffers, key, value) for key, value in module._buffers.items()] + attributes


def tensors_in(value: object) -> Iterable[torch.Tensor]:
    """The tensors in a value, in lists, tuples and dictionaries, and in the fields of plain objects among these."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, (nn.Module, type)) and not callable(leaf):
            yield from (field for field in tree_leaves(vars(leaf)) if isinstance(field, torch.Tensor))


class Reads(TorchDispatchMode):
    """Notes the memory that operators are given in a ``with`` block. Only of tensors that lived before it and after it does that say
    something: others may have had the same address one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self._addresses: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided]
        self._addresses.update(tensor.untyped_storage().data_ptr() for tensor in tensors)
        return func(*args, **(kwargs or {}))

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._addresses


@contextmanager
def preserved_state(model: Callable, writes: Writes):
    """Put every tensor of the model's state back to its value when the block ends, also by an exception.

    State is what is registered as a buffer, tensors in attributes of modules, also in lists, dictionaries and the fields of objects, and
    tensors that a function closes over. Parameters are not copied, being most of the memory; that one was written to is only reported.

    Args:
        model: The module or function.
        writes: Filled in when the block ends.
    """
    state = [(name, tensor) for name, tensor in named_state(model) if not isinstance(tensor, nn.Parameter)]
    module = module_of(model)
    parameters = list(module.named_parameters()) if isinstance(module, nn.Module) else []
    # A tensor made in inference mode counts no versions, and torch itself refuses to write to it elsewhere.
    versions = [
        (names, name, tensor, tensor._version)
        for names, tensors in ((writes.state, state), (writes.parameters, parameters))
        for name, tensor in tensors
        if not tensor.is_inference()
    ]
    bindings = [b for _, child in named_modules(model) for b in _bindings_of(child) if next(iter(tensors_in(b[2])), None) is not None]
    with preserved(tensor for _, tensor in state):
        try:
            yield
        finally:
            for names, name, tensor, version in versions:
                if tensor._version != version and name not in names:
                    names.append(name)
            now = {id(tensor) for _, tensor in named_state(model)}
            writes.replaced.update((name, tensor) for name, tensor in state if id(tensor) not in now)
            for owner, key, value in bindings:
                owner[key] = value


@contextmanager
def preserved(tensors: Iterable[torch.Tensor]):
    """Put the memory of ``tensors`` back to its contents when the block ends, also by an exception."""
    # Storages, because an expanded tensor cannot be copied into, and views would be copied more than once.
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if t.layout is torch.strided}
    saved = [(storage, storage.clone()) for storage in storages.values()]
    try:
        yield
    finally:
        for storage, contents in saved:
            storage.copy_(contents)
