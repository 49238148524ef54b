"""What random programs are made of beside torch's own operators: split operators of every form, eager breaks, a block.

Every number is an integer, also in floating point, and what an operator computes is a remainder of 11: sums are exact in any order, so
that results can be compared bit by bit, whatever the compiler, the padding and the device.

Letters: ``T`` tokens.
"""

from __future__ import annotations

import torch
from torch import nn

import pcg_ref as pcg
from pcg_ref.ops import register_custom_op, register_split_op

MODULUS = 11


class InjectedFault(Exception):
    """Raised in the body of an operator because a test asked for it."""


class Calls:
    """Counts the bodies that have run, and raises in one of them."""

    count = 0
    fail_at: int | None = None

    @classmethod
    def reset(cls, fail_at: int | None = None) -> None:
        cls.count, cls.fail_at = 0, fail_at

    @classmethod
    def enter(cls) -> None:
        cls.count += 1
        if cls.count == cls.fail_at:
            raise InjectedFault(f"call {cls.count}")


def ints(*shape, seed: int, device, dtype=torch.float32, low: int = -4, high: int = 5) -> torch.Tensor:
    """Random integers, the same on every device."""
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def wrap(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.bool else x.remainder(MODULUS)


def split_op(mutates_args=(), fake=None):
    """Both decorators at once."""
    return lambda body: register_split_op()(register_custom_op(mutates_args, fake=fake)(body))


like = lambda x, *args, **kwargs: torch.empty_like(x)  # noqa: E731


@split_op(["output"])
def fz_into(x: torch.Tensor, output: torch.Tensor) -> None:
    Calls.enter()
    output.copy_(wrap(x * 3))


@split_op(fake=like)
def fz_fresh(x: torch.Tensor) -> torch.Tensor:
    Calls.enter()
    return torch.empty_like(x).copy_(wrap(x * 2 + 1))


@split_op(fake=lambda x: (torch.empty_like(x), x.new_empty(x.shape[0], dtype=torch.int64)))
def fz_pair(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    Calls.enter()
    return torch.empty_like(x).copy_(wrap(x + 1)), wrap(x.reshape(x.shape[0], -1).sum(1).long())


@split_op(["output"], fake=lambda x, output: torch.empty_like(x))
def fz_writes_and_returns(x: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    Calls.enter()
    output.add_(1).remainder_(MODULUS)
    return torch.empty_like(x).copy_(wrap(x * 5))


@split_op(fake=lambda xs: torch.empty_like(xs[0]))
def fz_list(xs: list[torch.Tensor]) -> torch.Tensor:
    Calls.enter()
    return torch.empty_like(xs[0]).copy_(wrap(sum(xs[1:], xs[0])))


@split_op(fake=lambda x: [torch.empty_like(x), torch.empty_like(x)])
def fz_returns_list(x: torch.Tensor) -> list[torch.Tensor]:
    Calls.enter()
    return [torch.empty_like(x).copy_(wrap(x + 2)), torch.empty_like(x).copy_(wrap(x * 2))]


@split_op(fake=like)
def fz_options(
    x: torch.Tensor, bias: torch.Tensor | None = None, times: int = 1, scale: float = 1.0, negate: bool = False
) -> torch.Tensor:
    Calls.enter()
    y = x * times * int(scale) * (-1 if negate else 1)
    return torch.empty_like(x).copy_(wrap(y if bias is None else y + bias))


@split_op(fake=lambda x: torch.empty_like(x, dtype=torch.bool))
def fz_mask(x: torch.Tensor) -> torch.Tensor:
    Calls.enter()
    return torch.empty_like(x, dtype=torch.bool).copy_(x > 0)


@split_op(fake=lambda x: x.new_empty(x.shape[1], x.shape[0]).t())
def fz_transposed(x: torch.Tensor) -> torch.Tensor:
    """A result that is not contiguous."""
    Calls.enter()
    return wrap(x + 3).t().contiguous().t()


# Readers of the metadata: they cannot be in a full graph.


@split_op(["output"])
def fz_requests_into(x: torch.Tensor, output: torch.Tensor) -> None:
    """Each row becomes the sum over its request; the padding is a request of its own."""
    Calls.enter()
    start = 0
    for length in pcg.current_context().lengths:
        output[start : start + length] = wrap(x[start : start + length].sum(0, keepdim=True))
        start += length


@split_op(fake=like)
def fz_requests(x: torch.Tensor) -> torch.Tensor:
    Calls.enter()
    parts = [wrap(part.cumsum(0)) for part in x.split(pcg.current_context().lengths)]
    return torch.empty_like(x).copy_(torch.cat(parts))


@split_op(fake=lambda x: x.new_empty(x.shape[1:]))
def fz_total(x: torch.Tensor) -> torch.Tensor:
    """Over the real rows alone."""
    Calls.enter()
    return wrap(x[: pcg.current_context().num_tokens].sum(0)).clone()


@split_op(["count"])
def fz_count(count: torch.Tensor) -> None:
    """State that eager segments keep in the model."""
    Calls.enter()
    count.add_(pcg.current_context().num_tokens).remainder_(MODULUS)


SPLIT_OPS = [
    fz_into, fz_fresh, fz_pair, fz_writes_and_returns, fz_list, fz_returns_list, fz_options, fz_mask, fz_transposed, fz_requests_into,
    fz_requests, fz_total, fz_count,
]  # fmt: skip
READS_METADATA = ("fz_requests_into", "fz_requests", "fz_total", "fz_count", "br_requests", "br_host")


# Eager breaks, for the breakable strategy.


@pcg.eager_on_graph
def br_same(x):
    Calls.enter()
    return x


@pcg.eager_on_graph
def br_view(x):
    Calls.enter()
    return x[:, :1]


@pcg.eager_on_graph
def br_write(x, by=1):
    Calls.enter()
    x.add_(by).remainder_(MODULUS)


@pcg.eager_on_graph
def br_dict(x, *, factor=2):
    Calls.enter()
    return {"argument": x, "fresh": wrap(x * factor)}


@pcg.eager_on_graph
def br_requests(x):
    Calls.enter()
    return wrap(x + pcg.current_context().batch.num_requests)


@pcg.eager_on_graph
def br_host(x):
    """Reads a number on the host, as no graph may."""
    Calls.enter()
    return torch.full_like(x, x[: pcg.current_context().num_tokens].sum().remainder(MODULUS).item())


class Block(nn.Module):
    """Two of the same class in one model, each with weights and state of its own."""

    def __init__(self, seed: int, device) -> None:
        super().__init__()
        self.weight = nn.Parameter(ints(4, 4, seed=seed, device=device), requires_grad=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64, device=device))

    def forward(self, x):
        self.seen.add_(1).remainder_(MODULUS)
        y = torch.empty_like(x)
        fz_into(x, y)
        return (y @ self.weight + self.seen).remainder(MODULUS)
