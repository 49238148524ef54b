"""PrefillRunner, over all strategies. Oracles: the model run eagerly, on the batch alone and on the same padded rows."""

from __future__ import annotations

import gc
import re
import threading
import weakref

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn

import pcg_ref as pcg
from pcg_ref.ops import register_custom_op, register_split_op

VOCAB, WIDTH, BUCKETS = 50, 16, [32, 16, 8, 4]  # 16 is also the width
COMBINATIONS = [("tc_piecewise", "flat"), ("tc_piecewise", "stitched"), ("breakable", "flat"), ("full", "flat"), ("eager", "flat")]
CAPTURED = COMBINATIONS[:-1]
CUT = COMBINATIONS[:-2]  # those in which a split operator's body runs at replay


def over(combinations):
    return pytest.mark.parametrize("strategy, replay", combinations, ids=["-".join(c) for c in combinations])


class Body:
    fails = False


@pytest.fixture(autouse=True)
def healthy_body():
    Body.fails = False


@register_split_op()
@register_custom_op(mutates_args=["output"])
def rn_into(x: torch.Tensor, output: torch.Tensor) -> None:
    if Body.fails:
        raise ZeroDivisionError("the body of a split operator failed")
    output.copy_(x.sin())


class Small(nn.Module):
    """No attention, so that a row depends on its own token alone; a buffer that counts forwards; a Python attribute."""

    def __init__(self):
        super().__init__()
        self.vocab_size, self.scale = VOCAB, 2
        self.embed, self.linear = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.linear.weight = self.embed.weight = nn.Parameter(torch.randn(VOCAB, WIDTH))  # tied
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.requires_grad_(False)

    def forward(self, tokens, positions):
        hidden = self.embed(tokens) + positions[:, None]
        self.count.add_(1)
        mixed = torch.empty_like(hidden)
        rn_into(hidden, mixed)
        return (mixed @ self.linear.weight[:WIDTH]) * self.scale


@pcg.register_split_op()
@pcg.register_custom_op(mutates_args=["output"])
def rn_moves(x: torch.Tensor, output: torch.Tensor) -> None:
    if Moves.moved:
        output.set_(torch.empty_like(output))
    output.copy_(x)


class Moves(nn.Module):
    moved = False

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH).requires_grad_(False)

    def forward(self, tokens, positions):
        hidden = self.embed(tokens)
        mixed = torch.empty_like(hidden)
        rn_moves(hidden * 2, mixed)
        return mixed + 1


@pcg.register_split_op()
@pcg.register_custom_op(mutates_args=["output"])
def rn_reenters(x: torch.Tensor, output: torch.Tensor) -> None:
    if Reenters.runner is not None:
        Reenters.runner.run(batch_of([6], 9, x.device))
    output.copy_(x)


class Reenters(nn.Module):
    runner = None

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH).requires_grad_(False)

    def forward(self, tokens, positions):
        hidden = self.embed(tokens)
        mixed = torch.empty_like(hidden)
        rn_reenters(hidden, mixed)
        return mixed + 1


@pcg.register_split_op()
@pcg.register_custom_op(mutates_args=["output"])
def rn_typed(x: torch.Tensor, output: torch.Tensor, scale: float, *, shift: float = 0.0) -> None:
    Typed.seen |= {type(scale), type(shift)}
    output.copy_(x * scale + shift)


class Typed(Reenters):
    seen: set[type] = set()

    def forward(self, tokens, positions):
        hidden = self.embed(tokens)
        mixed = torch.empty_like(hidden)
        rn_typed(hidden, mixed, 3, shift=2)
        return mixed + 1


def tiny(device, **changes):
    shape = dict(vocab_size=VOCAB, width=WIDTH, layers=1, heads=4, kv_heads=2, mlp_width=24)
    return pcg.TinyDecoder(**(shape | changes)).to(device)


def batch_of(lengths, seed=0, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    return pcg.PackedBatch(torch.randint(VOCAB, (sum(lengths),), generator=generator).to(device), lengths)


@torch.no_grad()
def eager(model, batch):
    with pcg.forward_context(batch):
        return model(batch.tokens, batch.positions)


@torch.no_grad()
def eager_padded(runner, batch, bucket):
    """All rows of the bucket, from the model run eagerly on the rows that the graphs run on."""
    n = batch.num_tokens
    tokens, positions = torch.zeros(2, bucket, dtype=torch.int64, device=batch.tokens.device)
    tokens[:n], positions[:n] = batch.tokens, batch.positions
    with runner.implementation.context(batch, bucket):
        return runner.model(tokens, positions)


def captured(model, strategy, replay, buckets=BUCKETS, **options):
    runner = pcg.PrefillRunner(model, strategy, buckets, replay=replay, **options)
    runner.capture(progress=False)
    return runner


def close(actual, expected, tolerance=2e-5):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def serve(runner, device, tolerance=2e-5, batches=((3, 2), (30,), (1, 1, 6), (4,), (9, 8, 7), (5, 5))):
    for seed, lengths in enumerate(batches):
        batch = batch_of(list(lengths), seed, device)
        close(runner.run(batch), eager(runner.model, batch), tolerance)


# --- equality

RUNNERS = {}


@pytest.fixture(scope="module", autouse=True)
def forget_runners():
    yield
    RUNNERS.clear()


length = st.integers(1, 9)
lengths = st.lists(length, min_size=1, max_size=6)
stream = st.lists(st.tuples(st.sampled_from(COMBINATIONS), lengths, st.integers(0, 99)), min_size=8, max_size=12)


@given(stream)
@settings(max_examples=60)
def test_random_streams_of_requests(stream):
    """At least 480 batches: real rows against the unpadded model, all rows bitwise against the padded one; results stay."""
    kept = []
    for combination, lengths, seed in stream:
        if combination not in RUNNERS:
            RUNNERS[combination] = captured(tiny("cpu"), *combination)
        runner, batch = RUNNERS[combination], batch_of(lengths, seed)
        expected, result = eager(runner.model, batch), runner.run(batch)
        close(result, expected)
        kept.append((result, result.clone()))
        bucket = next((b for b in sorted(runner.sequences) if b >= batch.num_tokens), None)
        if bucket and bucket <= 2 * batch.num_tokens:
            rows = eager_padded(runner, batch, bucket)
            torch.testing.assert_close(result, rows[: batch.num_tokens], rtol=0, atol=0)
            torch.testing.assert_close(runner.sequences[bucket].output, rows, rtol=0, atol=0)
    for result, before in kept:
        assert torch.equal(result, before)


@over(COMBINATIONS)
def test_every_bucket_in_random_order(strategy, replay, device):
    serve(captured(tiny(device, layers=3), strategy, replay), device)
    serve(captured(Small().to(device), strategy, replay), device)


@over(COMBINATIONS)
def test_bfloat16(strategy, replay, device):
    """bfloat16 has 8 bits of mantissa. On the CPU the same kernels run and only the sum over keys differs with padding."""
    serve(captured(tiny(device).bfloat16(), strategy, replay), device, tolerance=5e-2)


@pytest.mark.inductor
@pytest.mark.parametrize("strategy", ["tc_piecewise", "full"])
def test_inductor(strategy, device):
    runner = captured(tiny(device, layers=1), strategy, "flat", [16, 8], compiler="inductor")
    serve(runner, device, tolerance=1e-4)  # fused float32 arithmetic rounds differently
    assert sum(row["replays"] for row in runner.report()["buckets"].values()) == 4


# --- what run() returns (H2)


@over(CAPTURED)
@pytest.mark.parametrize("copy_output", [True, False])
def test_whose_the_result_is(strategy, replay, copy_output, device):
    runner = captured(tiny(device), strategy, replay, copy_output=copy_output)
    first, second = batch_of([5, 2], 1, device), batch_of([3, 4], 2, device)
    result = runner.run(first)
    close(result, eager(runner.model, first))  # valid at least until the next call
    before, later = result.clone(), runner.run(second)
    close(later, eager(runner.model, second))
    assert torch.equal(result, before) == copy_output
    assert (result.data_ptr() == later.data_ptr()) != copy_output


# --- dispatch and report (H11)


@over(CAPTURED)
def test_dispatch_is_reported(strategy, replay, device):
    runner = captured(tiny(device), strategy, replay, [64, 16, 16, 8], max_requests=3)
    report = runner.report()
    assert list(report["buckets"]) == [8, 16, 64] == runner.buckets == sorted(runner.sequences)
    assert all(row["graphs"] and row["replays"] == 0 for row in report["buckets"].values())
    assert {row["eager_segments"] for row in report["buckets"].values()} == {0 if strategy == "full" else 1}
    lengths = [[8], [5], [9], [16], [20], [3], [65], [40], [1] * 5]
    for seed, each in enumerate(lengths):
        batch = batch_of(each, seed, device)
        close(runner.run(batch), eager(runner.model, batch))
    report = runner.report()
    refused = {"more than 3 requests": 1} if strategy == "full" else {}
    assert {b: row["replays"] for b, row in report["buckets"].items()} == {8: 3 - len(refused), 16: 2, 64: 1}
    assert report["eager"] == {"padding above the factor 2": 2, "larger than the largest bucket 64": 1, **refused}
    text = str(report)
    assert strategy in text and "2 batches ran eagerly: padding above the factor 2" in text
    assert ("simulation" in text) == (device == "cpu")


def test_oversize_can_be_an_error(device):
    runner = captured(tiny(device), "breakable", "flat", [16, 4], on_oversize="error")
    for lengths in ([17], [5]):  # too large; padded by more than the factor
        with pytest.raises(ValueError, match=r"\[4, 16\]"):
            runner.run(batch_of(lengths, device=device))
    close(runner.run(batch_of([9], device=device)), eager(runner.model, batch_of([9], device=device)))


@over(COMBINATIONS)
def test_run_before_capture_and_capture_twice(strategy, replay, device):
    runner = pcg.PrefillRunner(Small().to(device), strategy, BUCKETS, replay=replay)
    serve(runner, device)
    assert runner.report()["eager"] == {"strategy 'eager'" if strategy == "eager" else "nothing captured": 6}
    runner.capture(progress=False)
    sequences = dict(runner.sequences)
    runner.capture(progress=False)
    assert runner.sequences == sequences
    serve(runner, device)


@pytest.mark.parametrize("wrong", [[], [1, 8], [0], [-4], [8.0], "8,16", 8, [None], [True]])
def test_bad_buckets(wrong):
    with pytest.raises(ValueError, match="bucket"):
        pcg.PrefillRunner(Small(), buckets=wrong)


@pytest.mark.parametrize("option", ["strategy", "compiler", "replay", "on_fresh_output", "on_recompile", "on_oversize"])
def test_unknown_choices(option):
    with pytest.raises(ValueError, match=rf"{option}='x'.*choose"):
        pcg.PrefillRunner(Small(), **{option: "x"})


@pytest.mark.parametrize(
    "choices, message",
    [
        (dict(max_padding_factor=0.5), "0.5"),
        (dict(max_padding_factor=float("nan")), "nan"),
        (dict(strategy="full", max_requests=0), "max_requests=0"),
        (dict(strategy="full", replay="stitched"), "no split module"),
        (dict(strategy="breakable", compiler="inductor"), "no compiler"),
    ],
)
def test_choices_that_make_no_sense(choices, message):
    with pytest.raises(ValueError, match=message):
        pcg.PrefillRunner(Small(), **choices)


# --- bad input


def tokens(*ids, dtype=torch.int64):
    return torch.tensor(ids, dtype=dtype)


BAD = {
    "empty batch": (lambda: pcg.PackedBatch(tokens(), []), "empty"),
    "no lengths": (lambda: pcg.PackedBatch(tokens(1, 2), []), "empty"),
    "length zero": (lambda: pcg.PackedBatch(tokens(1, 2), [2, 0]), r"got 0 in \[2, 0\]"),
    "negative length": (lambda: pcg.PackedBatch(tokens(1, 2), [3, -1]), r"got -1 in \[3, -1\]"),
    "fraction": (lambda: pcg.PackedBatch(tokens(1, 2), [1.5, 0.5]), "1.5"),
    "wrong sum": (lambda: pcg.PackedBatch(tokens(1, 2, 3), [2, 2]), r"\[2, 2\] sum to 4.*3"),
    "wrong dtype": (lambda: pcg.PackedBatch(tokens(1, 2, dtype=torch.int32), [2]), "torch.int32"),
    "float tokens": (lambda: pcg.PackedBatch(torch.ones(2), [2]), "torch.float32"),
    "two dimensions": (lambda: pcg.PackedBatch(tokens(1, 2)[None], [2]), r"\[1, 2\]"),
    "a list": (lambda: pcg.PackedBatch([1, 2], [2]), "list"),
    "negative id": (lambda: pcg.PackedBatch(tokens(1, -7), [2]), "-7"),
    "id outside the vocabulary": (lambda: pcg.PackedBatch(tokens(1, VOCAB), [2]), f"{VOCAB}.*vocabulary of {VOCAB}"),
    "prefix without cache": (lambda: pcg.PackedBatch(tokens(1, 2), [1, 1], [0, 3]), r"\[0, 3\].*cache"),
    "prefix for another number": (lambda: pcg.PackedBatch(tokens(1, 2), [1, 1], [3]), "1 prefix_lengths for 2"),
    "negative prefix": (lambda: pcg.PackedBatch(tokens(1, 2), [1, 1], [0, -1]), "-1"),
    "no batch": (lambda: tokens(1, 2), "PackedBatch"),
    "another device": (lambda: pcg.PackedBatch(tokens(1, 2).cuda(), [2]), "cuda"),
}  # fmt: skip


@over(COMBINATIONS)
def test_bad_input_is_refused_before_anything_is_written(strategy, replay):
    runner = captured(Small(), strategy, replay)
    good = batch_of([3, 2], 5)
    expected = runner.run(good)
    before = runner._tokens.clone(), runner._positions.clone(), int(runner.model.count), runner.report()
    for name, (make, message) in BAD.items():
        if name == "another device" and not torch.cuda.is_available():
            continue
        with pytest.raises(ValueError, match=message):
            runner.run(make())
    assert torch.equal(runner._tokens, before[0]) and torch.equal(runner._positions, before[1])
    assert int(runner.model.count) == before[2] and runner.report() == before[3]
    assert torch.equal(runner.run(good), expected)


def test_buckets_may_be_any_integers():
    assert pcg.PrefillRunner(Small(), buckets=(torch.tensor(16), 8, 8)).buckets == [8, 16]


@over(COMBINATIONS)
def test_a_model_may_limit_the_length_of_a_request(strategy, replay, device):
    model = Small().to(device)
    model.max_request_length = 6
    runner = captured(model, strategy, replay)
    with pytest.raises(ValueError, match="7.*6"):
        runner.run(batch_of([7], device=device))
    serve(runner, device, batches=[(6, 6), (3,)])


class Wrong(Small):
    def __init__(self, change):
        super().__init__()
        self.change = change

    def forward(self, tokens, positions):
        return self.change(super().forward(tokens, positions))


@over(CAPTURED)
@pytest.mark.parametrize(
    "change", [lambda h: (h, h), lambda h: h[:-1], lambda h: h[None], lambda h: {"h": h}], ids=["tuple", "rows", "batch", "dict"]
)
def test_a_model_that_returns_something_else(strategy, replay, change):
    runner = pcg.PrefillRunner(Wrong(change), strategy, [8], replay=replay)
    for _ in range(2):
        with pytest.raises(ValueError, match="one tensor with a row for each of the 8 tokens"):
            runner.capture(progress=False)
        assert runner.sequences == {}
    assert gc.isenabled() and not runner.model.count


# --- state of the model


@over(CAPTURED)
def test_buffers_are_what_they_were_after_capture(strategy, replay, device):
    model = Small().to(device)
    model.count.fill_(41)
    runner = captured(model, strategy, replay)
    assert model.count == 41  # H9
    for i in range(3):
        runner.run(batch_of([4], i, device))
    assert model.count == 44  # a replay does what a call does


@over(CAPTURED)
def test_writing_to_a_parameter_is_refused(strategy, replay, device):
    model = Small().to(device)

    class Trains(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, tokens, positions):
            hidden = self.inner(tokens, positions)
            self.inner.embed.weight.mul_(0.5)
            return hidden

    runner = pcg.PrefillRunner(Trains(), strategy, [8, 4], replay=replay)
    for _ in range(2):  # the second call does not accept what the first refused
        with pytest.raises(RuntimeError, match=r"inner\.(embed|linear)\.weight"):
            runner.capture(progress=False)
        assert runner.sequences == {}


def half_and_back(model):
    model.half().float()


def new_parameter(model):
    model.layers[0].qkv.weight = nn.Parameter(model.layers[0].qkv.weight.clone(), requires_grad=False)


def assigned(model):
    model.load_state_dict({name: t.clone() for name, t in model.state_dict().items()}, assign=True)


def new_submodule(model):
    old = model.layers[0].qkv
    model.layers[0].qkv = nn.Linear(WIDTH, old.out_features, bias=False).to(old.weight.device).requires_grad_(False)


def new_buffer(model):
    model.inv_freq = model.inv_freq.clone()


@over(CAPTURED)
@pytest.mark.parametrize(
    "move, name",
    [
        (half_and_back, r"(embed\.weight|inv_freq)"), (new_parameter, r"layers\.0\.qkv\.weight"), (assigned, r"embed\.weight"),
        (new_submodule, r"layers\.0\.qkv(\.weight)?"), (new_buffer, "inv_freq"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)  # fmt: skip
def test_moved_weights_are_named_and_nothing_is_returned(strategy, replay, move, name, device):
    runner = captured(tiny(device), strategy, replay, [8])
    batch, other = batch_of([3, 2], 1, device), batch_of([4, 4], 2, device)
    runner.run(batch)
    before = runner.report()
    old = {key: p for key, p in runner.model.named_parameters()}  # held, or the new weight might get the old address
    data = [p.data for p in old.values()]
    move(runner.model)
    for call in (lambda: runner.run(other), lambda: runner.capture(progress=False), lambda: runner.run(other)):
        with pytest.raises(RuntimeError, match=rf"^{name} is at 0x"):
            call()
    assert runner.report() == before and data


@over(CAPTURED)
def test_moved_weights_are_noticed_before_state_is_written(strategy, replay, device):
    runner = captured(Small().to(device), strategy, replay, [8])
    runner.run(batch_of([4], 1, device))
    old, runner.model.linear.weight = runner.model.linear.weight, nn.Parameter(torch.randn(WIDTH, WIDTH, device=device), False)
    with pytest.raises(RuntimeError, match=r"^linear\.weight is at"):
        runner.run(batch_of([5], 2, device))
    assert runner.model.count == 1 and old is not None


def test_moved_weights_are_noticed_before_state_is_written_also_after_a_failed_capture(device):
    runner = pcg.PrefillRunner(Small().to(device), "breakable", [8, 4])
    calls = []
    runner._make_strategy = lambda make=runner._make_strategy: FailsAtSecond(make(), calls)
    with pytest.raises(ZeroDivisionError):
        runner.capture(progress=False)
    assert list(runner.sequences) == [8]
    old, runner.model.linear.weight = runner.model.linear.weight, nn.Parameter(torch.randn(WIDTH, WIDTH, device=device), False)
    with pytest.raises(RuntimeError, match=r"^linear\.weight is at"):
        runner.run(batch_of([5], 2, device))
    assert runner.model.count == 0 and old is not None


@over(CAPTURED)
def test_what_changed_between_two_calls_of_capture_is_noticed(strategy, replay, device, monkeypatch):
    runner = pcg.PrefillRunner(Small().to(device), strategy, [8, 4], replay=replay)
    with monkeypatch.context() as patch:
        make = runner._make_strategy
        patch.setattr(runner, "_make_strategy", lambda: FailsAtSecond(make(), []))
        with pytest.raises(ZeroDivisionError):
            runner.capture(progress=False)
    runner.model.scale = 5
    with pytest.raises(pcg.RecompileError, match="scale"):
        runner.capture(progress=False)
    runner.model.scale = 2
    runner.capture(progress=False)
    serve(runner, device, batches=[(5,), (3,)])


class FailsAtSecond:
    def __init__(self, strategy, calls):
        self.strategy, self.calls = strategy, calls

    def __getattr__(self, name):
        return getattr(self.strategy, name)

    def capture(self, bucket, *static):
        self.calls.append(bucket)
        if len(self.calls) == 2:
            raise ZeroDivisionError
        return self.strategy.capture(bucket, *static)


@over(CAPTURED)
def test_debug_changes_no_result(strategy, replay, device):
    serve(captured(tiny(device), strategy, replay, debug=True), device, batches=[(5,), (2, 1), (7, 9)])


def test_debug_finds_a_piece_whose_input_has_moved(device):
    runner = captured(tiny(device), "tc_piecewise", "flat", [8], debug=True)
    entry = runner.implementation.piecewise.entries[0][8]
    entry.output = tuple(t.clone() if isinstance(t, torch.Tensor) else t for t in entry.output)  # as a bug of the pool would do
    message = r"input \w+ of submod_2, first read by \w+, is at 0x\w+, and was at 0x\w+ when size 8 .*\n.*tiny\.py:\d+ \("
    with pytest.raises(RuntimeError, match=message):
        runner.run(batch_of([8], 1, device))


@over(CAPTURED)
def test_debug_shows_what_was_not_written_anew(strategy, replay, device):
    """A graph that is left out, as a wrong order of pieces would do: its stale numbers look right, and are NaN with debug."""
    for debug in (False, True):
        runner = captured(tiny(device), strategy, replay, [8], debug=debug)
        batch = batch_of([5, 3], 1, device)
        runner.run(batch)
        if strategy == "tc_piecewise" and (replay == "stitched" or debug):
            runner.implementation.piecewise.entries[0][8].cudagraph.replay = lambda: None
        else:
            runner.sequences[8]._steps[0] = lambda: None
        hidden = runner.run(batch)
        assert hidden.isnan().any() == debug


def test_debug_finds_an_eager_segment_that_moves_what_it_writes(device):
    runner = captured(Moves().to(device), "tc_piecewise", "flat", [8], debug=True)
    serve(runner, device, batches=[(5,)])
    Moves.moved = True
    message = r"submod_1 \(pcg_ref\.rn_moves\) gave mixed other memory: it is at 0x\w+ .* at 0x\w+ .*\n  at .*runner\.py:\d+ \(rn_moves"
    try:
        for _ in range(2):
            with pytest.raises(RuntimeError, match=message):
                runner.run(batch_of([8], 1, device))
    finally:
        Moves.moved = False


@pytest.mark.parametrize("strategy", ["tc_piecewise", "breakable"])
def test_an_eager_segment_that_always_moves_what_it_writes_is_refused_at_capture(strategy, device, monkeypatch):
    monkeypatch.setattr(Moves, "moved", True)
    with pytest.raises(RuntimeError, match=r"rn_moves.* gave .* other memory"):
        captured(Moves().to(device), strategy, "flat", [8])


def test_debug_finds_changed_state_that_flat_replay_does_not_look_at(device):
    runner = captured(Small().to(device), "tc_piecewise", "flat", [8], debug=True)
    runner.model.scale = 3
    with pytest.raises(pcg.RecompileError, match="scale"):
        runner.run(batch_of([8], 1, device))


@over(CAPTURED)
def test_weights_changed_in_place_are_followed(strategy, replay, device):
    runner = captured(tiny(device), strategy, replay, [8])
    runner.model.load_state_dict(tiny(device, seed=7).state_dict())
    serve(runner, device)


@pytest.mark.parametrize("on_recompile", ["error", "eager"])
def test_a_guard_that_fails_after_capture(on_recompile, device):
    runner = captured(Small().to(device), "tc_piecewise", "stitched", [8, 4], on_recompile=on_recompile)
    runner.model.scale = 3
    batch = batch_of([5], 1, device)
    for _ in range(2):
        if on_recompile == "error":
            with pytest.raises(pcg.RecompileError, match="scale"):
                runner.run(batch)
        else:
            close(runner.run(batch), eager(runner.model, batch))
    assert runner.implementation.piecewise.trace.compile_count == 1
    reasons = runner.report()["eager"]
    assert len(reasons) == (on_recompile == "eager") and all("scale" in r and n == 2 for r, n in reasons.items())
    runner.model.scale = 2
    serve(runner, device, batches=[(5,), (2, 1)])


@over([c for c in CAPTURED if c[1] == "flat"])
@pytest.mark.parametrize("on_recompile", ["error", "eager"])
def test_a_changed_attribute_is_noticed_without_guards(strategy, replay, on_recompile, device):
    runner = captured(Small().to(device), strategy, replay, [8, 4], on_recompile=on_recompile)
    batch = batch_of([5], 1, device)
    for _ in range(2):
        runner.model.scale = 300
        if on_recompile == "error":
            with pytest.raises(pcg.RecompileError, match="scale"):
                runner.run(batch)
        else:
            close(runner.run(batch), eager(runner.model, batch))
        runner.model.scale = 2
        serve(runner, device, batches=[(5,), (2, 1)])
    assert all("scale" in reason for reason in runner.report()["eager"])


class Scales:
    value = 2


class Elsewhere(Small):
    """Reads what no attribute of a module holds; counts its forwards and keeps a tensor of the last, in Python."""

    def __init__(self):
        super().__init__()
        self.calls, self.last, self.name = 0, None, "elsewhere"

    def forward(self, tokens, positions):
        hidden = super().forward(tokens, positions) * Scales.value
        if not torch.compiler.is_compiling():
            self.calls += 1
            self.last = hidden
        return hidden


@over([c for c in CAPTURED if c[1] == "flat"])
def test_what_no_attribute_holds_is_frozen_in_a_flat_sequence(strategy, replay, device, monkeypatch):
    """No guard runs at replay: what the model's Python decided is what it was at capture. A lesson, not a wish."""
    runner = captured(Elsewhere().to(device), strategy, replay, [8])
    batch = batch_of([5], 1, device)
    expected = eager(runner.model, batch)
    monkeypatch.setattr(Scales, "value", 300)
    close(runner.run(batch), expected)


@over(CAPTURED)
def test_another_forward_is_noticed(strategy, replay, device):
    runner, batch = captured(Small().to(device), strategy, replay, [8]), batch_of([5], 1, device)
    runner.model.forward = lambda tokens, positions: torch.zeros(len(tokens), WIDTH, device=device)
    with pytest.raises(pcg.RecompileError, match="forward"):
        runner.run(batch)
    del runner.model.forward
    serve(runner, device, batches=[(5,)])


class Drops(Small):
    def forward(self, tokens, positions):
        return nn.functional.dropout(super().forward(tokens, positions), 0.5)


@over(CAPTURED)
def test_capture_draws_no_random_numbers_from_the_user(strategy, replay, device):
    def draws():
        return torch.randn(3), torch.randn(3, device=device)

    model = Drops().to(device)
    torch.manual_seed(5)
    expected = draws()
    torch.manual_seed(5)
    runner = captured(model, strategy, replay, [8, 4])
    assert all(map(torch.equal, draws(), expected))
    first, second = (runner.run(batch_of([5], 1, device)) for _ in range(2))
    assert not torch.equal(first, second)


@over([c for c in CAPTURED if c[1] == "flat"])
def test_attributes_that_the_forward_itself_sets_are_no_change(strategy, replay, device):
    runner = captured(Elsewhere().to(device), strategy, replay, [8, 4])
    for lengths in ([5], [30], [3], [40], [7]):  # 30 and 40 run eagerly, and set them
        batch = batch_of(lengths, 1, device)
        close(runner.run(batch), eager(runner.model, batch))
    assert sum(runner.report()["eager"].values()) == 2


def test_attributes_that_no_guard_reads_are_no_change(device):
    runner = captured(Elsewhere().to(device), "tc_piecewise", "flat", [8])
    for change in (dict(name="another"), dict(training=False), dict(calls=7)):
        for name, value in change.items():
            setattr(runner.model, name, value)
        serve(runner, device, batches=[(5,), (2, 1)])
    runner.model.scale = 3
    with pytest.raises(pcg.RecompileError, match="scale"):
        runner.run(batch_of([5], 1, device))


class Holder:
    def __init__(self, device):
        self.seen = torch.zeros(WIDTH, device=device)


class Unregistered(nn.Module):
    """State that is no registered buffer: an attribute, a list, a dictionary, an expanded view, an object's field."""

    def __init__(self, device):
        super().__init__()
        self.table = torch.randn(VOCAB, WIDTH, device=device)
        self.sums = [torch.zeros(WIDTH, device=device), torch.zeros(1, device=device).expand(WIDTH)]
        self.more = {"count": torch.zeros((), dtype=torch.int64, device=device)}
        self.holder = Holder(device)

    def state(self):
        return [self.table, *self.sums, *self.more.values(), self.holder.seen]

    def forward(self, tokens, positions):
        hidden = self.table[tokens]
        self.more["count"].add_(1)
        self.sums[0].add_(self.more["count"])
        self.holder.seen.add_(3)
        mixed = torch.empty_like(hidden)
        rn_into(hidden, mixed)
        return mixed + self.sums[0] + self.sums[1] + self.holder.seen


@over(CAPTURED)
def test_state_that_is_not_registered_is_what_it_was_after_capture(strategy, replay, device):
    model, twin = Unregistered(device), Unregistered(device)
    twin.table.copy_(model.table)
    before = [t.clone() for t in model.state()]
    runner = captured(model, strategy, replay, [8, 4])
    assert all(map(torch.equal, model.state(), before))
    for lengths in ([5], [3], [8]):
        batch = batch_of(lengths, 2, device)
        close(runner.run(batch), eager(twin, batch))
    assert all(map(torch.equal, model.state(), twin.state()))


class Rebinds(Small):
    """Puts a new tensor in place of the one that it reads, or of one that it does not."""

    def __init__(self, reads, device):
        super().__init__()
        self.reads, self.total = reads, torch.zeros(WIDTH, device=device)

    def forward(self, tokens, positions):
        hidden = super().forward(tokens, positions)
        self.total = self.total + 1 if self.reads else hidden[0] + 1
        return hidden + self.total


@over(CAPTURED)
def test_a_forward_that_replaces_a_tensor_it_reads_is_refused(strategy, replay, device):
    for buckets in ([8], [8, 4]):
        with pytest.raises(RuntimeError, match=r"total.*(Write into it|put it back|Change tensors in place)|L\['self'\]"):
            captured(Rebinds(True, device).to(device), strategy, replay, buckets)


def test_state_that_a_function_closes_over_is_what_it_was_after_capture(device):
    total, table = torch.zeros(WIDTH, device=device), torch.randn(VOCAB, WIDTH, device=device)

    def model(tokens, positions):
        total.add_(1)
        mixed = torch.empty_like(table[tokens])
        rn_into(table[tokens], mixed)
        return mixed + total

    for strategy in ("breakable", "full"):
        runner = pcg.PrefillRunner(model, strategy, [8, 4], device=device)
        runner.capture(progress=False)
        assert not total.any()


@over(CAPTURED)
def test_autocast_is_frozen_and_its_change_noticed(strategy, replay, device):
    runner, batch = captured(Small().to(device), strategy, replay, [8]), batch_of([5], 1, device)
    with torch.autocast(device, dtype=torch.bfloat16), pytest.raises(pcg.RecompileError, match="(?i)autocast"):
        runner.run(batch)
    close(runner.run(batch), eager(runner.model, batch))
    with torch.autocast(device, dtype=torch.bfloat16):
        runner = captured(Small().to(device), strategy, replay, [8], on_recompile="eager")
        close(runner.run(batch), eager(runner.model, batch))
        assert runner.report()["eager"] == {}
    close(runner.run(batch), eager(runner.model, batch))
    (reason,) = runner.report()["eager"]
    assert "autocast" in reason.lower()


# --- policies


@pcg.register_split_op()
@pcg.register_custom_op(fake=lambda x: torch.empty_like(x))
def rn_fresh(x: torch.Tensor) -> torch.Tensor:
    return x * 2


class Fresh(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH).requires_grad_(False)

    def forward(self, tokens, positions):
        return rn_fresh(rn_fresh(self.embed(tokens)) + 1) + 1


@pytest.mark.parametrize("strategy, name", [("tc_piecewise", r"submod_\d \(pcg_ref.rn_fresh\)"), ("breakable", "rn_fresh")])
def test_what_policies_did_is_reported(strategy, name, device):
    runner = captured(Fresh().to(device), strategy, "flat", [8, 32], on_oversize="error")
    serve(runner, device, batches=[(5,), (2, 3), (20,)])
    for length in (33, 12, 40):
        with pytest.raises(ValueError, match="no bucket"):
            runner.run(batch_of([length], 1, device))
    report = runner.report()
    assert all(re.fullmatch(name, key) for key in report["bridged"]) and sum(report["bridged"].values()) == 2 * 32 * WIDTH * 4
    assert report["refused"] == {"larger than the largest bucket 32": 2, "padding above the factor 2": 1} and report["eager"] == {}
    assert report["policies"]["on_oversize"] == "error" and report["policies"]["on_fresh_output"] == "bridge"
    assert report["compile_count"] == (1 if strategy == "tc_piecewise" else None)
    printed = str(report)
    assert "returns fresh memory" in printed and "2 batches refused: larger than the largest bucket 32" in printed


@pytest.mark.parametrize("strategy", ["tc_piecewise", "breakable"])
def test_fresh_memory_can_be_refused(strategy, device):
    with pytest.raises((ValueError, RuntimeError), match="rn_fresh.* fresh memory.*on_fresh_output='bridge'"):
        captured(Fresh().to(device), strategy, "flat", [8], on_fresh_output="error")


# --- padding (H13)


class Gives(nn.Module):
    """Returns its own memory."""

    def __init__(self, device):
        super().__init__()
        self.register_buffer("table", torch.randn(64, WIDTH, device=device))

    def forward(self, tokens, positions):
        return self.table[: tokens.shape[0]]


def test_a_result_of_an_eager_run_is_the_callers_too(device):
    model = Gives(device)
    runner = pcg.PrefillRunner(model, "eager")
    hidden = runner.run(batch_of([5], 1, device))
    expected = model.table[:5].clone()
    hidden.zero_()
    assert torch.equal(model.table[:5], expected)


@pytest.mark.parametrize("strategy", ["tc_piecewise", "breakable"])
def test_a_runner_that_is_at_work_refuses_a_second_batch(strategy, device):
    runner = captured(Reenters().to(device), strategy, "flat", [8])
    serve(runner, device, batches=[(5,)])
    Reenters.runner = runner
    try:
        with pytest.raises(RuntimeError, match="at work already"):
            runner.run(batch_of([4, 4], 1, device))
    finally:
        Reenters.runner = None
    serve(runner, device, batches=[(2, 3), (8,)])


@pytest.mark.parametrize("replay", ["flat", "stitched"])
def test_a_body_is_given_what_its_schema_declares(replay, device):
    runner = captured(Typed().to(device), "tc_piecewise", replay, [8])
    serve(runner, device, batches=[(5,), (3,)])
    assert Typed.seen == {float}


@over(CAPTURED)
def test_padded_rows_hold_nan_and_harm_nobody(strategy, replay, device):
    model = tiny(device)
    model.embed.weight[0] = float("nan")  # token 0 is what padding is made of
    runner = captured(model, strategy, replay)
    for seed, lengths in enumerate([[3, 2], [7], [1, 1, 1], [9, 4], [31]]):
        ids = batch_of(lengths, seed).tokens % (VOCAB - 1) + 1
        batch = pcg.PackedBatch(ids.to(device), lengths)
        result = runner.run(batch)
        assert result.isfinite().all()
        close(result, eager(model, batch))


@over(CAPTURED)
def test_padded_rows_are_defined(strategy, replay, device):
    """They are the same after any batch, so that nothing of an earlier request shows in them."""
    runner = captured(tiny(device), strategy, replay, [8])
    rows = []
    for seed in range(3):
        runner.run(batch_of([8], seed, device))
        runner.run(batch_of([5], 9, device))
        rows.append(runner.sequences[8].output.clone())
    assert rows[0].isfinite().all() and torch.equal(rows[0], rows[1]) and torch.equal(rows[0], rows[2])


# --- exceptions


@over(CUT)
def test_a_failing_body_at_replay(strategy, replay, device):
    runner = captured(Small().to(device), strategy, replay)
    for lengths in ([5], [12], [5]):
        Body.fails = True
        with pytest.raises(ZeroDivisionError):
            runner.run(batch_of(lengths, 3, device))
        Body.fails = False
        serve(runner, device)
    with pytest.raises(RuntimeError, match="no forward context"):
        pcg.current_context()


@over(CAPTURED)
@pytest.mark.parametrize("enabled", [True, False])
def test_a_failing_body_at_capture(strategy, replay, enabled, device, monkeypatch):
    """The second bucket fails: the first one keeps working, the others run eagerly, and capture goes on later."""
    runner = pcg.PrefillRunner(Small().to(device), strategy, BUCKETS, replay=replay)
    (gc.enable if enabled else gc.disable)()
    try:
        make = runner._make_strategy

        def make_failing():
            impl = make()
            capture = impl.capture

            def failing(bucket, *static):
                Body.fails = bucket <= 16
                return capture(bucket, *static)

            impl.capture = failing
            return impl

        monkeypatch.setattr(runner, "_make_strategy", make_failing)
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                runner.capture(progress=False)
            assert gc.isenabled() == enabled  # H14
            Body.fails = False
            assert list(runner.sequences) == [32] and runner.model.count == 0
    finally:
        gc.enable()
    serve(runner, device)
    assert runner.report()["buckets"][32]["replays"] == 2
    del runner.implementation.capture
    runner.capture(progress=False)
    assert sorted(runner.sequences) == runner.buckets
    serve(runner, device)


def test_a_model_that_cannot_be_traced(device):
    class Untraceable(Small):
        printing = True

        def forward(self, tokens, positions):
            hidden = super().forward(tokens, positions)
            if self.printing and hidden.sum() > 0:
                hidden = hidden + 0
            return hidden

    runner = pcg.PrefillRunner(Untraceable().to(device), "tc_piecewise", [8, 4])
    for _ in range(2):
        with pytest.raises(pcg.tracing.TraceError, match="test_runner.py"):
            runner.capture(progress=False)
        assert gc.isenabled() and runner.sequences == {} and runner.model.count == 0
    serve(runner, device)
    runner.model.printing = False
    runner.capture(progress=False)
    serve(runner, device)
    assert sorted(runner.sequences) == [4, 8]


def test_a_range_of_sizes_that_the_trace_excludes_is_an_error(device):
    class Branches(Small):
        def forward(self, tokens, positions):
            hidden = super().forward(tokens, positions)
            return hidden * 2 if tokens.shape[0] > 32 else hidden

    runner = pcg.PrefillRunner(Branches().to(device), "tc_piecewise", [64, 16])
    with pytest.raises(pcg.RecompileError, match="32|33"):
        runner.capture(progress=False)
    assert list(runner.sequences) == [64]
    serve(runner, device)  # 16 rows run eagerly
    serve(captured(Branches().to(device), "breakable", "flat", [64, 16]), device)  # no trace, no guard


def test_a_model_without_a_split_operator(device):
    class Plain(Small):
        def forward(self, tokens, positions):
            return self.embed(tokens) * positions[:, None]

    with pytest.raises(ValueError, match="no split operator"):
        captured(Plain().to(device), "tc_piecewise", "flat")
    for strategy in ("full", "breakable"):
        runner = captured(Plain().to(device), strategy, "flat")
        serve(runner, device)
        assert all((s.num_graphs, s.num_eager) == (1, 0) for s in runner.sequences.values())


def test_host_numbers_are_refused_in_a_full_graph(device):
    class Reads(Small):
        def forward(self, tokens, positions):
            return super().forward(tokens, positions) * pcg.current_context().num_tokens

    with pytest.raises(RuntimeError, match="frozen"):
        captured(Reads().to(device), "full", "flat")


# --- inference mode, several runners, threads


@over(CAPTURED)
@pytest.mark.parametrize("inside", ["model", "init", "capture", "run", "all"])
def test_inference_mode(strategy, replay, inside, device):
    def step(name, function):
        with torch.inference_mode(inside in (name, "all")):
            return function()

    model = step("model", lambda: tiny(device))
    runner = step("init", lambda: pcg.PrefillRunner(model, strategy, [8, 4], replay=replay))
    step("capture", lambda: runner.capture(progress=False))
    for seed in range(2):
        step("run", lambda: serve(runner, device, batches=[(3, 2), (4,), (8,)]))
    assert sum(row["replays"] for row in runner.report()["buckets"].values()) == 6


def test_several_runners_on_one_model_and_several_models(device):
    model = tiny(device)
    runners = [captured(model, *combination, buckets) for combination in CAPTURED for buckets in ([8], [16, 8])]
    runners.append(captured(tiny(device, layers=1, seed=5), "tc_piecewise", "stitched", [16, 8]))
    for runner in runners + runners[::-1]:
        serve(runner, device, batches=[(5, 2)])


@over(CAPTURED)
def test_deleting_a_runner_frees_its_graphs_and_memory(strategy, replay, device):
    model = tiny(device)
    runner = captured(model, strategy, replay, [8])
    result = runner.run(batch_of([5], 0, device))
    graph = next(s.graph for s in runner.sequences[8].segments if isinstance(s, pcg.GraphSegment))
    dead = [weakref.ref(runner), weakref.ref(runner.pool), weakref.ref(graph)]
    del runner, graph
    gc.collect()
    assert [ref() for ref in dead] == [None] * 3
    close(result, eager(model, batch_of([5], 0, device)))


@over(CAPTURED)
def test_threads(strategy, replay, device):
    """Captured on one thread, run on others; two runners at once, each with its own context and pool."""
    runners = [captured(tiny(device, seed=seed), strategy, replay, [8, 4]) for seed in range(2)]
    errors = []

    def work(runner, seed):
        try:
            for i in range(10):
                batch = batch_of([1 + (seed + i) % 4, 1 + i % 4], seed + i, device)
                close(runner.run(batch), eager(runner.model, batch))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(runner, 10 * i)) for i, runner in enumerate(runners)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]
