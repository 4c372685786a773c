"""The Triton kernels against the reference. tests/test_kernels.py runs this file in a process of its own, because
Triton decides at import whether kernels are interpreted: with TRITON_INTERPRET=1 on the CPU, without it on CUDA.

    TRITON_INTERPRET=1 python -m pytest tests/kernel_interpreter_cases.py -m "slow or not slow"
"""

import functools
import random
from itertools import combinations

import pytest
import torch

import kernels
from kernels import NEVER, attend, lifetime_order, shadow_attention, shadow_attention_reference, visible
from kv_compress import POLICIES, rollout
from model import GPT, GPTConfig

DEVICE = "cpu" if kernels.INTERPRET else "cuda"
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 1e-2}  # of |error| / (1 + |expected|)

AXES = {
    "T": (1, 2, 15, 16, 17, 63, 64, 65, 127, 129),
    "hs": (16, 48, 64, 80, 128),
    "heads": ((4, 4), (4, 1), (6, 2), (14, 2), (9, 3)),
    "mask": ("survivors", "dead", "self", "policy", "random", "edges"),
    "layout": ("plain", "fused_qkv", "transposed", "nan_past_the_end"),
    "dout": ("plain", "expanded", "strided"),
    "dtype": (torch.float32, torch.bfloat16, torch.float16),
}


def rows_of(T):
    return 2 if T < 63 else 1


def cost(case):
    """Seconds, about, in units of what one tile takes in the interpreter."""
    tiles = -(-case["T"] // kernels.tile_size(case["dtype"], case["hs"]))
    heads = case["heads"][0] * (rows_of(case["T"]) + (case["layout"] == "nan_past_the_end"))
    return heads * (1 + tiles * (tiles + 1) // 2)


def every_pair(axes):
    """Few cases, cheap ones, in which any two values of any two axes meet."""
    rng = random.Random(0)
    missing = {((a, x), (b, y)) for a, b in combinations(axes, 2) for x in axes[a] for y in axes[b]}
    cases = []
    while missing:
        candidates = []
        for pair in rng.sample(sorted(missing, key=repr), min(len(missing), 40)):
            case = {name: rng.choice(values) for name, values in axes.items()} | dict(pair)
            candidates.append((len(missing & set(combinations(case.items(), 2))), -cost(case), case))
        best = max(candidates, key=lambda c: c[:2])[2]
        missing -= set(combinations(best.items(), 2))
        cases.append(best)
    return cases


def every_value(cases):
    """The cheapest way, about, to see each value of each axis among `cases`."""
    missing = {item for case in cases for item in case.items()}
    chosen = []
    while missing:
        chosen.append(max(cases, key=lambda case: len(missing & set(case.items())) / cost(case)))
        missing -= set(chosen[-1].items())
    return chosen


CASES = every_pair(AXES)
QUICK = every_value(CASES)


@functools.cache
def policy_lifetimes(policy, n_kv_head):
    """What a real policy evicts in a cache of 10 slots: (2, n_kv_head, 129) int32, two ragged rows."""
    config = GPTConfig(
        block_size=140, vocab_size=11, n_layer=1, n_head=n_kv_head, n_kv_head=n_kv_head, n_embd=8, head_dim=8
    )
    model = GPT(config, torch.Generator().manual_seed(0))
    budgets = dict(kv_budget=10, prompt_budget=5, sinks=1, recent=3, pool=1, policy=policy)
    rolled = rollout(model, [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4]], 1, 126, eos_ids=[99], **budgets)
    return rolled.evicted_at[0, :, :, :129]


def make_lifetimes(mask, rows, nkv, T, rng):
    """evicted_at (rows, nkv, T) int32"""
    j = torch.arange(T, dtype=torch.int32).expand(rows, nkv, T)
    if mask == "policy":
        policies = sorted(POLICIES)
        return policy_lifetimes(policies[(nkv + T) % len(policies)], nkv)[:rows, :, :T].contiguous()
    ends = {
        "survivors": torch.where(torch.rand(j.shape, generator=rng) < 0.5, NEVER, T),  # which mean the same
        "dead": (j * torch.rand(j.shape, generator=rng)).int(),
        "self": j + 1,
        "random": torch.randint(0, 2 * T, j.shape, generator=rng),
        "edges": torch.randint(0, T // 16 + 2, j.shape, generator=rng) * 16
        + torch.randint(-1, 2, j.shape, generator=rng),
    }
    return ends[mask].int().contiguous()


def make_input(layout, shape, dtype, rng):
    """A leaf of `shape` (rows, heads, T, hs) and the tensor that attention gets: the leaf, in that memory layout."""
    rows, heads, T, hs = shape
    leaf = torch.randn(shape, generator=rng).to(DEVICE, dtype).requires_grad_()
    if layout == "transposed":
        return leaf, leaf.mT.contiguous().mT
    if layout == "fused_qkv":  # a third of one wide matrix (rows, T, 3 * heads * hs)
        fused = torch.cat([leaf.transpose(1, 2).flatten(2)] * 3, dim=2)
        return leaf, fused.view(rows, T, 3, heads, hs)[:, :, 1].transpose(1, 2)
    if layout == "nan_past_the_end":  # one row more, all NaN, and NaN behind each head's last position
        padded = torch.full((rows + 1, heads, T + 3, hs), torch.nan, device=DEVICE, dtype=dtype)
        padded[:rows, :, :T] = leaf
        return leaf, padded[:, :, :T]
    return leaf, leaf


def assert_close(name, actual, expected, tolerance):
    """The one comparison of this file: prints what it found, so that a failure shows how far off it is."""
    error = (actual.double() - expected.double()).abs() / (1 + expected.double().abs())
    print(f"{name}: max error {error.max():.1e}, mean {error.mean():.1e}, allowed {tolerance:.0e}")
    assert not actual.isnan().any(), f"{name} has NaN"
    assert error.max() <= tolerance, f"{name}: error {error.max():.1e} > {tolerance:.0e}"


def name_of(case):
    return "-".join(
        str(v).replace("torch.", "").replace("(", "").replace(")", "").replace(", ", "of") for v in case.values()
    )


def check(T, hs, heads, mask, layout, dout, dtype):
    """Output and all three gradients of one case, against the reference in float64."""
    (nh, nkv), rows, rng = heads, rows_of(T), torch.Generator().manual_seed(T * 1000 + hs)
    evicted_at = make_lifetimes(mask, rows, nkv, T, rng)
    leaves, given = zip(*(make_input(layout, (rows, n, T, hs), dtype, rng) for n in (nh, nkv, nkv)), strict=True)
    extra = given[0].shape[0] - rows  # the NaN row: whatever comes out of it must stay in it
    padded = torch.cat([evicted_at, torch.full((extra, nkv, T), NEVER, dtype=torch.int32)]).to(DEVICE)
    out = shadow_attention(*given, padded)
    out = out[:rows] if extra else out  # a slice would hand a contiguous gradient to the kernels
    weight = torch.randn(rows, T, nh, hs, generator=rng).transpose(1, 2)  # (rows, nh, T, hs), strided
    weight = {"strided": weight, "plain": weight.contiguous(), "expanded": torch.ones(()).expand(out.shape)}[dout]
    weight = weight.to(DEVICE, dtype)
    gradients = torch.autograd.grad(out, leaves, weight)

    exact = [x.detach().double().requires_grad_() for x in leaves]
    expected = shadow_attention_reference(*exact, evicted_at.to(DEVICE))
    expected_gradients = torch.autograd.grad(expected, exact, weight.double())
    for name, a, e in zip(("out", "dq", "dk", "dv"), (out, *gradients), (expected, *expected_gradients), strict=True):
        assert_close(name, a, e, TOLERANCE[dtype])
    empty = ~visible(evicted_at).any(-1).repeat_interleave(nh // nkv, dim=1).to(DEVICE)  # (rows, nh, T)
    assert not out[empty].any() and not gradients[0][empty].any(), "a query that sees nothing must give exactly 0"


def as_parameters(cases):
    return [pytest.param(case, id=name_of(case), marks=[] if case in QUICK else pytest.mark.slow) for case in cases]


@pytest.mark.parametrize("case", as_parameters(CASES))
def test_agrees_with_the_reference(case):
    check(**case)


@pytest.mark.parametrize(
    "hs, dout",
    [(1, "expanded"), (24, "strided"), *(pytest.param(hs, "plain", marks=pytest.mark.slow) for hs in (200, 256))],
)
def test_any_head_size(hs, dout):
    check(T=18, hs=hs, heads=(2, 1), mask="random", layout="plain", dout=dout, dtype=torch.float32)


def small_problem(T=70, hs=16, nh=2, nkv=1, dtype=torch.float32):
    """q, k, v (1, heads, T, hs), and evicted_at (1, nkv, T) int32 between 0 and 2T."""
    rng = torch.Generator().manual_seed(T)
    q, k, v = (torch.randn(1, n, T, hs, generator=rng).to(DEVICE, dtype).requires_grad_() for n in (nh, nkv, nkv))
    return q, k, v, torch.randint(0, 2 * T, (1, nkv, T), generator=rng, dtype=torch.int32).to(DEVICE)


@pytest.mark.slow
def test_order_of_keys_does_not_matter():
    q, k, v, evicted_at = small_problem()
    expected = shadow_attention_reference(q, k, v, evicted_at)
    expected_gradients = torch.autograd.grad(expected.square().sum(), (q, k, v))
    natural = torch.arange(70, device=DEVICE).expand_as(evicted_at)
    shuffled = torch.randperm(70, generator=torch.Generator().manual_seed(0)).to(DEVICE).expand_as(evicted_at)
    for order in (natural, natural.flip(-1), shuffled, lifetime_order(evicted_at)):
        kk, vv = (x.gather(2, order[..., None].expand_as(x)) for x in (k, v))
        out = attend(q, kk, vv, order.int(), evicted_at.gather(2, order), 16**-0.5)
        gradients = torch.autograd.grad(out.square().sum(), (q, k, v))
        for name, a, e in zip(
            ("out", "dq", "dk", "dv"), (out, *gradients), (expected, *expected_gradients), strict=True
        ):
            assert_close(name, a, e, 1e-5)


def test_dead_tiles_are_never_touched():
    """5 tiles make stretches of 2. In two of them every other key is dead, so that lifetime order makes one tile of the
    dead ones. They may even be NaN."""
    tile = kernels.tile_size(torch.float32, 16)
    q, k, v, _ = small_problem(T=5 * tile)
    evicted_at = torch.full((1, 1, 5 * tile), NEVER, dtype=torch.int32, device=DEVICE)
    dead = slice(1, 4 * tile, 2)
    evicted_at[..., dead] = 0
    with torch.no_grad():
        k[:, :, dead], v[:, :, dead] = torch.nan, torch.nan
    out = shadow_attention(q, k, v, evicted_at)
    gradients = torch.autograd.grad(out.sum(), (q, k, v))
    for x in (out, *gradients):
        assert x.isfinite().all()
    assert not gradients[1][:, :, dead].any() and not gradients[2][:, :, dead].any()


@pytest.mark.slow
def test_custom_operator_and_compile():
    q, k, v, evicted_at = small_problem(T=17)

    def run(q, k, v, evicted_at):
        return shadow_attention(2 * q, k, v, evicted_at).square().sum()

    expected = torch.autograd.grad(run(q, k, v, evicted_at), (q, k, v))
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)  # fullgraph: a graph break is an error
    for name, a, e in zip(
        ("dq", "dk", "dv"), torch.autograd.grad(compiled(q, k, v, evicted_at), (q, k, v)), expected, strict=True
    ):
        assert_close(name, a, e, 1e-6)
    birth = torch.arange(17, dtype=torch.int32, device=DEVICE).expand_as(evicted_at)
    states = kernels.tile_states(birth, evicted_at, 32)
    torch.library.opcheck(kernels._attend, (q, k, v, birth, evicted_at, states, 32, 0.25))


def test_autocast():
    q, k, v, evicted_at = small_problem()
    with torch.autocast(DEVICE, torch.bfloat16):
        out = shadow_attention(q, k.bfloat16(), v, evicted_at)
        gradients = torch.autograd.grad(out.sum(), (q, k, v))
    assert out.dtype == torch.bfloat16 and all(g.dtype == torch.float32 for g in gradients)
    assert_close("out", out, shadow_attention_reference(q, k, v, evicted_at), TOLERANCE[torch.bfloat16])


BIG = [(70_000, 1, 1, 16), (2_100, 64, 64, 256)]  # more heads than a grid axis holds; offsets beyond 2**31


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(9, 2, 5, 16)] if DEVICE == "cpu" else BIG, ids=str)
def test_last_row_of_a_large_batch(sizes):
    rows, nh, T, hs = sizes
    if DEVICE == "cuda" and torch.cuda.mem_get_info()[0] < 40e9 and rows * nh * T * hs > 2**31:
        pytest.skip("needs 40 GB of GPU memory")
    rng = torch.Generator(DEVICE).manual_seed(0)
    q = torch.randn(rows, nh, T, hs, device=DEVICE, generator=rng, dtype=torch.bfloat16).requires_grad_()
    k, v = (
        torch.randn(rows, 1, T, hs, device=DEVICE, generator=rng, dtype=torch.bfloat16).requires_grad_() for _ in "kv"
    )
    evicted_at = torch.randint(0, 2 * T, (rows, 1, T), device=DEVICE, generator=rng, dtype=torch.int32)
    out = shadow_attention(q, k, v, evicted_at)
    gradients = [g[-1:] for g in torch.autograd.grad(out.sum(), (q, k, v))]
    last = [x[-1:].detach().double().requires_grad_() for x in (q, k, v)]
    expected = shadow_attention_reference(*last, evicted_at[-1:])
    expected_gradients = torch.autograd.grad(expected.sum(), last)
    for name, a, e in zip(
        ("out", "dq", "dk", "dv"), (out[-1:], *gradients), (expected, *expected_gradients), strict=True
    ):
        assert_close(name, a, e, TOLERANCE[torch.bfloat16])
