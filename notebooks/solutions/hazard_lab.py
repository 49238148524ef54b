"""Solutions of the exercises of 06_hazard_lab.ipynb; the tests run them."""

from itertools import accumulate

import torch


def bounds_of(lengths, slots, rows):
    ends = [0, *accumulate(lengths)]
    return ends + [rows] * (slots + 1 - len(ends))


def watch(module):
    def tensors():
        return {**dict(module.named_parameters()), **dict(module.named_buffers())}

    addresses = {name: tensor.data_ptr() for name, tensor in tensors().items()}
    keeps = [tensor.detach() for tensor in tensors().values()]

    def check(keeps=keeps):
        for name, tensor in tensors().items():
            if tensor.data_ptr() != addresses[name]:
                raise RuntimeError(f"{name} has moved; graphs read the old address")

    return check


def build_store(cache, capture):
    nowhere = len(cache) - 1
    static_rows = cache.new_zeros(8, cache.shape[1])
    static_slots = torch.full((8,), nowhere, device=cache.device)

    def write(rows, slots):
        cache.index_copy_(0, slots, rows)

    write(static_rows, static_slots)
    graph = capture(write, static_rows, static_slots)

    def run(rows, slots):
        n = len(rows)
        static_rows[:n].copy_(rows)
        static_slots[:n].copy_(slots)
        static_slots[n:].fill_(nowhere)
        graph.replay()

    return run
