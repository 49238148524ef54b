"""What the hazard programs share: a verdict that is measured, a handful of split operators, and one small model.

Letters: ``T`` rows of the graphs (8), ``D`` width (4).
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

import pcg_ref as pcg

T, D = 8, 4

GOOD = ("equal to eager", "refused", "runs eagerly", "no collection", "no growth")  # every other word is a hazard that has struck


@dataclass(frozen=True)
class Verdict:
    """What a program did, in a standard word or two, and the evidence."""

    what: str
    detail: str = ""

    @property
    def holds(self) -> bool:
        return self.what in GOOD

    def __str__(self) -> str:
        return f"{self.what}: {self.detail}" if self.detail else self.what


@torch.no_grad()
def judge(program: Callable, device: torch.device | str) -> Verdict:
    """The verdict of ``program(device)``; an exception that leaves it is the verdict ``"error"``."""
    try:
        return program(device)
    except Exception as error:
        first = re.split(r"[:\[]|$", str(error), maxsplit=1, flags=re.MULTILINE)[0]  # what follows are often addresses
        return Verdict("error", f"{type(error).__name__}, {first}")


def compare(got: torch.Tensor, eager: torch.Tensor, **explanations: torch.Tensor) -> Verdict:
    """``"equal to eager"``, or which numbers are there instead.

    Args:
        got: ``[rows, ...]``, what the program computed.
        eager: The same by plain eager code.
        explanations: What a fault would leave there: ``stale=`` or ``overwritten=``, a tensor each.
    """
    same = lambda a, b: torch.allclose(a, b, rtol=1e-4, atol=1e-5)  # noqa: E731  NaN is equal to nothing
    if got.shape != eager.shape:
        return Verdict("wrong numbers", f"shape {list(got.shape)} where eager has {list(eager.shape)}")
    if same(got, eager):
        return Verdict("equal to eager", f"{len(got)} rows")
    wrong = [row for row in range(len(got)) if not same(got[row], eager[row])]
    first = int((~torch.isclose(got[wrong[0]], eager[wrong[0]], rtol=1e-4, atol=1e-5)).flatten().nonzero()[0])
    numbers = [f"{tensor[wrong[0]].flatten()[first].item():.3g}" for tensor in (got, eager)]
    kind = next((word for word, tensor in explanations.items() if same(got, tensor)), "wrong")
    return Verdict(f"{kind} numbers", f"{len(wrong)} of {len(got)} rows, the first {numbers[0]} where eager gives {numbers[1]}")


def refused(error: Exception, names: str) -> Verdict:
    """``"refused"`` if the message of the error names what it is about, else ``"error"``."""
    named = names in str(error)
    return Verdict("refused" if named else "error", f"{type(error).__name__}, which {'names' if named else 'does not name'} {names}")


# Split operators. The bodies run as Python between two graphs; in a plain capture they are captured with everything else.

_in_use: deque[torch.Tensor] = deque(maxlen=16)


@pcg.register_split_op()
@pcg.register_custom_op(fake=lambda x: torch.empty_like(x))
def hazard_fresh(x: torch.Tensor) -> torch.Tensor:
    # A copy in fresh memory. Its last results are still in use somewhere, so that by no luck two calls give the same address.
    _in_use.append(x.clone())
    return _in_use[-1]


@pcg.register_split_op()
@pcg.register_custom_op(fake=lambda x: (torch.empty_like(x), torch.empty_like(x)))
def hazard_pair(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x + 1, x * 10


@pcg.register_split_op()
@pcg.register_custom_op(mutates_args=["output"])
def hazard_write(x: torch.Tensor, output: torch.Tensor) -> None:
    output.copy_(x)


@pcg.register_split_op()
@pcg.register_custom_op(mutates_args=["output"])
def hazard_scale(x: torch.Tensor, output: torch.Tensor) -> None:
    output.copy_(x * pcg.current_context().batch.num_requests)  # a number of the host, another one for each batch


@pcg.register_split_op()
@pcg.register_custom_op(mutates_args=["cache"])
def hazard_store(rows: torch.Tensor, slots: torch.Tensor, cache: torch.Tensor) -> None:
    real = pcg.current_context().num_tokens  # the rows behind are padding, and belong nowhere
    cache[slots[:real]] = rows[:real]


class Rows(nn.Module):
    """``tokens [T] -> hidden [T, D]``, row by row, with one split operator in the middle."""

    def __init__(self, device: torch.device | str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((D,), 2.0, device=device), requires_grad=False)
        self.residual = True

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden = tokens[:, None] * self.weight
        written = torch.empty_like(hidden)
        hazard_write(hidden, written)
        return written + hidden if self.residual else written


def batch(device: torch.device | str, *lengths: int, token: int = 1) -> pcg.PackedBatch:
    """Requests of these lengths; the tokens are ``token``, ``2 * token``, and so on."""
    return pcg.PackedBatch(torch.arange(1, sum(lengths) + 1, device=device) * token, lengths)


def eagerly(model: Callable, batch: pcg.PackedBatch) -> torch.Tensor:
    """What plain eager code computes, the oracle."""
    with pcg.forward_context(batch):
        return model(batch.tokens, batch.positions)


def ones(device: torch.device | str, rows: int = T) -> torch.Tensor:
    return torch.ones(rows, D, device=device)
