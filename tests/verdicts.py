"""How a scenario may end, and how results and state are compared: bit by bit."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

# What a user cannot act on: a name that is missing inside of us, not a sentence.
UNCLEAR = (AttributeError, LookupError, AssertionError, NameError, TypeError, StopIteration, RecursionError, ArithmeticError)


class SilentFault(AssertionError):
    """A wrong result, changed state, or an error that says nothing."""


class InvalidProgram(Exception):
    """The oracle itself raises: the program is no program for this size."""


@dataclass
class Outcome:
    """How a scenario ended, if not in a ``SilentFault``."""

    batches: int = 0  # compared
    refused: Counter = field(default_factory=Counter)  # reason -> how often
    noticed: Counter = field(default_factory=Counter)  # the same for changes that may be refused
    captured: bool = False

    @property
    def ran(self) -> bool:
        return self.captured and not self.refused


def is_unclear(error: Exception) -> bool:
    """Whether an error says nothing to the user."""
    private = type(error).__module__.startswith("torch._subclasses")
    return isinstance(error, UNCLEAR) or private or "INTERNAL ASSERT" in str(error)


def tensors(model: nn.Module) -> list[torch.Tensor]:
    """Parameters, buffers, and tensors that are plain attributes."""
    plain = [v for module in model.modules() for v in vars(module).values() if isinstance(v, torch.Tensor)]
    return [*model.parameters(), *model.buffers(), *plain]


def state(model: nn.Module) -> list[torch.Tensor]:
    return [t.clone() for t in tensors(model)]


def difference(actual, expected) -> str | None:
    """In words, or ``None`` where both are the same bit by bit."""
    left, right = tree_leaves(actual), tree_leaves(expected)
    if len(left) != len(right):
        return f"has {len(left)} values in place of {len(right)}"
    for i, (a, b) in enumerate(zip(left, right)):
        if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
            if a is not b and a != b:
                return f"{i} is {a!r} and must be {b!r}"
        elif (a.dtype, a.shape) != (b.dtype, b.shape):
            return f"{i} is {a.dtype} {list(a.shape)} and must be {b.dtype} {list(b.shape)}"
        elif not torch.equal(a, b):
            return f"{i} is wrong in {int((a != b).sum())} of {a.numel()} places, the first in row {(a != b).nonzero()[0].tolist()}"
    return None


def kind(error: Exception) -> str:
    """An error without its numbers and names, to be counted."""
    line = re.sub(r"0x\w+|\b\d+\b|\b[xy]\d+\b", "#", str(error).strip().split("\n")[0])
    return f"{type(error).__name__}: {line[:90]}"
