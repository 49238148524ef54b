"""Checks for the exercises of the notebooks, one module a notebook.

A check runs what it is given, on random inputs of uneven sizes, and prints one line: that the exercise is not solved yet, what is
wrong, or that it is solved and at what cost. The solutions are in ``notebooks/solutions``; the tests run both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch


def device() -> torch.device:
    """Where the checks run: a GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def require(holds: bool, otherwise: str) -> None:
    """Raises ``AssertionError`` with ``otherwise`` unless ``holds``."""
    if not holds:
        raise AssertionError(otherwise)


def equal(actual: object, expected: torch.Tensor) -> bool:
    """Whether ``actual`` is a tensor with the shape of ``expected`` and its values up to rounding."""
    if not isinstance(actual, torch.Tensor) or actual.shape != expected.shape:
        return False
    return torch.allclose(actual, expected, rtol=1e-4, atol=1e-5)


def exercise(check: Callable[[Callable], str]) -> Callable[[Callable], None]:
    """Make a printed check of ``check(solution)``, which returns what it cost, or raises."""

    @functools.wraps(check)
    @torch.no_grad()
    def run(solution: Callable) -> None:
        try:
            print("solved:", check(solution))
        except NotImplementedError:
            print("not solved yet")
        except Exception as error:
            kind = "" if type(error) is AssertionError else f"{type(error).__name__}: "
            print(f"not yet right: {kind}{str(error).splitlines()[0] if str(error) else ''}")

    return run


def answered(value: object) -> object:
    """``value``, unless it is ``None``: a stub that returns nothing counts as not solved."""
    if value is None:
        raise NotImplementedError
    return value
