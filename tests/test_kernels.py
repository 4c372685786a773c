"""Attention under a shadow mask: the definition, what a CPU runs, lifetime order and tile counts, bad input; and, in
processes of their own, the Triton kernels (tests/kernel_interpreter_cases.py) and their ahead-of-time compilation."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kernels
from kernels import NEVER, dense_attention, lifetime_order, shadow_attention, shadow_attention_reference, visible

ROOT = Path(__file__).parent.parent
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_triton = pytest.mark.skipif(kernels.triton is None, reason="triton is not installed")


def problem(B=2, nh=4, nkv=2, T=9, hs=8, dtype=torch.float64, seed=0):
    """q, k, v, and evicted_at between 0 and 2T, in which some queries see nothing."""
    rng = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, n, T, hs, generator=rng, dtype=dtype).to(DEVICE).requires_grad_() for n in (nh, nkv, nkv))
    evicted_at = torch.randint(0, 2 * T, (B, nkv, T), generator=rng, dtype=torch.int32)
    evicted_at[0, 0, : T // 2] = 0  # the first half of row 0 sees nothing in kv head 0
    return q, k, v, evicted_at.to(DEVICE)


def gradients(out, inputs):
    rng = torch.Generator().manual_seed(1)
    return torch.autograd.grad(out, inputs, torch.randn(out.shape, generator=rng).to(out))


# ---------------------------------------------------------------------------------------------------------------------
# The definition


def test_visible_is_the_rule():
    evicted_at = problem()[3]
    seen = visible(evicted_at)
    for b, h, i, j in torch.cartesian_prod(*map(torch.arange, (2, 2, 9, 9))).tolist():
        assert seen[b, h, i, j] == (j <= i < evicted_at[b, h, j])


def test_reference_by_hand():
    """One query over two keys with scores 0 and log 3: weights 1/4 and 3/4; once key 0 is gone, all on key 1."""
    q, k = torch.ones(1, 1, 3, 1), torch.tensor([0.0, 3.0, 5.0]).log().nan_to_num(neginf=0.0).view(1, 1, 3, 1)
    v = torch.tensor([8.0, 4.0, 100.0]).view(1, 1, 3, 1)
    evicted_at = torch.tensor([[[2, NEVER, 2]]], dtype=torch.int32)
    out = shadow_attention_reference(q, k, v, evicted_at, scale=1.0)
    torch.testing.assert_close(out.flatten(), torch.tensor([8.0, 0.25 * 8 + 0.75 * 4, 4.0]))


def test_reference_gradcheck():
    q, k, v, evicted_at = problem(nh=2, nkv=1, T=5, hs=2)
    torch.autograd.gradcheck(lambda *x: shadow_attention_reference(*x, evicted_at), (q, k, v))


def test_reference_shares_kv_heads_in_order():
    """Query heads 0, 1 belong to kv head 0 and 2, 3 to kv head 1."""
    q, k, v, evicted_at = problem()
    out = shadow_attention_reference(q, k, v, evicted_at)
    for head in range(4):
        h = slice(head // 2, head // 2 + 1)
        alone = shadow_attention_reference(q[:, head : head + 1], k[:, h], v[:, h], evicted_at[:, h])
        torch.testing.assert_close(out[:, head : head + 1], alone)


# ---------------------------------------------------------------------------------------------------------------------
# What runs on this device in this process: a CPU masks SDPA, CUDA runs the kernels (float64 masks SDPA there too)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 4e-2)])
@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (6, 2)])
def test_shadow_attention_agrees_with_reference(heads, dtype, tolerance):
    q, k, v, evicted_at = problem(nh=heads[0], nkv=heads[1], T=33, dtype=dtype)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    for scale in (None, 0.7):
        out = shadow_attention(q, k, v, evicted_at, scale)
        expected = shadow_attention_reference(*exact, evicted_at, scale)
        for a, e in zip((out, *gradients(out, (q, k, v))), (expected, *gradients(expected, exact)), strict=True):
            assert a.dtype == dtype
            print(f"max error {(a - e).abs().max():.1e}, mean {(a - e).abs().mean():.1e}, allowed {tolerance:.0e}")
            torch.testing.assert_close(a.double(), e, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("attention", [shadow_attention, shadow_attention_reference])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_query_that_sees_nothing_gives_zero(attention, dtype):
    q, k, v, evicted_at = problem(dtype=dtype)
    out = attention(q, k, v, evicted_at)
    dq, dk, dv = gradients(out, (q, k, v))
    assert not out[0, :2, :4].any() and not dq[0, :2, :4].any()
    assert not dk[0, 0, :4].any() and not dv[0, 0, :4].any()
    assert out[0, 2:].any() and dq[0, 2:].any()
    assert all(x.isfinite().all() for x in (out, dq, dk, dv))
    nothing = attention(q, k, v, torch.zeros_like(evicted_at))
    assert not nothing.any() and not any(g.any() for g in gradients(nothing, (q, k, v)))


@pytest.mark.parametrize("heads", [(4, 4), (4, 1)])
def test_dense_is_the_case_without_evictions(heads):
    q, k, v, evicted_at = problem(nh=heads[0], nkv=heads[1])
    for end in (NEVER, 9, 10):  # every value >= T means the same
        expected = shadow_attention_reference(q, k, v, torch.full_like(evicted_at, end), scale=0.3)
        expected = (expected, *gradients(expected, (q, k, v)))
        for out in (dense_attention(q, k, v, 0.3), shadow_attention(q, k, v, scale=0.3)):
            torch.testing.assert_close((out, *gradients(out, (q, k, v))), expected)


def test_autocast_decides_the_type():
    q, k, v, evicted_at = problem(dtype=torch.float32)
    with torch.autocast(DEVICE, torch.bfloat16):
        mixed = (q, k.bfloat16(), v)  # as projections in bfloat16 and a rotation in float32 would hand them over
        assert shadow_attention(*mixed, evicted_at).dtype == dense_attention(*mixed).dtype == torch.bfloat16
        out = shadow_attention_reference(*mixed, evicted_at)
    expected = shadow_attention_reference(*(x.bfloat16() for x in mixed), evicted_at)  # in float32 inside
    assert torch.equal(out, expected)


@pytest.mark.slow
def test_torch_compile_sees_no_graph_break():
    q, k, v, evicted_at = problem(dtype=torch.float32)
    compiled = torch.compile(shadow_attention, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v, evicted_at), shadow_attention(q, k, v, evicted_at))


BAD = {
    "q.ndim": (lambda q, k, v, e: (q[0], k, v, e), r"q \(B, nh, T, hs\)"),
    "empty": (lambda q, k, v, e: (q[:, :, :0], k, v, e), "no size 0"),
    "v.shape": (lambda q, k, v, e: (q, k, v[..., :4], e), r"\(2, 2, 9, 4\)"),
    "k.T": (lambda q, k, v, e: (q, k[:, :, :8], v[:, :, :8], e), r"\(2, 2, 8, 8\)"),
    "nh % nkv": (lambda q, k, v, e: (q[:, :3], k, v, e), r"multiple of nkv.*\(2, 3, 9, 8\)"),
    "hs": (lambda q, k, v, e: (*(x.repeat(1, 1, 1, 33) for x in (q, k, v)), e), "at most 256.*264"),
    "dtypes": (lambda q, k, v, e: (q, k.half(), v, e), "one type out of.*torch.float16"),
    "integers": (lambda q, k, v, e: (q.long(), k.long(), v.long(), e), "one type out of.*torch.int64"),
    "int64": (lambda q, k, v, e: (q, k, v, e.long()), "evicted_at as torch.int32.*torch.int64"),
    "per query head": (lambda q, k, v, e: (q, k, v, e.repeat(1, 2, 1)), r"\(B, nkv, T\).*\(2, 4, 9\)"),
    "per row": (lambda q, k, v, e: (q, k, v, e[:, 0]), r"\(B, nkv, T\).*\(2, 9\)"),
    "k.device": (lambda q, k, v, e: (q, k.to("meta"), v, e), "on one device.*on meta"),
    "device": (lambda q, k, v, e: (q, k, v, e.to("meta")), "beside q.*meta"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name):
    spoil, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        shadow_attention(*spoil(*problem(dtype=torch.float32)))


def test_without_triton(monkeypatch):
    """Import and a CPU call without triton; where a GPU would need it, one warning and the right result."""
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, kernels\n"
        "x = torch.ones(1, 1, 3, 2)\n"
        "assert kernels.triton is None\n"
        "out = kernels.shadow_attention(x, x, x, torch.ones(1, 1, 3).int())\n"
        "assert out[0, 0, :, 0].tolist() == [1, 0, 0]"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, env=os.environ | {"TRITON_INTERPRET": "1"})

    monkeypatch.setattr(kernels, "triton", None)
    monkeypatch.setattr(kernels, "INTERPRET", True)  # a CPU that asks for the kernel is in the same place as a GPU
    kernels._warn_slow.cache_clear()
    q, k, v, evicted_at = problem(dtype=torch.float32)
    with pytest.warns(UserWarning, match="triton is not installed") as caught:
        out = shadow_attention(q, k, v, evicted_at)
        shadow_attention(q, k, v, evicted_at)
    assert len(caught) == 1
    torch.testing.assert_close(out, shadow_attention_reference(q, k, v, evicted_at))


# ---------------------------------------------------------------------------------------------------------------------
# Lifetime order and tiles


def test_tile_states_are_what_the_mask_says():
    """Never skip what is seen, never call full what is not; and where one key makes a tile, say exactly what it is."""
    evicted_at = problem(T=21)[3]
    birth = torch.arange(21, dtype=torch.int32, device=DEVICE).expand_as(evicted_at)
    for block in (4, 8, 32):
        states = kernels.tile_states(birth, evicted_at, block)
        n = -(-21 // block)
        assert states.shape == (2, 2, n, n)
        seen = visible(evicted_at)
        for i in range(n):
            for j in range(n):
                tile = seen[..., i * block : (i + 1) * block, j * block : (j + 1) * block].flatten(-2)
                state = states[..., i, j]
                assert not tile[state == kernels.SKIPPED].any()
                assert tile[state == kernels.FULL].all()
                if (j + 1) * block <= 21:  # keys past the end make a last tile partial
                    assert (state[tile.all(-1)] == kernels.FULL).all()
    states = kernels.tile_states(birth, evicted_at, 1)
    assert (states == torch.where(visible(evicted_at), kernels.FULL, kernels.SKIPPED)).all()


def decode_lifetimes(T, budget, heads, recent=64, sinks=4):
    """Random eviction by hand: once `budget` keys are there, each new token takes the slot of the one that drew the
    smallest number, the first and the most recent ones excepted. -> (1, heads, T) int32"""
    rng = torch.Generator().manual_seed(0)
    worth, head = torch.rand(heads, T, generator=rng), torch.arange(heads)
    evicted_at = torch.full((heads, T), NEVER, dtype=torch.int32)
    slots = torch.arange(budget).repeat(heads, 1)  # (heads, budget): the position in each slot
    for t in range(budget, T):
        protected = (slots < sinks) | (slots >= t - recent)
        victim = worth.gather(1, slots).masked_fill(protected, 2.0).argmin(dim=1)
        evicted_at[head, slots[head, victim]] = t
        slots[head, victim] = t
    return evicted_at[None]


@pytest.mark.parametrize("T, most", [(4096, 0.55), pytest.param(16384, 0.20, marks=pytest.mark.slow)])
def test_lifetime_order_saves_tiles(T, most):
    evicted_at = decode_lifetimes(T, budget=512, heads=2)
    order = lifetime_order(evicted_at)
    assert (order.sort(dim=-1).values == torch.arange(T)).all(), "not a permutation"
    n = T // 64
    dense = 2 * n * (n + 1) / 2
    assert kernels.visited_tiles(torch.full_like(evicted_at, NEVER)).sum() == dense
    natural, lifetime = (
        kernels.visited_tiles(evicted_at, lifetimes).sum().item() / dense for lifetimes in (False, True)
    )
    print(f"T={T}: natural {natural:.3f}, lifetime order {lifetime:.3f} of dense")
    assert lifetime <= most < natural


def test_lifetime_order_sorts_stretches_by_death():
    """5 to 9 tiles make stretches of 2. Here a tile is 2 keys, so 4 keys each, in order of death, then of birth."""
    deaths = [9, NEVER, 3, 10, 5, 7, 0, 7, NEVER, 9]
    order = lifetime_order(torch.tensor([[deaths]], dtype=torch.int32), block=2)
    assert order[0, 0].tolist() == [2, 0, 1, 3, 6, 4, 5, 7, 9, 8]


@pytest.mark.parametrize("budget", [512, 256])
def test_lifetime_order_does_no_harm_to_short_rows(budget):
    """Half or a quarter of 1024 keys survive: little can be saved, and hardly a tile may be lost."""
    evicted_at = decode_lifetimes(1024, budget, heads=4)
    natural, lifetime = (kernels.visited_tiles(evicted_at, lifetimes).sum().item() for lifetimes in (False, True))
    assert lifetime <= (1.0 if budget == 512 else 0.75) * natural


# ---------------------------------------------------------------------------------------------------------------------
# The kernels, in processes of their own


def run(*arguments, **environment):
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=os.environ | environment, capture_output=True, text=True
    )
    print(done.stdout[-20000:], done.stderr[-5000:])
    return done


@needs_triton
@pytest.mark.parametrize(
    "where",
    [
        "interpreter",
        pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")),
    ],
)
@pytest.mark.parametrize("cases", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_kernels_agree_with_the_reference(where, cases):
    environment = {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1" if where == "interpreter" else "0"}
    done = run(
        "-m", "pytest", "-q", "tests/kernel_interpreter_cases.py", "-m", cases, "-p", "no:cacheprovider", **environment
    )
    assert done.returncode == 0 and re.search(r"\d+ passed", done.stdout)


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("hs", [64, 128])
def test_kernels_compile_ahead_of_time(arch, hs):
    """Registers suffice (nearly, on sm_80), and so does the shared memory of every GPU since 2020."""
    lengths = (None, 1) if hs == 64 else (None,)  # T = 1 is a constant to Triton: another kernel
    code = (
        "import json, torch\n"
        "from experiments.bench import KERNELS, compile_kernel\n"
        f"rows = [compile_kernel(kernel, {arch}, {hs}, torch.bfloat16, T) for T in {lengths} for kernel in KERNELS]\n"
        "print('rows', json.dumps(rows))"
    )
    done = run("-c", code, TRITON_INTERPRET="0")
    assert done.returncode == 0
    for row in json.loads(done.stdout.partition("rows ")[2]):
        assert 0 < row["registers"] <= 255 and row["spill_bytes"] <= (0 if arch == 90 else 64)
        assert row["shared_bytes"] <= 99 * 1024
