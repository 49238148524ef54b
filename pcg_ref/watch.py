"""What the graphs have frozen of a model: the addresses of its weights, and the Python values that its forward read."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from pcg_ref.state import OF_EVERY_MODULE, named_modules, tensors_in


def _slots(model: Callable) -> list[tuple[str, dict, str]]:
    """Where each submodule, parameter and buffer is kept: its name, and the dictionary and key that hold it."""
    return [
        (f"{prefix}.{key}" if prefix else key, owner, key)
        for prefix, child in named_modules(model)
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
        self._parents = [(name, child._modules) for name, child in named_modules(self.model) if child._modules]
        self._children = [len(modules) for _, modules in self._parents]

    def _current(self) -> list[int]:
        # map and no comprehension: the check runs once a batch, over every parameter.
        values = list(map(dict.get, self._owners, self._keys))
        return [*map(_identity, values[: self._num_tensors]), *map(id, values[self._num_tensors :])]

    def check(self) -> None:
        """Raises ``RuntimeError`` with the name of the first tensor that has moved."""
        if not self._slots:
            return
        if [len(modules) for _, modules in self._parents] != self._children:
            name = next(name for (name, modules), count in zip(self._parents, self._children) if len(modules) != count)
            raise RuntimeError(f"{name or 'the model'} has other submodules than at capture; build a new runner and capture")
        current = self._current()
        if current == self._identities:
            return
        name, old, new = next((s[0], a, b) for s, a, b in zip(self._slots, self._identities, current) if a != b)
        raise RuntimeError(_moved(name, old, new))


def _identity(value: torch.Tensor | None) -> int:
    if value is None:
        return 0
    return value.data_ptr() if value.layout is torch.strided else id(value)


@dataclass(frozen=True)
class _Attribute:
    owner: dict  # that keeps it
    key: str
    value: object
    places: tuple[int, ...]  # of the tensors in it


class AttributeWatch:
    """Notices an attribute of a module that is not what it was at capture, by which the model would now compute something else.

    Tensors in attributes, also in lists, dictionaries and the fields of objects, are compared by address, everything else as the value that
    it is: a number in a list or in a configuration object is seen by the guards of a stitched replay alone. What the forward changes by
    itself at every call is left out.
    """

    def __init__(self, model: Callable) -> None:
        self.model = model
        self.remember(names=())

    def remember(self, names: Iterable[str] | None = None) -> None:
        """Take the values of now as those of capture.

        Args:
            names: Attributes to look at; all by default.
        """
        self._names = names
        self._take(self._find(), set())

    def settle(self) -> None:
        """The same after each capture; what has changed since the last call is the forward's own, and is looked at no more."""
        found, before = self._find(), self._found
        same = lambda name: before[name].value is found[name].value and before[name].places == found[name].places  # noqa: E731
        self._take(found, {name for name in found if name in before and not same(name)})

    def accept(self) -> None:
        """Take the values of now, because what has changed makes no difference."""
        self._take(self._find(), self._changing)

    def _find(self) -> dict[str, _Attribute]:
        return {
            f"{prefix}.{key}" if prefix else key: _Attribute(vars(child), key, value, _places(value))
            for prefix, child in named_modules(self.model)
            for key, value in vars(child).items()
            if key not in OF_EVERY_MODULE and (self._names is None or key in self._names)
        }

    def _take(self, found: dict[str, _Attribute], changing: set[str]) -> None:
        self._found, self._changing = found, changing
        watched = [attribute for name, attribute in found.items() if name not in changing]
        self._owners, self._keys = [attribute.owner for attribute in watched], [attribute.key for attribute in watched]
        self._expected = [attribute.value for attribute in watched]
        self._holding = [(name, found[name]) for name in found if name not in changing and found[name].places]
        self._modules = list(named_modules(self.model))
        self._dicts = [vars(child) for _, child in self._modules]
        self._sizes = list(map(len, self._dicts))

    def check(self) -> None:
        """Raises ``RuntimeError`` with the name of the first attribute whose tensors have moved."""
        for name, attribute in self._holding:
            if (now := _places(attribute.owner.get(attribute.key))) != attribute.places:
                old, new = next(((a, b) for a, b in zip(attribute.places, now) if a != b), (attribute.places[-1], 0))
                raise RuntimeError(_moved(name, old, new))

    def change(self) -> str | None:
        """The first attribute that has changed, with both values in words, or ``None``."""
        if (sizes := list(map(len, self._dicts))) != self._sizes:
            if hidden := self._hidden():
                return hidden
            self._sizes = sizes
        # subtle: by identity, with map and in C. Values are compared only after that, because an equal number may be another object.
        if all(map(operator.is_, map(dict.get, self._owners, self._keys), self._expected)):
            return None
        for name, attribute in self._found.items():
            old, new = attribute.value, attribute.owner.get(attribute.key)
            if name not in self._changing and new is not old and not attribute.places and not _equal(new, old):
                return f"{name} was {_word(old)} at capture and is {_word(new)}"
        self.accept()  # other objects, equal values
        return None

    def _hidden(self) -> str | None:
        """An attribute that was the class's at capture, and is the object's own now."""
        for prefix, child in self._modules:
            for key, value in vars(child).items():
                name = f"{prefix}.{key}" if prefix else key
                read = key == "forward" or self._names is None or key in self._names
                if read and name not in self._found and key not in OF_EVERY_MODULE and hasattr(type(child), key):
                    return f"{name} was the class's {_word(getattr(type(child), key))} at capture and is {_word(value)}"
        return None


def _places(value: object) -> tuple[int, ...]:
    return tuple(map(_identity, tensors_in(value)))


def _moved(name: str, old: int, new: int) -> str:
    return (
        f"{name} is at {new:#x}, and was at {old:#x} at capture; the graphs read the old address. Change tensors in place "
        f"(copy_, load_state_dict), or build a new runner and capture"
    )


def _equal(new: object, old: object) -> bool:
    """Plain values by value, and tuples of them; anything else is what it was only if it is the same object."""
    if type(new) is not type(old):
        return False
    if isinstance(new, tuple):
        return len(new) == len(old) and all(map(_equal, new, old))
    return new is old or (isinstance(new, (bool, int, float, complex, str, bytes, torch.dtype, torch.device)) and new == old)


def _word(value: object) -> str:
    text = f"{value.dtype} {list(value.shape)} at {_identity(value):#x}" if isinstance(value, torch.Tensor) else repr(value)
    return text if len(text) < 60 else f"{text[:57]}..."
