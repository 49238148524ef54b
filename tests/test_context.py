"""The packed batch refuses what it cannot mean, and a forward context belongs to its block and its thread."""

import threading

import numpy as np
import pytest
import torch

import pcg_ref as pcg


def ids(count, **kwargs):
    return torch.arange(count, **{"dtype": torch.int64, **kwargs})


BAD_BATCHES = {
    "no request": (dict(tokens=ids(0), lengths=[]), r"empty.*lengths=\[\]"),
    "lengths [0]": (dict(tokens=ids(0), lengths=[0]), r"integers >= 1, got 0 in \[0\]"),
    "negative length": (dict(tokens=ids(2), lengths=[3, -1]), r"got -1 in \[3, -1\]"),
    "bool": (dict(tokens=ids(1), lengths=[True]), r"got True in \[True\]"),
    "numpy bool": (dict(tokens=ids(1), lengths=np.array([True])), "got True"),
    "float": (dict(tokens=ids(3), lengths=[3.0]), r"got 3\.0"),
    "numpy float": (dict(tokens=ids(3), lengths=np.array([3.0])), r"got 3\.0"),
    "text": (dict(tokens=ids(3), lengths="3"), "got '3'"),
    "one number": (dict(tokens=ids(3), lengths=3), "sequence of integers, got 3"),
    "nested": (dict(tokens=ids(3), lengths=torch.tensor([[3]])), r"got \[3\]"),
    "too few tokens": (dict(tokens=ids(4), lengths=[2, 3]), r"\[2, 3\] sum to 5, but tokens holds 4"),
    "too many tokens": (dict(tokens=ids(6), lengths=[2, 3]), "sum to 5, but tokens holds 6"),
    "int32": (
        dict(tokens=ids(3, dtype=torch.int32), lengths=[3]),
        r"torch\.int32 \[3\]; use torch\.tensor\(ids, dtype=torch\.int64\)",
    ),
    "float tokens": (dict(tokens=ids(3, dtype=torch.float32), lengths=[3]), r"torch\.float32"),
    "rank 2": (dict(tokens=ids(3)[None], lengths=[3]), r"one-dimensional int64 tensor, got torch\.int64 \[1, 3\]"),
    "rank 0": (dict(tokens=torch.tensor(5), lengths=[1]), r"one-dimensional.* got torch\.int64 \[\]"),
    "a list": (dict(tokens=[1, 2, 3], lengths=[3]), "got <class 'list'>"),
    "negative id": (dict(tokens=torch.tensor([5, -7, 1]), lengths=[3]), "negative id -7"),
    "prefix count": (dict(tokens=ids(3), lengths=[1, 2], prefix_lengths=[4]), "1 prefix_lengths for 2 requests"),
    "negative prefix": (dict(tokens=ids(3), lengths=[3], prefix_lengths=[-1]), r"prefix_lengths must be integers >= 0, got -1"),
    "float prefix": (dict(tokens=ids(3), lengths=[3], prefix_lengths=[1.5]), r"prefix_lengths.*got 1\.5"),
}


@pytest.mark.parametrize("name", BAD_BATCHES)
def test_a_bad_batch_is_refused_with_its_values(name):
    arguments, message = BAD_BATCHES[name]
    with pytest.raises(ValueError, match=message):
        pcg.PackedBatch(**arguments)


@pytest.mark.parametrize(
    "lengths",
    [
        [2, 3],
        (2, 3),
        np.array([2, 3]),
        np.array([2, 3], dtype=np.int32),
        [np.int64(2), np.uint8(3)],
        torch.tensor([2, 3]),
        [torch.tensor(2), 3],
    ],
    ids=repr,
)
def test_integers_of_any_kind_become_python_integers(lengths):
    batch = pcg.PackedBatch(ids(5), lengths, prefix_lengths=lengths)
    assert batch.lengths == batch.prefix_lengths == [2, 3]
    assert {type(n) for n in batch.lengths} == {int}


def test_a_batch_keeps_its_own_lengths():
    lengths = [2, 3]
    batch = pcg.PackedBatch(ids(5), lengths)
    lengths[0] = 9
    assert batch.lengths == [2, 3]


@pytest.mark.parametrize(("lengths", "prefixes"), [([1], None), ([3, 1, 4], None), ([2, 5], [7, 0]), ([1, 1, 1], [0, 0, 9])])
def test_positions_and_offsets(lengths, prefixes):
    positions, offsets = [], [0]
    for request, length in enumerate(lengths):
        start = prefixes[request] if prefixes else 0
        positions += [start + i for i in range(length)]
        offsets.append(offsets[-1] + length)
    batch = pcg.PackedBatch(ids(sum(lengths)) + 11, lengths, prefixes)
    assert (batch.num_tokens, batch.num_requests, batch.max_length) == (sum(lengths), len(lengths), max(lengths))
    assert (batch.min_token, batch.max_token) == (11, 10 + sum(lengths))
    assert batch.positions.tolist() == positions and batch.positions.dtype == torch.int64
    assert batch.cu_seqlens.tolist() == offsets and batch.cu_seqlens.dtype == torch.int32


@pytest.mark.parametrize(("rows", "lengths"), [(None, [2, 3]), (5, [2, 3]), (8, [2, 3, 3])])
def test_padding_is_one_more_request(rows, lengths):
    with pcg.forward_context(pcg.PackedBatch(ids(5), [2, 3]), rows) as context:
        assert context is pcg.current_context()
        assert (context.num_tokens, context.padded_num_tokens, context.lengths) == (5, rows or 5, lengths)
        assert context.cu_seqlens.tolist() == [sum(lengths[:i]) for i in range(len(lengths) + 1)]
        assert context.max_length == max(lengths)


def test_fewer_rows_than_tokens_are_refused():
    with (
        pytest.raises(ValueError, match="padded_num_tokens=4 is less than the batch's 5"),
        pcg.forward_context(pcg.PackedBatch(ids(5), [5]), 4),
    ):
        pass


def test_inside_a_full_graph_only_device_numbers_may_be_read():
    offsets = torch.tensor([0, 2, 8], dtype=torch.int32)
    with pcg.forward_context(pcg.PackedBatch(ids(5), [2, 3]), 8, static_cu_seqlens=offsets) as context:
        assert context.cu_seqlens is offsets and context.max_length == 8
        for name in ("batch", "num_tokens", "lengths"):
            with pytest.raises(RuntimeError, match="full graph.*cu_seqlens"):
                getattr(context, name)


def test_no_context_outside_a_forward():
    with pytest.raises(RuntimeError, match="no forward context.*forward_context"):
        pcg.current_context()


def test_contexts_nest_and_come_back_after_an_exception():
    outer, inner = pcg.PackedBatch(ids(2), [2]), pcg.PackedBatch(ids(3), [3])
    with pcg.forward_context(outer):
        with pytest.raises(KeyError), pcg.forward_context(inner):
            assert pcg.current_context().batch is inner
            raise KeyError
        assert pcg.current_context().batch is outer
    with pytest.raises(RuntimeError):
        pcg.current_context()


def test_threads_do_not_see_each_others_context():
    batches = [pcg.PackedBatch(ids(n), [n]) for n in (2, 3)]
    barrier, seen, errors = threading.Barrier(3, timeout=10), {}, []

    def forward(i):
        try:
            pcg.current_context()
        except RuntimeError as error:
            errors.append(error)
        with pcg.forward_context(batches[i]):
            barrier.wait()  # all three contexts are open now
            seen[i] = pcg.current_context().batch
            barrier.wait()

    threads = [threading.Thread(target=forward, args=(i,)) for i in range(2)]
    mine = pcg.PackedBatch(ids(4), [4])
    with pcg.forward_context(mine):
        for thread in threads:
            thread.start()
        barrier.wait()
        barrier.wait()
        for thread in threads:
            thread.join()
        assert pcg.current_context().batch is mine
    assert len(errors) == 2 and [seen[i] for i in range(2)] == batches
