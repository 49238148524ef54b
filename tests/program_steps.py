"""The grammar's words: one line or a few, which read and write values that were made before.

{a}: any value; {f}: floating point of two dimensions, {F}: of any; {m}: a mask; {i}: int64. Each place is drawn anew, but {a0} {f0} are
the same in the whole step. {n} {p}: new names. {k}: 0, 1 or 2. Sums are over remainders, so that they stay exact; anything else at most
doubles a number.
"""

# The lines of __init__. All are always there, so that shrinking a program is dropping steps.
INIT = [
    "self.embed = nn.Embedding.from_pretrained(ints(7, 4, seed={s}, device=device))",
    "self.weight = nn.Parameter(ints(4, 4, seed={s} + 1, device=device), requires_grad=False)",
    "self.bias = nn.Parameter(ints(4, seed={s} + 2, device=device), requires_grad=False)",
    "self.register_buffer('state', ints(4, seed={s} + 3, device=device))",
    "self.register_buffer('matrix', ints(3, 4, seed={s} + 4, device=device, dtype=torch.float64))",
    "self.register_buffer('count', torch.zeros((), dtype=torch.int64, device=device))",
    "self.register_buffer('cache', torch.zeros(128, 4, device=device), persistent=False)",
    "self.table = ints(5, 4, seed={s} + 5, device=device)",
    "self.order = torch.tensor([2, 0, 3, 1], device=device)",
    "self.factor, self.shift, self.wide = {factor}, {shift}, {wide}",
    "self.block, self.other = Block({s} + 6, device), Block({s} + 7, device)",
]

EVERYWHERE = {
    "elementwise": [
        "{n} = {F}.abs()", "{n} = -{F}", "{n} = {F}.relu()", "{n} = {a} * 2", "{n} = {F} - {k}.0", "{n} = {a}.clamp(-5, 5)",
        "{n} = {a} + {a}", "{n} = {a} - {F}", "{n} = torch.maximum({F}, {F})", "{n} = {F} * {F} % 11",
        "{n} = torch.add({a}, {a}, alpha=-1)", "{n} = ({a} > 0) ^ ({a} > {k})", "{n} = torch.where({m}, {a}, {a})",
        "{n} = {F}.masked_fill({m}, {k})", "{n} = {a} > {k}", "{n} = ~{m}", "{n} = {a} + self.table[{k}]", "{n} = {a} // 2",
    ],
    "types": [
        "{n} = {a}.double()", "{n} = {a}.long()", "{n} = {a}.float()", "{n} = {a}.to(torch.int32)", "{n} = {a} != 0",
        "{n} = {F}.to({a}.dtype)", "{n} = {f}.abs().view(torch.int32) % 11", "{n} = {a}.type_as({a})",
    ],
    "views": [
        "{n} = {f}[:, 1:]", "{n} = {f}[:, ::2]", "{n} = {a}[:, None]", "{n} = {a}.unsqueeze(-1)", "{n} = {f}.unflatten(1, (2, -1))",
        "{n} = {f}.view(T, 2, -1)", "{n} = {a}.flatten(1)", "{n} = {a}.transpose(-1, -2)", "{n} = {a}.squeeze(1)", "{n} = {a}[:, 0]",
        "{n} = {a}[..., -1]", "{n}, {p} = {f}.chunk(2, dim=1)", "{n}, {p} = {f0}.split([1, {f0}.shape[1] - 1], dim=1)",
        "{n} = {f}.unbind(1)[{k}]", "{n} = {a}.narrow(1, 1, 2)", "{n} = {a0}.view({a0}.shape[0], -1)", "{n} = {a}.reshape(T, -1)",
        "{n} = {a}.view({a}.shape)", "{n} = {a}.expand(T, 4)", "{n} = {a}[:, None].expand(-1, 3)", "{n} = {a}.detach()",
        "{n} = {a0}.view({a0}.size(0), {a0}.shape[1] // 2, 2)", "{n} = {a}.expand_as({a})", "{n} = {a}.view_as({a})", "{n} = {a}.T.T",
        "{n} = {a}.movedim(1, -1)", "{n} = tokens", "{n} = positions",
    ],
    "memory": [
        "{n} = {a}.contiguous()", "{n} = {a}.clone()", "{n} = {f}.t().contiguous().t()", "{n} = torch.empty_like({a}).copy_({a})",
        "{n} = {f}.to(memory_format=torch.contiguous_format)", "{n} = {a0}.new_zeros({a0}.shape)", "{n} = {a}.new_ones(T, 4)",
        "{n} = torch.zeros(T, 4, device=tokens.device)", "{n} = torch.full_like({a}, {k})", "{n} = torch.ones(4, device=tokens.device)",
        "{n} = torch.arange(4, device=tokens.device)", "{n} = torch.arange(T, device=tokens.device)[:, None] % 11",
        "{n} = torch.eye(4, device=tokens.device)", "{n} = torch.tensor({k}.0, device=tokens.device)",
    ],
    "in place": [
        "{a}.add_({k})", "{a}.mul_(-1)", "{a}.add_({a})", "{a}.clamp_(-7, 7)", "{a}.copy_({a})", "{a}[:, 1] += 1", "{a}[:, 0] = {a}[:, -1]",
        "{a}.zero_()", "{a}.fill_({k})", "{F}.masked_fill_({m}, {k})", "{a}.add_(1).mul_(2).sub_({a})", "{F}.relu_()", "{a}.neg_()",
        "torch.add({f0}, {k}, out={f0})", "{f}[:, 1:].sub_({F})", "{a}.t().add_({k})", "{n} = {a}.add_({a})",
        "{f}.index_fill_(1, self.order[:1], {k})", "{f}.index_copy_(1, self.order, {f})", "{a} += {a}",
    ],
    "state": [
        "{n} = self.state", "{n} = self.matrix", "{n} = self.table", "{n} = self.state * 1", "{n} = {f} + self.state",
        "{n} = self.count + 0", "self.count.add_(1).remainder_(11)", "self.state.add_({k}).remainder_(11)",
        "self.state.copy_(self.state.flip(0))", "{n} = self.bias", "self.matrix[{k}].add_(self.state).remainder_(11)",
        "self.matrix.copy_(self.matrix.flip(0).clone())", "self.state[1:].sub_(self.matrix[1, 1:]).remainder_(11)", "{n} = self.cache[:T]",
    ],
    "weights": [
        "{n} = ({f} % 11) @ self.weight % 11", "{n} = nn.functional.linear({f} % 11, self.weight, self.bias) % 11",
        "{n} = self.embed(tokens % 7)", "{n} = torch.einsum('td,de->te', {f} % 11, self.weight) % 11",
        "{n} = self.embed.weight[tokens % 7]", "{n} = ({f} % 11) @ self.weight[:, :2] % 11",
    ],
    "gather": [
        "{n} = self.table[tokens % 5]", "{n} = {f}[:, self.order]", "{n} = {f}.index_select(1, self.order[:2])",
        "{n} = {f}.gather(1, {i} % 2)", "{n} = {f}.scatter(1, {i}.abs() % 2, {k}.0)", "{n} = {f}.take_along_dim({i} % 2, dim=1)",
        "{n} = self.table[{i} % 5]",
    ],
    "joins": [
        "{n} = torch.cat([{f}, {f}], dim=1)", "{n} = torch.stack([{a}, {a}], dim=1)", "{n} = torch.stack([{a}, {a}], -1).flatten(1)",
        "{n} = torch.cat([{f0}, {f0}[:, :1]], dim=-1)", "{n} = torch.hstack([{f}, {f}])",
    ],
    "columns": [
        "{n} = ({f} % 11).sum(-1) % 11", "{n} = {f}.amax(1)", "{n} = ({f} % 11).cumsum(1) % 11", "{n} = {f}.argmax(1)",
        "{n} = ({f} % 11).sum(1, keepdim=True) % 11", "{n}, {p} = {f}.sort(dim=1, stable=True)", "{n} = {f}.topk(2, dim=1).values",
        "{n} = {f}.max(1).values", "{n} = {m}.any(-1)", "{n} = {f}.flip(1)", "{n} = {f}.roll(1, 1)",
    ],
    "split": [
        "{n} = torch.empty_like({a})\nfz_into({a}, {n})", "fz_into({F}, {F})", "{n} = fz_fresh({a})", "{n}, {p} = fz_pair({f})",
        "{n} = fz_writes_and_returns({f}, {F})", "{n} = fz_list([{f}, {f}, {f}])", "{n}, {p} = fz_returns_list({f})",
        "{n} = fz_options({f})", "{n} = fz_options({f}, {F}, times={k}, negate=True)", "{n} = fz_options({f}, bias=None, scale=2.0)",
        "{n} = fz_options({f}, {F}, self.factor)", "{n} = fz_mask({a})", "{n} = fz_transposed({f})",
        "{n} = fz_mask({f})\n{p} = fz_fresh({f})",
        "{n} = torch.empty_like({f0})\n{p} = torch.empty_like({f0})\nfz_into({f0}, {n})\nfz_into({n}, {p})",
        "fz_into({F}, {F})\nfz_into({F}, {F})", "{n} = torch.zeros(T, 2, 4, device=tokens.device)\nfz_into({f}, {n}[:, 0])",
        "fz_into({F}, self.state)", "{n} = torch.empty_like({f})\nfz_into({f}, {n})",
    ],
    "metadata": [
        "{n} = torch.zeros_like({f})\nfz_requests_into({f}, {n})", "{n} = fz_requests({f})", "{n} = fz_total({f})", "fz_count(self.count)",
        "{n} = {f} + fz_total({f})", "fz_requests_into({f}, {f})",
    ],
    "attributes": [
        "{n} = {F} * self.factor", "{n} = {F} + (self.shift if self.wide else -1)", "{F}.add_(self.shift)", "if self.wide:\n    {F}.neg_()",
        "{n} = {f}[:, : self.shift]", "{n} = fz_options({f}, None, self.shift, negate=self.wide)",
        "self.state.mul_(self.factor).remainder_(11)",
    ],
    "modules": [
        "{n} = self.block({f})", "{n} = self.other({f})", "{n} = self.block(self.other({f}))",
    ],
}  # fmt: skip

# Where the number of rows is a size that was captured, and no row is padding.
ACROSS_ROWS = {
    "objects": ["{F}.unsqueeze_(-1)", "{f}.t_()", "{f}.transpose_(0, 1)", "{F}.squeeze_(-1)"],
    "rows": [
        "{n} = ({f} % 11).sum(0) % 11", "{n} = ({f} % 11).cumsum(0) % 11", "{n} = {f}.amax(0)", "{n} = ({F} % 11).sum() % 11",
        "{n} = {F} + T", "{n} = {f}.t()", "{n} = ({f} % 11).t() @ ({f} % 11) % 11", "{n} = {a}.reshape(-1)", "{n} = {a}.view(-1, 2)",
        "{n} = {a}[1:]", "{n} = {a}[: T // 2]", "{n} = {a}[-1]", "{n} = {a}[0]", "{n} = {f}.flip(0)", "{n} = {f}.roll(1, 0)",
        "{n} = {a}[tokens % T]", "{n} = torch.cat([{a}, {a}])", "{n} = {a}[::2]", "{n} = torch.zeros(T + 1, 4, device=tokens.device)",
        "{n} = {a0}.view(T * {a0}.shape[1])", "{n} = torch.outer({F}, {F}) % 11", "{a}[0] = {a}[-1]", "{a}[1:].add_({k})",
        "self.state.add_(({f} % 11).sum(0)).remainder_(11)", "{n} = {a}.flatten()", "{n} = {f}.as_strided((T, 2), (2, 1))",
        "{n} = {f} * {a}.shape[0] % 11", "{n} = {a0}.expand(3, *{a0}.shape)", "tokens.add_(1)",
        "{n} = {f0}.new_empty({f0}.size(1), T).copy_({f0}.t())", "self.cache[:T].copy_({a})", "self.cache[:T] += {f}",
        "self.cache.index_copy_(0, torch.arange(T, device=tokens.device), {f})", "fz_into({f}, self.cache[:T])",
        "{n} = torch.zeros(7, 4, device=tokens.device).index_add_(0, tokens % 7, {f} % 11) % 11",
    ],
}  # fmt: skip

# For the breakable strategy.
BREAKS = {
    "breaks": [
        "{n} = br_same({a})", "{n} = br_view({f})", "br_write({F})", "br_write({F}, by={k})",
        "{n}, {p} = br_dict({f}, factor={k}).values()", "{n} = br_requests({f})", "{n} = br_host({f})",
    ],
}  # fmt: skip

# What no capture can hold; a few of them, to see that they are refused by name.
REFUSED = {
    "host": [
        "{n} = {f} + {F}.sum().item()", "{n} = {f}[{m}]", "if {F}.sum() > 0:\n    {f}.add_(1)", "{n} = {m}.nonzero()",
    ],
}  # fmt: skip
