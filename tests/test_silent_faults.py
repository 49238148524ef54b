"""Faults that once gave wrong numbers without an error; each is now right, or refused by name."""

import gc
import weakref

import pytest
import torch
from torch import nn

import pcg_ref as pcg
from pcg_ref.ops import register_custom_op, register_split_op
from pcg_ref.strategies.breakable import capture_breakable


class Mode:
    value = 0


@register_split_op()
@register_custom_op(mutates_args=["output"])
def sf_copy(x: torch.Tensor, output: torch.Tensor) -> None:
    output.copy_(x * 3)


@pcg.eager_on_graph
def by_mode(x):
    return x if Mode.value == 0 else x[:3].clone() if Mode.value == 1 else x[Mode.value :]


@pytest.mark.parametrize("first, then", [(0, 1), (1, 0), (2, 3)])
def test_a_result_that_changes_between_argument_and_fresh_memory(first, then, device):
    Mode.value = first
    x = torch.randn(6, device=device)
    sequence = capture_breakable(lambda x: by_mode(x + 1) + 1, x, pool=pcg.GraphPool(device))
    Mode.value = then
    with pytest.raises(RuntimeError, match="result 0 of by_mode"):
        sequence.replay()
    Mode.value = first
    x.normal_()
    torch.testing.assert_close(sequence.replay(), by_mode(x + 1) + 1)


def test_results_that_share_fresh_memory_are_refused(device):
    @pcg.eager_on_graph
    def whole_and_part(x):
        y = x * 2
        return y, y[:2]

    with pytest.raises(RuntimeError, match="whole_and_part returns several tensors in the same fresh memory"):
        capture_breakable(lambda x: whole_and_part(x + 1)[0], torch.randn(4, device=device), pool=pcg.GraphPool(device))


def test_an_expanded_result_is_bridged(device):
    total = pcg.eager_on_graph(lambda x: x.sum().expand(4))
    x = torch.randn(4, device=device)
    sequence = capture_breakable(lambda x: total(x + 1) * x, x, pool=pcg.GraphPool(device))
    x.normal_()
    torch.testing.assert_close(sequence.replay(), (x + 1).sum() * x)


def view_is_written(x):
    out = torch.zeros(x.shape[0], 3, 4, device=x.device) + x[:, None, :1]
    sf_copy(x, out[:, 0])
    return out + 1


def view_of_another_dtype(x):
    bits, y = x.view(torch.int32), x + 1
    out = torch.empty_like(y)
    sf_copy(y, out)
    return (bits & 0x7FFFFFFF).view(torch.float32) + out


@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=pytest.mark.inductor)])
@pytest.mark.parametrize("function", [view_is_written, view_of_another_dtype])
def test_views_across_a_cut(function, compiler, device):
    piecewise = pcg.PiecewiseModel(pcg.trace(function, torch.randn(67, 4, device=device)), [sf_copy], compiler, [8])
    x = torch.randn(8, 4, device=device)
    sequence = piecewise.capture(x)
    for _ in range(3):
        x.normal_()
        torch.testing.assert_close(sequence.replay(), function(x))


@pytest.mark.parametrize(
    "region",
    [lambda a, b: (a * 1) @ (b * 1).conj(), lambda a, b: (b * 1).mH @ a, lambda a, b: (b * 1).conj().imag.clone() + a.real],
    ids=["conj", "mH", "imag"],
)
def test_lazy_conjugates_inside_a_region(region, device):
    a, b = (torch.randn(3, 3, dtype=torch.complex64, device=device) for _ in range(2))
    region(a, b)
    graph = pcg.capture(region, a, b)
    for _ in range(2):
        a.normal_(), b.normal_()
        graph.replay()
        torch.testing.assert_close(graph.output, region(a, b))


def test_a_second_dynamic_dimension_is_frozen(device):
    trace = pcg.trace(lambda x, y: (x * 2, y + 1), torch.zeros(13, device=device), torch.zeros(17, device=device))
    piecewise = pcg.PiecewiseModel(trace, (), capture_sizes=[8], allow_none=True)
    x, y = torch.randn(8, device=device), torch.randn(9, device=device)
    piecewise.capture(x, y[:5])
    with pytest.raises(RuntimeError, match="frozen"):
        piecewise(x, y[:7])


@pytest.mark.parametrize("strategy", ["tc_piecewise", "breakable", "full"])
def test_a_bias_that_was_none_at_capture_is_noticed(strategy, device):
    runner = pcg.PrefillRunner(pcg.TinyDecoder().to(device), strategy, [8])
    runner.capture(progress=False)
    qkv = runner.model.layers[0].qkv
    qkv.bias = nn.Parameter(torch.ones(qkv.out_features, device=device), requires_grad=False)
    with pytest.raises(RuntimeError, match=r"layers\.0\.qkv\.bias"):
        runner.run(pcg.PackedBatch(torch.arange(8, device=device), [8]))


@pytest.mark.parametrize("strategy", ["tc_piecewise", "breakable", "full"])
def test_a_model_is_freed_with_its_runner(strategy, device):
    model = pcg.TinyDecoder().to(device)
    weak = weakref.ref(model)
    runner = pcg.PrefillRunner(model, strategy, [8])
    runner.capture(progress=False)
    runner.run(pcg.PackedBatch(torch.arange(8, device=device), [3, 5]))
    gc.unfreeze()
    del model, runner
    gc.collect()
    assert weak() is None


class ReplacesItsBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, tokens, positions):
        hidden = tokens[:, None] + self.count
        output = torch.empty_like(hidden)
        sf_copy(hidden, output)
        self.count = self.count + 1
        return output


@pytest.mark.parametrize("strategy", ["tc_piecewise", "breakable", "full"])
def test_a_forward_that_replaces_its_buffer_is_refused_at_capture(strategy, device):
    model = ReplacesItsBuffer().to(device)
    count = model.count
    runner = pcg.PrefillRunner(model, strategy, [8])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="^count is at "):
            runner.capture(progress=False)
        assert model.count is count and count == 0


def a_size_from_the_host(x):
    scale = x.sum().long().item()
    output = torch.empty_like(x)
    sf_copy(x, output)
    return output * scale


def a_number_from_the_host(x):
    x = x + x.sum().item()
    output = torch.empty_like(x)
    sf_copy(x, output)
    return output


@pytest.mark.parametrize("function", [a_size_from_the_host, a_number_from_the_host])
def test_a_traced_number_of_the_host_is_refused_by_name(function):
    """Dynamo may trace ``item()``; what a piece of it does cannot be asked of fake tensors."""
    try:
        trace = pcg.trace(function, torch.ones(13, 4))
    except pcg.TraceError:
        return  # older ones do not
    piecewise = pcg.PiecewiseModel(trace, [sf_copy], capture_sizes=[8])
    with pytest.raises(pcg.CaptureError, match="needs a value on the host"):
        piecewise.capture(torch.ones(8, 4))


@pytest.mark.parametrize("in_place", [lambda t: t.t_(), lambda t: t.unsqueeze_(-1)], ids=["t_", "unsqueeze_"])
def test_a_bridged_result_that_becomes_its_own_view(in_place, device):
    fresh = pcg.eager_on_graph(lambda x: x * 2)

    def function(x):
        y = fresh(x + 1)
        in_place(y)
        return y + 1

    x = torch.randn(3, 4, device=device)
    sequence = capture_breakable(function, x, pool=pcg.GraphPool(device))
    for _ in range(2):
        x.normal_()
        torch.testing.assert_close(sequence.replay(), function(x))


def counts_in_a_constant(x):
    total = torch.tensor(0.0)
    total.add_(2)
    return x * total


@pytest.mark.parametrize("strategy", ["tc_piecewise", "breakable", "full"])
def test_a_constant_that_is_written_starts_anew_at_every_replay(strategy):
    """On CUDA the host's tensor is written once, at capture, and its value is an argument of the kernel."""
    x = torch.randn(8, 4)
    if strategy == "tc_piecewise":
        trace = pcg.trace(counts_in_a_constant, torch.randn(13, 4))
        replay = pcg.PiecewiseModel(trace, (), capture_sizes=[8], allow_none=True).capture(x).replay
    elif strategy == "breakable":
        replay = capture_breakable(counts_in_a_constant, x, pool=pcg.GraphPool("cpu")).replay
    else:
        graph = pcg.capture(counts_in_a_constant, x)
        replay = lambda: graph.replay() or graph.output  # noqa: E731
    for _ in range(3):
        x.normal_()
        torch.testing.assert_close(replay(), x * 2)


# --- what is not a registered part of a module, and what breaks leave behind


def batch_of(n, device, seed=0):
    tokens = torch.randint(1, 200, (n,), generator=torch.Generator().manual_seed(seed)).to(device)
    return pcg.PackedBatch(tokens, [n // 2, n - n // 2])


def eager(model, batch):
    with pcg.forward_context(batch), torch.no_grad():
        return model(batch.tokens, batch.positions)


def captured(model, strategy="breakable", buckets=(8, 16), **choices):
    runner = pcg.PrefillRunner(model, strategy, buckets, **choices)
    runner.capture(progress=False)
    return runner


class Wrapper:
    def __init__(self, model):
        self.models = [model]

    def __call__(self, tokens, positions):
        return self.models[0](tokens, positions)


@pytest.mark.parametrize("strategy", ["tc_piecewise", "breakable", "full"])
@pytest.mark.parametrize("wrap", [Wrapper, lambda model: lambda tokens, positions: model(tokens, positions)], ids=["object", "function"])
def test_the_weights_behind_a_wrapper_are_watched(wrap, strategy, device):
    model = pcg.TinyDecoder().to(device)
    wrapped = wrap(model)
    runner = captured(wrapped, strategy)
    assert runner.device.type == device
    torch.testing.assert_close(runner.run(batch_of(13, device)), eager(wrapped, batch_of(13, device)))
    model.norm.weight = nn.Parameter(model.norm.weight * 3, requires_grad=False)
    with pytest.raises(RuntimeError, match=r"norm\.weight is at"):
        runner.run(batch_of(13, device))


class Listed(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, 8)
        self.layers = [nn.Linear(8, 8)]  # a plain list

    def forward(self, tokens, positions):
        return self.layers[0](self.embed(tokens))


@pytest.mark.parametrize("strategy", ["breakable", "full"])
def test_modules_in_a_plain_list_are_watched(strategy, device):
    model = Listed().to(device)
    model.layers[0].to(device)
    runner = captured(model, strategy)
    model.layers[0].weight = nn.Parameter(torch.ones(8, 8, device=device))
    with pytest.raises(RuntimeError, match=r"layers\.weight is at"):
        runner.run(batch_of(13, device))


@pytest.mark.parametrize("strategy", ["tc_piecewise", "breakable", "full"])
def test_a_layer_that_was_added_is_noticed(strategy, device):
    model = pcg.TinyDecoder().to(device)
    runner = captured(model, strategy)
    model.layers.append(pcg.TinyDecoder(seed=3).to(device).layers[0])
    with pytest.raises(RuntimeError, match="layers has other submodules"):
        runner.run(batch_of(13, device))


class Casts(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.linear = nn.Embedding(256, 32), nn.Linear(32, 32)  # with gradients: what autocast caches

    def forward(self, tokens, positions):
        return self.linear(self.embed(tokens)).float()


@pytest.mark.parametrize("strategy", ["breakable", "full"])
def test_weights_changed_in_place_are_followed_under_autocast(strategy, device):
    model = Casts().to(device)
    with torch.autocast(device, torch.bfloat16):
        runner = captured(model, strategy)
    with torch.no_grad():
        model.linear.weight.mul_(5)
    for seed in range(2):
        with torch.autocast(device, torch.bfloat16):
            got = runner.run(batch_of(13, device, seed))
        with torch.autocast(device, torch.bfloat16):
            torch.testing.assert_close(got, eager(model, batch_of(13, device, seed)), rtol=1e-2, atol=1e-2)


class Leaves(nn.Module):
    """A break leaves its result in a list or in an attribute, where the next graph reads it."""

    def __init__(self, where):
        super().__init__()
        self.embed, self.where = nn.Embedding(256, 8).requires_grad_(False), where

    @pcg.eager_on_graph
    def compute(self, x, outs):
        value = x * float(pcg.current_context().batch.tokens.sum()) / 100
        if self.where == "result":
            return value
        outs.append(value)
        self.mask = value
        return None

    def forward(self, tokens, positions):
        outs = []
        value = self.compute(self.embed(tokens) + 0, outs)
        return {"result": value, "list": outs and outs[0], "attribute": getattr(self, "mask", None)}[self.where] + 1


def test_what_a_break_leaves_elsewhere_is_refused_where_a_graph_reads_it(device):
    model = Leaves("result").to(device)
    runner = captured(model)
    torch.testing.assert_close(runner.run(batch_of(13, device, 1)), eager(model, batch_of(13, device, 1)))
    for where in ("list", "attribute"):
        with pytest.raises(pcg.CaptureError, match="reads a tensor that compute has made.*Return it"):
            captured(Leaves(where).to(device))


class Getter(nn.Module):
    """A break returns the model's own state, and a graph writes to it, as to a cache."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, 8).requires_grad_(False)
        self.register_buffer("state", torch.zeros(8))

    @pcg.eager_on_graph
    def get(self, x):
        return self.state

    def forward(self, tokens, positions):
        x = self.embed(tokens)
        state = self.get(x + 0)
        state.add_(x[0])
        return x + state


def test_state_that_a_break_returns_is_written_to(device):
    model, twin = Getter().to(device), Getter().to(device)
    twin.load_state_dict(model.state_dict())
    runner = captured(model)
    for seed in range(3):
        torch.testing.assert_close(runner.run(batch_of(13, device, seed)), eager(twin, batch_of(13, device, seed)))
        torch.testing.assert_close(model.state, twin.state)


class Fails(nn.Module):
    """Replaces what it reads, or writes to a parameter, and fails at the second bucket."""

    def __init__(self, how):
        super().__init__()
        self.embed, self.how = nn.Embedding(256, 8).requires_grad_(False), how
        self.count, self.weight = [torch.zeros(8)], nn.Parameter(torch.zeros(8), requires_grad=False)

    def forward(self, tokens, positions):
        if tokens.shape[0] == 8:
            raise ZeroDivisionError
        if self.how == "replaces":
            self.count[0] = self.count[0] + 1
        else:
            self.weight.add_(1)
        return self.embed(tokens) + self.count[0].to(tokens.device) + self.weight


@pytest.mark.parametrize("how", ["replaces", "writes"])
def test_a_capture_that_fails_keeps_nothing_that_must_not_be_replayed(how):
    model = Fails(how)
    runner = pcg.PrefillRunner(model, "breakable", [8, 16])
    with pytest.raises(ZeroDivisionError):
        runner.capture(progress=False)
    assert runner.sequences == {} and not model.count[0].any()


class Layer:
    def __init__(self, device):
        self.keys = torch.zeros(4, device=device)


class Cache:
    def __init__(self, device):
        self.layers = [Layer(device)]


class Cached(nn.Module):
    """State two objects deep, as in the caches of transformers."""

    def __init__(self, device):
        super().__init__()
        self.embed, self.cache = nn.Embedding(256, 4).requires_grad_(False), Cache(device)

    def forward(self, tokens, positions):
        self.cache.layers[0].keys.add_(1)
        return self.embed(tokens) + self.cache.layers[0].keys


@pytest.mark.parametrize("strategy", ["breakable", "full"])
def test_state_deep_in_objects_is_what_it_was_after_capture(strategy, device):
    model = Cached(device).to(device)
    runner = captured(model, strategy)
    assert not model.cache.layers[0].keys.any()
    for count in (1, 2):
        torch.testing.assert_close(runner.run(batch_of(13, device)), model.embed(batch_of(13, device).tokens) + count)


class Lazy(nn.Module):
    """A table that grows when it is too short, as rotary caches do."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, 8).requires_grad_(False)
        self.table = torch.zeros(0)

    def forward(self, tokens, positions):
        if self.table.shape[0] < 64:
            self.table = torch.arange(64.0, device=tokens.device)[:, None]
        return self.embed(tokens) + self.table[positions]


@pytest.mark.parametrize("strategy", ["breakable", "full"])
@pytest.mark.parametrize("ran_before", [False, True])
def test_a_table_that_is_built_when_needed(ran_before, strategy, device):
    model = Lazy().to(device)
    if ran_before:
        eager(model, batch_of(13, device))
    runner = captured(model, strategy)
    for seed in range(3):
        torch.testing.assert_close(runner.run(batch_of(13, device, seed)), eager(model, batch_of(13, device, seed)))


def test_a_tensor_object_changed_where_it_was_made(device):
    model = Turned().to(device)
    runner = captured(model, "tc_piecewise", replay="stitched")
    for n in (13, 7, 16):
        torch.testing.assert_close(runner.run(batch_of(n, device)), eager(model, batch_of(n, device)))


class Turned(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.inner = nn.Embedding(256, 32).requires_grad_(False), pcg.TinyDecoder()

    def forward(self, tokens, positions):
        hidden = self.embed(tokens) * 2
        hidden.unsqueeze_(1)
        hidden.squeeze_(1)
        return self.inner(tokens, positions) + hidden


class Many(nn.Module):
    """Breaks whose fresh results are soon free: later ones get their memory, and are read by graphs."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, 8).requires_grad_(False)

    @pcg.eager_on_graph
    def pair(self, x):
        temporary = x * 3
        return temporary + 1, x * 10

    def forward(self, tokens, positions):
        x = self.embed(tokens)
        for _ in range(20):
            first, second = self.pair(x * 0.5)
            x = first - second + x
        return x


def test_memory_that_breaks_hand_on_to_each_other_is_no_hidden_result(device):
    model = Many().to(device)
    runner = captured(model)
    for seed in range(3):
        torch.testing.assert_close(runner.run(batch_of(13, device, seed)), eager(model, batch_of(13, device, seed)))
