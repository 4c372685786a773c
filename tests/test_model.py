"""The transformer against the same transformer in numpy (util.Reference), and the claims about its shadow mask."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from util import DEVICE, HEADS, NEVER, Reference, rng, tiny

from kv_compress import KVCache
from model import GPT, GPTConfig, rope_angles, rotate

KINDS = {  # every switch of GPTConfig that changes the arithmetic
    "plain": {},
    "qk_norm": {"qk_norm": True},
    "bias": {"qkv_bias": True},
    "wide heads": {"head_dim": 10},  # 10 != 24 / 4
    "untied": {"tie_head": False},
    "all": {"qk_norm": True, "qkv_bias": True, "head_dim": 10, "tie_head": False, "rope_theta": 500.0, "ffn_dim": 20},
}


def draw(model, B=2, T=12, seed=0):
    return torch.randint(model.config.vocab_size, (B, T), generator=rng(seed), device=DEVICE)


def mask(model, B, T, value=NEVER):
    """evicted_at (L,B,nkv,T), the same for every key."""
    return torch.full((model.config.n_layer, B, model.config.n_kv_head, T), value, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("kind", KINDS)
def test_forward_is_the_formulas(kind, heads):
    """To 1e-12 in float64, so nothing is downcast on the way; to 1e-4 in float32."""
    model = tiny(1, *heads, dtype=torch.float64, **KINDS[kind])
    idx = draw(model)
    want = torch.tensor(np.stack([Reference(model).forward(row) for row in idx.cpu().numpy()]), device=DEVICE)
    assert want.std() > 1  # a model that says something
    got = model(idx)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(model.float()(idx).double(), want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("position", [0, 1, 255, 257, 1500])  # bf16 cannot hold 257
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_rope_turns_complex_numbers_by_exact_angles(position, dtype):
    hs, theta = 16, 10_000.0
    for autocast in (False, True):
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            cos, sin = rope_angles(torch.tensor([[position]], device=DEVICE), hs, theta, dtype)
        assert cos.dtype == sin.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    x = torch.randn(1, 1, 1, hs, generator=rng(0), device=DEVICE, dtype=torch.float64)
    z = torch.complex(x[..., : hs // 2], x[..., hs // 2 :])  # half-split pairs
    angle = [position * theta ** (-2 * i / hs) for i in range(hs // 2)]
    z = z * torch.tensor([complex(math.cos(a), math.sin(a)) for a in angle], dtype=torch.complex128, device=DEVICE)
    tolerance = 1e-11 if dtype == torch.float64 else 1e-6 + 2e-7 * position  # float32 has 24 bits for the angle too
    torch.testing.assert_close(rotate(x, cos, sin), torch.cat((z.real, z.imag), -1), atol=tolerance, rtol=0)
    assert rotate(x.bfloat16(), cos, sin).dtype == torch.bfloat16  # a rotated key is stored as it came


def test_queries_and_keys_meet_by_distance_alone():
    """<R_m q, R_n k> depends on m - n: what makes a packed or a cached key need no position of its own."""
    q, k = torch.randn(2, 1, 1, 1, 8, generator=rng(0), device=DEVICE, dtype=torch.float64)
    at = [rope_angles(torch.tensor([[m]], device=DEVICE), 8, 100.0, torch.float64) for m in (3, 10, 1003, 1010)]
    a, b = (rotate(q, *at[i + 1]).flatten() @ rotate(k, *at[i]).flatten() for i in (0, 2))
    assert abs(a - b) < 1e-9 < 1e-3 < abs(a - q.flatten() @ k.flatten())


def test_grouped_heads_are_repeated_heads():
    grouped = tiny(2, 6, 2, torch.float64, qkv_bias=True, qk_norm=True)
    full = tiny(3, 6, 6, torch.float64, qkv_bias=True, qk_norm=True)
    state, hs = grouped.state_dict(), grouped.config.head_dim
    for name in [n for n in state if ".qkv." in n]:
        q, k, v = state[name].split((6 * hs, 2 * hs, 2 * hs))
        k, v = (z.unflatten(0, (2, hs)).repeat_interleave(3, dim=0).flatten(0, 1) for z in (k, v))
        state[name] = torch.cat((q, k, v))
    full.load_state_dict(state)
    idx = draw(full)
    torch.testing.assert_close(full(idx), grouped(idx), atol=1e-12, rtol=0)
    # A mask of each kv head is the same mask of each of its query heads.
    evicted_at = torch.randint(1, 14, (2, 2, 2, 12), generator=rng(1), device=DEVICE, dtype=torch.int32)
    repeated = evicted_at.repeat_interleave(3, dim=2)
    torch.testing.assert_close(full(idx, repeated), grouped(idx, evicted_at), atol=1e-12, rtol=0)


def test_no_token_sees_a_later_one():
    model = tiny(4, dtype=torch.float64)
    idx = draw(model)
    changed = idx.clone()
    changed[:, 7] = (idx[:, 7] + 1) % model.config.vocab_size
    for evicted_at in (None, mask(model, 2, 12)):
        difference = (model(idx, evicted_at) - model(changed, evicted_at)).abs().amax(-1)  # (B, T)
        assert difference[:, :7].max() == 0 and difference[:, 7:].min() > 1e-3


@pytest.mark.parametrize("never", [NEVER, 12])
def test_a_mask_that_evicts_nothing_is_the_full_view(never):
    model = tiny(5, qk_norm=True)
    idx = draw(model)
    torch.testing.assert_close(model(idx, mask(model, 2, 12, never)), model(idx), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("w", [1, 3, 11])
def test_sliding_window(w):
    """evicted_at[j] = j + w: a query sees itself and the w - 1 keys before it."""
    model, T = tiny(6, dtype=torch.float64), 12
    idx, j = draw(model, T=T), torch.arange(T, device=DEVICE)
    seen = np.tri(T, dtype=bool) & ~np.tri(T, k=-w, dtype=bool)
    want = np.stack([Reference(model).forward(row, seen) for row in idx.cpu().numpy()])
    got = model(idx, (j + w).int().expand_as(mask(model, 2, T)).contiguous())
    np.testing.assert_allclose(got.detach().cpu().numpy(), want, atol=1e-12)
    assert (got - model(idx)).abs().max() > 1e-2


def test_sequences_packed_in_one_row_are_the_same_sequences_alone():
    """Keys evicted at the end of their own sequence; the shift in position does not matter to rotary attention."""
    model = tiny(7, dtype=torch.float64)
    idx = draw(model, B=1, T=12)
    ends = torch.tensor([5] * 5 + [12] * 7, dtype=torch.int32, device=DEVICE)
    packed = model(idx, ends.expand_as(mask(model, 1, 12)).contiguous())
    alone = torch.cat((model(idx[:, :5]), model(idx[:, 5:])), dim=1)
    torch.testing.assert_close(packed, alone, atol=1e-10, rtol=0)


def test_a_query_without_keys_gets_nothing_and_gives_nothing():
    """Row 0: keys 0-2 die before query 3 is born, and key 3 was never born. Row 1: padding only."""
    model, T = tiny(8, n_layer=1, dtype=torch.float64), 8
    idx, evicted_at = draw(model, T=T), mask(model, 2, T)
    evicted_at[:, 0, :, :3], evicted_at[:, 0, :, 3], evicted_at[:, 1] = 3, 0, 0
    logits = model(idx, evicted_at)
    F.cross_entropy(logits.flatten(0, 1), idx.flatten()).backward()
    assert logits.isfinite().all() and all(p.grad.isfinite().all() for p in model.parameters())

    qkv = model.blocks[0].attention.qkv.weight
    qkv.grad = None
    (logits := model(idx, evicted_at))[1].square().sum().backward(retain_graph=True)
    logits[0, 3].square().sum().backward()
    assert (qkv.grad == 0).all()  # nothing flows into attention through a query that sees nothing
    with torch.no_grad():
        model.blocks[0].attention.out.weight.zero_()
        blind = model(idx)
    torch.testing.assert_close(logits[1], blind[1], atol=1e-12, rtol=0)
    torch.testing.assert_close(logits[0, 3], blind[0, 3], atol=1e-12, rtol=0)
    assert (logits[0, [0, 1, 2, 4]] - blind[0, [0, 1, 2, 4]]).abs().amax(-1).min() > 1e-3  # the others do see


def test_padding_changes_nothing_for_real_tokens():
    """A row right-padded with token 0 whose padding is evicted before it is born: same logits, same gradients."""
    model = tiny(9, dtype=torch.float64)
    idx, evicted_at = draw(model, B=1, T=9), mask(model, 1, 9)
    evicted_at[..., 2] = 6
    gradients = []
    for pad in (0, 4):
        model.zero_grad()
        logits = model(F.pad(idx, (0, pad)), F.pad(evicted_at, (0, pad), value=0))[:, :9]
        logits.square().sum().backward()
        gradients.append([logits.detach(), *(p.grad.clone() for p in model.parameters())])
    for alone, padded in zip(*gradients, strict=True):
        torch.testing.assert_close(padded, alone, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("qk_norm", [False, True])
def test_weights_stay_float32_masters_under_autocast(qk_norm):
    model = tiny(10, qk_norm=qk_norm)
    idx, evicted_at = draw(model), mask(model, 2, 12)
    evicted_at[..., 3] = 6
    for view in (None, evicted_at):
        model.zero_grad()
        with torch.autocast(DEVICE, torch.bfloat16):
            logits = model(idx, view)
        logits.float().logsumexp(-1).sum().backward()
        exact = model(idx, view)
        assert 1e-4 < (logits - exact).abs().max() < 0.5  # bf16 arithmetic inside, and nothing worse
        assert {p.dtype for p in model.parameters()} == {p.grad.dtype for p in model.parameters()} == {torch.float32}


def test_the_generator_alone_decides_the_first_weights():
    models = []
    for seed in (0, 0, 1):
        torch.rand(1)  # the global generator must not matter
        models.append(GPT(GPTConfig(), torch.Generator().manual_seed(seed)))
    a, b, c = models
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(a.embed.weight, c.embed.weight)
    assert a.head.weight is a.embed.weight and all((p == 1).all() for p in a.parameters() if p.dim() == 1)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"n_layer": 0}, "n_layer=0: must be at least 1"),
        ({"n_head": 4, "n_kv_head": 3}, "n_head=4 must be a multiple of n_kv_head=3"),
        ({"n_embd": 30}, "n_embd=30 must be a multiple of n_head=4, or give head_dim"),
        ({"head_dim": 5}, "head_dim=5 must be even"),
    ],
)
def test_a_bad_config_is_refused(options, named):
    with pytest.raises(ValueError, match=named):
        GPTConfig(**options)


def test_a_bad_forward_is_refused():
    model = tiny()
    cache = KVCache(model.config, [3, 2], 1, 4)
    with pytest.raises(ValueError, match="65 tokens in a row, but block_size=64"):
        model(draw(model, T=65))
    with pytest.raises(ValueError, match=r"evicted_at \(learner\) or cache \(sampler\), not both"):
        model(draw(model, T=3), evicted_at=mask(model, 2, 3), cache=cache)
    for wrong in (mask(model, 2, 3).long(), mask(model, 2, 4), mask(model, 1, 3)):
        with pytest.raises(ValueError, match="evicted_at"):
            model(draw(model, T=3), evicted_at=wrong)
    model(draw(model, T=3), cache=cache)
    with pytest.raises(ValueError, match="2 tokens a row in call 2: a cache takes 3 once, then 1 up to 4 times"):
        model(draw(model, T=2), cache=cache)
