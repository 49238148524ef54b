"""Solutions of the exercises of 02_trace_and_split.ipynb; the tests run them."""

import torch

import pcg_ref as pcg


def branchless(x):
    return torch.where(x.sum() > 0, x * 2, x - 1)


def make_request_mean():
    @pcg.register_split_op()
    @pcg.register_custom_op(mutates_args=["output"])
    def request_mean(values: torch.Tensor, output: torch.Tensor) -> None:
        for source, target in zip(*(t.split(pcg.current_context().lengths) for t in (values, output))):
            target.copy_(source.mean(0).expand_as(source))

    return request_mean


def piece_numbers(is_split):
    numbers = [0]
    for before, now in zip(is_split, is_split[1:]):
        numbers.append(numbers[-1] + (before != now))
    return numbers
