"""GRPO, SMD and the importance corrections against numbers worked out by hand, and against hostile input."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import losses

NAN, INF = math.nan, math.inf


def f64(*values):
    return torch.tensor(values, dtype=torch.float64)


def draw(seed, B, T, V):
    """Random aligned tensors of a step: logits of two views, targets, old logp, per-row advantages, a ragged mask."""
    g = torch.Generator().manual_seed(seed)
    masked = torch.randn(B, T, V, generator=g, dtype=torch.float64)
    dense = masked + 0.5 * torch.randn(B, T, V, generator=g, dtype=torch.float64)
    targets = torch.randint(V, (B, T), generator=g)
    old = losses.token_logprobs(masked, targets) + 0.3 * torch.randn(B, T, generator=g, dtype=torch.float64)
    advantages = torch.randn(B, generator=g, dtype=torch.float64)
    start = torch.randint(0, T, (B, 1), generator=g)
    length = torch.randint(1, T + 1, (B, 1), generator=g)
    mask = (torch.arange(T) >= start) & (torch.arange(T) < start + length)  # (B, T), never empty
    return masked, dense, targets, old, advantages, mask


# ---- token_logprobs, entropy -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.6, 1.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_token_logprobs_is_the_log_softmax_in_at_least_float32(temperature, dtype):
    logits = (5 * torch.randn(3, 4, 7, generator=torch.Generator().manual_seed(0))).to(dtype)
    targets = torch.arange(12).view(3, 4) % 7
    got = losses.token_logprobs(logits, targets, temperature)
    want = (logits.double() / temperature).log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert (got - want).abs().max() < (1e-12 if dtype == torch.float64 else 1e-5)


def test_token_logprobs_by_hand():
    logits = f64(0, math.log(3)).view(1, 1, 2)  # probabilities 1/4 and 3/4; at temperature 1/2 they are 1/10 and 9/10
    target = torch.tensor([[1]])
    assert losses.token_logprobs(logits, target).exp().item() == pytest.approx(0.75)
    assert losses.token_logprobs(logits, target, 0.5).exp().item() == pytest.approx(0.9)


def test_float32_logits_are_not_copied():
    logits = torch.randn(2, 3, 5)
    assert losses._scale(logits, 1.0).data_ptr() == logits.data_ptr()


def test_entropy_by_hand_and_with_forbidden_tokens():
    logits = f64(0, 0, 0, 0, -INF).requires_grad_()
    h = losses.entropy(logits)
    h.backward()
    assert h.item() == pytest.approx(math.log(4))
    assert logits.grad.abs().max() < 1e-12  # uniform: the maximum of the entropy
    assert losses.entropy(f64(10, -80, 0), 0.05).item() == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("temperature", [0, -1, 0.0, NAN])
def test_temperature_must_be_positive(temperature):
    logits, targets = torch.zeros(1, 2, 3), torch.zeros(1, 2, dtype=torch.int64)
    for call in (
        lambda: losses.token_logprobs(logits, targets, temperature),
        lambda: losses.reverse_kl(logits, logits, temperature=temperature),
        lambda: losses.opd_advantages(logits, logits, targets, temperature=temperature),
    ):
        with pytest.raises(ValueError, match="temperature is"):
            call()


# ---- group_advantages ------------------------------------------------------------------------------------------------


def test_group_advantages_by_hand():
    rewards = torch.tensor([1.0, 0, 0, 1, 4, 0, 0, 0])
    got = losses.group_advantages(rewards, 4)
    b = 0.5 / (0.5 + 1e-4)  # population std of 1 0 0 1 is 1/2
    s = math.sqrt(3)  # and of 4 0 0 0 it is sqrt(3), with mean 1
    want = torch.tensor([b, -b, -b, b, 3 / (s + 1e-4), -1 / (s + 1e-4), -1 / (s + 1e-4), -1 / (s + 1e-4)])
    torch.testing.assert_close(got, want)
    assert losses.group_advantages(rewards, 4, scale="none").tolist() == [0.5, -0.5, -0.5, 0.5, 3, -1, -1, -1]


@pytest.mark.parametrize("scale", ["std", "none"])
@pytest.mark.parametrize("reward", [0.0, 0.1, 1 / 3, 1e-30, 1e8, -7.7])
@pytest.mark.parametrize("size", [1, 3, 7, 8])
def test_equal_rewards_give_exactly_zero(scale, reward, size):
    assert (losses.group_advantages(torch.full((2 * size,), reward), size, scale) == 0).all()


def test_a_group_that_differs_in_the_last_bit_only_stays_small():
    r = torch.tensor([1.0, 1.0, 1.0, 1.0 + 2**-23])
    assert losses.group_advantages(r, 4).abs().max() < 0.01


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_reward_that_is_no_number_is_named(bad):
    with pytest.raises(ValueError, match=r"reward 2 is (nan|inf|-inf)"):
        losses.group_advantages(torch.tensor([0.0, 1.0, bad, 1.0]), 2)


@pytest.mark.parametrize("size", [0, 3, -2])
def test_groups_must_divide_the_rewards(size):
    with pytest.raises(ValueError, match="4 rewards do not make groups"):
        losses.group_advantages(torch.zeros(4), size)


# ---- grpo_loss -------------------------------------------------------------------------------------------------------


def test_grpo_loss_by_hand():
    rho, advantages = f64(1.5, 0.5, 1.5, 0.5, 1.1, 9).view(1, 6), f64(1, -1, -1, 1, 2, 5).view(1, 6)
    mask = torch.tensor([[True, True, True, True, True, False]])
    logp = rho.log().requires_grad_()
    loss, stats = losses.grpo_loss(logp, torch.zeros(1, 6).double(), advantages, mask, normalizer=4)
    # min(rho A, clamp(rho, .8, 1.2) A) = 1.2, -.8, -1.5, .5, 2.2; the sum is 1.6
    assert loss.item() == pytest.approx(-1.6 / 4)
    loss.backward()  # d rho / d logp = rho, and the two clipped tokens have no gradient
    torch.testing.assert_close(logp.grad, f64(0, 0, 1.5, -0.5, -2.2, 0).view(1, 6) / 4)
    assert stats["clipped"].item() == 2
    assert stats["ratio_max"].item() == pytest.approx(1.5)
    gaps = [math.log(1.5), math.log(2), math.log(1.5), math.log(2), math.log(1.1)]
    assert stats["gap_max"].item() == pytest.approx(math.log(2))
    assert stats["gap_sum"].item() == pytest.approx(sum(gaps))
    assert stats["push_down"].item() == 0  # the least likely of these tokens has rho = logp's exponential = .5


def test_push_down_by_hand():
    """|A| of the tokens with A < 0 that get less than .001; off the mask nothing counts."""
    logp, mask = f64(1e-4, 1e-4, 0.5, 1e-9, 9e-4, 1e-5).log().view(1, 6), torch.tensor([[True] * 5 + [False]])
    _, stats = losses.grpo_loss(logp, logp, f64(-2, 3, -5, -0.5, -1, -7).view(1, 6), mask, normalizer=5)
    assert stats["push_down"].item() == pytest.approx(2 + 0.5 + 1)
    _, stats = losses.grpo_loss(logp, logp, f64(-2), mask, normalizer=5)
    assert stats["push_down"].item() == pytest.approx(4 * 2)


def test_clip_high_frees_the_upper_side_only():
    logp, old = f64(1.5, 0.5).log().view(1, 2), torch.zeros(1, 2).double()
    mask = torch.ones(1, 2, dtype=torch.bool)
    loss, stats = losses.grpo_loss(logp, old, f64(1, -1).view(1, 2), mask, clip=0.2, clip_high=0.6, normalizer=1)
    assert loss.item() == pytest.approx(-(1.5 - 0.8))
    assert stats["clipped"].item() == 1


def test_row_advantages_and_token_advantages_agree():
    _, _, _, old, advantages, mask = draw(0, 4, 6, 5)
    logp = old + 0.1
    a, _ = losses.grpo_loss(logp, old, advantages, mask, normalizer=9)
    b, _ = losses.grpo_loss(logp, old, advantages[:, None].expand(4, 6), mask, normalizer=9)
    assert a == b


def test_on_policy_gradient_is_the_policy_gradient():
    _, _, _, old, advantages, mask = draw(1, 4, 6, 5)
    logp = old.clone().requires_grad_()
    loss, stats = losses.grpo_loss(logp, old, advantages, mask, normalizer=9)
    loss.backward()
    torch.testing.assert_close(logp.grad, torch.where(mask, -advantages[:, None] / 9, 0.0))
    assert stats["gap_max"] == 0 and stats["ratio_max"] == 1 and stats["clipped"] == 0


@pytest.mark.parametrize("junk", [NAN, INF, -INF, 100.0, -800.0])
def test_what_stands_off_the_mask_reaches_nothing(junk):
    _, _, _, old, advantages, mask = draw(2, 4, 6, 5)
    clean_logp, weights = old + 0.1, torch.ones_like(old)
    reference = clean_logp.clone().requires_grad_()
    want, want_stats = losses.grpo_loss(reference, old, advantages, mask, normalizer=9, weights=weights)
    want.backward()
    for dirty in ("logp", "old", "advantages", "weights"):
        logp = (torch.where(mask, clean_logp, junk) if dirty == "logp" else clean_logp).clone().requires_grad_()
        args = {"old": old, "advantages": advantages[:, None].expand(4, 6), "weights": weights}
        if dirty != "logp":
            args[dirty] = torch.where(mask, args[dirty], junk)
        loss, stats = losses.grpo_loss(
            logp, args["old"], args["advantages"], mask, normalizer=9, weights=args["weights"]
        )
        loss.backward()
        assert loss == want
        assert torch.equal(logp.grad, reference.grad), dirty
        assert stats == want_stats


@pytest.mark.parametrize("gap", [100.0, 800.0, -800.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_huge_ratios_stay_finite(gap, advantage):
    logp = torch.full((1, 2), gap).requires_grad_()
    mask = torch.ones(1, 2, dtype=torch.bool)
    loss, stats = losses.grpo_loss(logp, torch.zeros(1, 2), torch.tensor([advantage]), mask, normalizer=2)
    loss.backward()
    assert loss.isfinite() and logp.grad.isfinite().all() and stats["ratio_max"].isfinite()
    assert stats["gap_max"].item() == abs(gap)  # the meter shows what the clamp hides
    if advantage == 0:
        assert loss == 0


@pytest.mark.parametrize("normalizer", [0, -3, NAN])
def test_normalizer_must_be_positive(normalizer):
    with pytest.raises(ValueError, match="normalizer is"):
        losses.grpo_loss(
            torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(1), torch.ones(1, 1) > 0, normalizer=normalizer
        )


# ---- smd_loss --------------------------------------------------------------------------------------------------------


def smd(masked, dense, targets, old, advantages, mask, **settings):
    defaults = {"lam": 0.1, "track_b": "dense_teaches_masked", "clip": 0.2, "normalizer": 11, "temperature": 1.0}
    return losses.smd_loss(masked, dense, targets, old, advantages, mask, **(defaults | settings))


@pytest.mark.parametrize("temperature", [0.6, 1.0])
@pytest.mark.parametrize("track_b", ["dense_teaches_masked", "masked_teaches_dense"])
def test_smd_loss_is_track_a_plus_lambda_track_b(track_b, temperature):
    masked, dense, targets, old, advantages, mask = draw(3, 4, 6, 5)
    masked.requires_grad_()
    dense.requires_grad_()
    loss, stats = smd(masked, dense, targets, old, advantages, mask, track_b=track_b, temperature=temperature)
    loss.backward()

    m, d = masked.detach().requires_grad_(), dense.detach().requires_grad_()
    lm, ld = (m / temperature).log_softmax(-1), (d / temperature).log_softmax(-1)
    if track_b == "dense_teaches_masked":
        kl = (lm.exp() * (lm - ld.detach())).sum(-1)
    else:
        kl = (ld.exp() * (ld - lm.detach())).sum(-1)
    logp = lm.gather(-1, targets[..., None])[..., 0]
    track_a, _ = losses.grpo_loss(logp, old, advantages, mask, normalizer=11)
    want = track_a + 0.1 * kl[mask].sum() / 11
    want.backward()
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(stats["kd"], kl[mask].sum().detach())
    torch.testing.assert_close(masked.grad, m.grad)
    torch.testing.assert_close(dense.grad, d.grad if d.grad is not None else None)
    assert (dense.grad is None) == (track_b == "dense_teaches_masked")


def test_smd_without_track_b_needs_no_dense_logits():
    masked, _, targets, old, advantages, mask = draw(4, 4, 6, 5)
    loss, stats = smd(masked, None, targets, old, advantages, mask, lam=0.0)
    want, _ = losses.grpo_loss(losses.token_logprobs(masked, targets), old, advantages, mask, normalizer=11)
    torch.testing.assert_close(loss, want)
    assert stats["kd"] == 0


def test_smd_says_what_is_wrong():
    masked, dense, *rest = draw(4, 2, 3, 5)
    with pytest.raises(ValueError, match=r"track_b is 'both'; allowed: dense_teaches_masked"):
        smd(masked, dense, *rest, track_b="both")
    with pytest.raises(ValueError, match=r"lam is 0.1 and dense_logits is missing"):
        smd(masked, None, *rest)
    with pytest.raises(ValueError, match=r"lam is -1"):
        smd(masked, dense, *rest, lam=-1)
    with pytest.raises(ValueError, match=r"share one vocabulary"):
        smd(masked, dense[..., :4], *rest)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    st.integers(0, 10**6),
    st.integers(1, 6),
    st.integers(1, 7),
    st.integers(1, 6),
    st.integers(0, 4),
    st.sampled_from([NAN, INF, 1e30]),
)
def test_a_step_is_the_sum_of_its_micro_batches_and_padding_is_nothing(seed, B, T, micro, pad, junk):
    """Rule 7: the loss, its gradient and every statistic, whatever the micro-batch, the padding and what is in it."""
    masked, dense, targets, old, advantages, mask = draw(seed, B, T, 5)
    normalizer = int(mask.sum())

    def run(masked, dense, targets, old, mask, size):
        masked, dense = masked.clone().requires_grad_(), dense.clone().requires_grad_()
        total, stats = 0, {}
        for i in range(0, B, size):
            rows = slice(i, i + size)
            loss, part = smd(
                masked[rows],
                dense[rows],
                targets[rows],
                old[rows],
                advantages[rows],
                mask[rows],
                track_b="masked_teaches_dense",
                normalizer=normalizer,
            )
            loss.backward()
            total += loss.item()
            for name, x in part.items():
                x = x.item()
                stats[name] = max(stats.get(name, 0), x) if name.endswith("max") else stats.get(name, 0) + x
        return total, stats, masked.grad, dense.grad

    want, want_stats, want_m, want_d = run(masked, dense, targets, old, mask, B)

    def widen(x, value):
        out = x.new_full((B, T + pad, *x.shape[2:]), value)
        out[:, :T] = x
        return out

    off = ~widen(mask, False)
    got, stats, m, d = run(
        widen(masked, 0.0).masked_fill(off[..., None], junk),
        widen(dense, 0.0).masked_fill(off[..., None], junk),
        widen(targets, 0),
        widen(old, 0.0).masked_fill(off, junk),
        widen(mask, False),
        micro,
    )
    assert got == pytest.approx(want, abs=1e-12)
    assert stats == pytest.approx(want_stats, abs=1e-12)
    torch.testing.assert_close(m[:, :T], want_m)
    torch.testing.assert_close(d[:, :T], want_d)
    assert (m[:, T:] == 0).all()


def test_a_micro_batch_without_response_tokens_adds_nothing():
    masked, dense, targets, old, advantages, mask = draw(5, 2, 3, 5)
    masked.requires_grad_()
    loss, stats = smd(masked, dense, targets, old, advantages, torch.zeros_like(mask))
    loss.backward()
    assert loss == 0 and (masked.grad == 0).all() and all(x == 0 for x in stats.values())


# ---- importance_weights ----------------------------------------------------------------------------------------------

MODES = ["token", "token_truncated", "sequence", "sparse_rl"]


def test_importance_weights_by_hand():
    xi = f64(3, 0.5, 7, 1e-5, 2, 1).view(2, 3)  # rows: (3, .5, masked) and (1e-5, 2, 1)
    mask = torch.tensor([[True, True, False], [True, True, True]])
    old = torch.zeros(2, 3).double()
    want = {
        "token": [[3, 0.5, 0], [1e-5, 2, 1]],
        "token_truncated": [[2, 0.5, 0], [1e-5, 2, 1]],
        "sequence": [[1.5, 1.5, 0], [2e-5, 2e-5, 2e-5]],
        "sparse_rl": [[1.5, 0.5, 0], [0, 0, 0]],  # the second row is vetoed: 1e-5 < 1e-4
    }
    for mode in MODES:
        w, stats = losses.importance_weights(xi.log(), old, mask, mode)
        torch.testing.assert_close(w, torch.tensor(want[mode], dtype=torch.float64))
        assert stats["weight_sum"].item() == pytest.approx(w.sum().item())
        assert stats["weight_count"].item() == (2 if mode == "sparse_rl" else 5)
        assert stats["weight_max"].item() == pytest.approx(w.max().item())
        assert stats["vetoed"].item() == (1 if mode == "sparse_rl" else 0)
        assert stats["rows"].item() == 2
        assert stats["seq_sum"].item() == pytest.approx(1.5 + 2e-5)
        assert stats["seq_sq_sum"].item() == pytest.approx(2.25 + 4e-10)


def test_no_gap_gives_weight_one():
    _, _, _, old, _, mask = draw(6, 4, 6, 5)
    for mode in MODES:
        w, stats = losses.importance_weights(old, old, mask, mode)
        assert torch.equal(w, mask.double())
        assert stats["seq_sum"] ** 2 / stats["seq_sq_sum"] == 4  # every sequence counts in full


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ratio", [100.0, 800.0, -800.0])
@pytest.mark.parametrize("where", ["masked", "zero_advantage", "live"])
def test_hostile_ratios_stay_finite_in_loss_and_gradient(mode, ratio, where):
    """Float32, T = 4: one log-ratio of +100 or +-800 at a masked, a zero-advantage or a live token."""
    mask = torch.tensor([[True, True, True, False], [True, True, False, False]])
    advantages = torch.tensor([[1.0, 0.0, -1.0, 1.0], [1.0, -1.0, 1.0, 1.0]])
    gap = torch.zeros(2, 4)
    gap[0, {"masked": 3, "zero_advantage": 1, "live": 2}[where]] = ratio
    sampler = torch.full((2, 4), -1.0)
    dense = (sampler + gap).requires_grad_()
    w, stats = losses.importance_weights(dense, sampler, mask, mode)
    assert not w.requires_grad and not any(x.requires_grad for x in stats.values())
    assert w.isfinite().all() and all(x.isfinite() for x in stats.values())
    if where == "masked":
        assert torch.equal(w, mask.float())
    logp = dense.detach().clone().requires_grad_()
    loss, _ = losses.grpo_loss(logp, dense.detach(), advantages, mask, normalizer=5, weights=w)
    loss.backward()
    assert loss.isfinite() and logp.grad.isfinite().all()
    torch.testing.assert_close(logp.grad, torch.where(mask, -w * advantages / 5, 0.0))  # w is a constant factor


def test_all_rows_vetoed_gives_loss_zero():
    mask = torch.ones(3, 4, dtype=torch.bool)
    sampler = torch.zeros(3, 4)
    dense = sampler.clone()
    dense[:, 1] = -10.0  # e^-10 < 1e-4
    w, stats = losses.importance_weights(dense, sampler, mask, "sparse_rl")
    assert (w == 0).all() and stats["vetoed"] == 3 and stats["weight_count"] == 0 and stats["weight_sum"] == 0
    logp = dense.clone().requires_grad_()
    loss, _ = losses.grpo_loss(logp, dense, torch.ones(3), mask, normalizer=12, weights=w)
    loss.backward()
    assert loss == 0 and (logp.grad == 0).all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("micro", [1, 2, 3, 6])
def test_weights_do_not_depend_on_the_micro_batch(mode, micro):
    _, _, _, sampler, _, mask = draw(7, 6, 5, 5)
    dense = sampler + 2 * torch.randn(6, 5, generator=torch.Generator().manual_seed(0)).double()
    dense[::3] = sampler[::3] - 10  # rows 0 and 3 meet the veto of sparse_rl
    want, want_stats = losses.importance_weights(dense, sampler, mask, mode)
    parts = [
        losses.importance_weights(dense[i : i + micro], sampler[i : i + micro], mask[i : i + micro], mode)
        for i in range(0, 6, micro)
    ]
    assert torch.equal(torch.cat([w for w, _ in parts]), want)
    for name, x in want_stats.items():
        pieces = torch.stack([s[name] for _, s in parts])
        torch.testing.assert_close(pieces.max() if name.endswith("max") else pieces.sum(), x)
    if mode == "sparse_rl":
        assert 2 <= want_stats["vetoed"] < want_stats["rows"]


def test_a_row_without_response_is_no_sequence():
    mask = torch.tensor([[True, True], [False, False]])
    for mode in MODES:
        _, stats = losses.importance_weights(torch.zeros(2, 2), torch.zeros(2, 2), mask, mode)
        assert stats["rows"] == 1 and stats["vetoed"] == 0 and stats["seq_sum"] == 1


def test_unknown_choices_name_the_allowed_ones():
    x, mask = torch.zeros(1, 1), torch.ones(1, 1) > 0
    with pytest.raises(ValueError, match=r"mode is 'tokn'; allowed: token, token_truncated, sequence, sparse_rl"):
        losses.importance_weights(x, x, mask, "tokn")
    with pytest.raises(ValueError, match=r"scale is 'max'; allowed: std, none"):
        losses.group_advantages(torch.zeros(2), 2, "max")
