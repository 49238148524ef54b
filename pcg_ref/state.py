"""The state that a model keeps beside its parameters, which a warm-up would change, and capture puts back."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from types import ModuleType

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pcg_ref.tracing import module_of

OF_EVERY_MODULE = vars(nn.Module()).keys() - {"training"}  # hooks and the dictionaries of submodules, parameters and buffers


def named_modules(model: Callable) -> Iterable[tuple[str, nn.Module]]:
    """Every module behind the model by its name, each once: its submodules, and modules in plain lists, fields and closures."""
    root = module_of(model)
    seen: set[int] = set()
    waiting = [("", root)] if isinstance(root, nn.Module) else [(name, m) for name, value in _held(root) for m in _leaves(value, nn.Module)]
    while waiting:
        prefix, module = waiting.pop(0)
        for name, child in module.named_modules(prefix=prefix):
            if id(child) not in seen:
                seen.add(id(child))
                yield name, child
                attributes = [(key, value) for key, value in vars(child).items() if key not in OF_EVERY_MODULE]
                waiting += [(f"{name}.{key}" if name else key, m) for key, value in attributes for m in _leaves(value, nn.Module)]


def _held(root: object) -> list[tuple[str, object]]:
    """What a function closes over or reads of its globals, and what any other object keeps in its fields."""
    if inspect.isfunction(root):
        found = inspect.getclosurevars(root)
        return [*found.nonlocals.items(), *found.globals.items()]
    return list(getattr(root, "__dict__", {}).items())


def _leaves(value: object, kind: type, depth: int = 4) -> Iterable:
    """What is of this kind in a value, in lists, tuples and dictionaries, and in the fields of plain objects among these."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, kind):
            yield leaf
        elif depth and hasattr(leaf, "__dict__") and not callable(leaf) and not isinstance(leaf, (torch.Tensor, ModuleType)):
            for field in vars(leaf).values():
                yield from _leaves(field, kind, depth - 1)


class Writes:
    """The names of the tensors of state and of the parameters that a block has written to, and the tensors in attributes that it has put
    another tensor in place of."""

    def __init__(self) -> None:
        self.state: list[str] = []
        self.parameters: list[str] = []
        self.replaced: dict[str, torch.Tensor] = {}
        self._bindings: list[tuple[dict, str, object, object]] = []

    def undo_replacing(self) -> None:
        """Put the tensors back into the attributes, lists and dictionaries that held them."""
        for owner, key, value, contents in self._bindings:
            owner[key] = value
            if isinstance(value, list):
                value[:] = contents
            elif isinstance(value, dict):
                value.clear()
                value.update(contents)


def named_state(model: Callable) -> Iterable[tuple[str, torch.Tensor]]:
    """Registered buffers, tensors in attributes, and tensors that a function closes over or an object keeps."""
    for prefix, child in named_modules(model):
        for _, key, value in _bindings_of(child):
            yield from ((f"{prefix}.{key}" if prefix else key, tensor) for tensor in tensors_in(value))
    if not isinstance(root := module_of(model), nn.Module):
        yield from ((key, tensor) for key, value in _held(root) for tensor in tensors_in(value))


def device_of(model: Callable) -> torch.device:
    """Where the model's parameters are, or else the rest of its tensors; the CPU for a model that keeps none."""
    tensors = [parameter for _, child in named_modules(model) for _, parameter in _parameters_of(child)]
    tensors += [tensor for _, tensor in named_state(model)]
    return tensors[0].device if tensors else torch.device("cpu")


def _bindings_of(module: nn.Module) -> list[tuple[dict, str, object]]:
    """Each buffer and attribute: the dictionary that keeps it, its key and its value."""
    attributes = [(vars(module), key, value) for key, value in vars(module).items() if key not in OF_EVERY_MODULE]
    return [(module._buffers, key, value) for key, value in module._buffers.items()] + attributes


def _parameters_of(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(key, parameter) for key, parameter in module._parameters.items() if parameter is not None]


def tensors_in(value: object) -> Iterable[torch.Tensor]:
    """The tensors in a value, in lists, tuples and dictionaries, and in the fields of plain objects among these."""
    return _leaves(value, torch.Tensor)


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
    parameters = [(f"{prefix}.{key}" if prefix else key, p) for prefix, child in named_modules(model) for key, p in _parameters_of(child)]
    # A tensor made in inference mode counts no versions, and torch itself refuses to write to it elsewhere.
    versions = [
        (names, name, tensor, tensor._version)
        for names, tensors in ((writes.state, state), (writes.parameters, parameters))
        for name, tensor in tensors
        if not tensor.is_inference()
    ]
    bindings = [binding for _, child in named_modules(model) for binding in _bindings_of(child)]
    writes._bindings = [(*b, copy.copy(b[2])) for b in bindings if next(iter(tensors_in(b[2])), None) is not None]
    with preserved(tensor for _, tensor in state):
        try:
            yield
        finally:
            for names, name, tensor, version in versions:
                if tensor._version != version and name not in names:
                    names.append(name)
            now = {id(tensor) for _, tensor in named_state(model)}
            writes.replaced.update((name, tensor) for name, tensor in state if id(tensor) not in now)


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
