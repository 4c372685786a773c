"""The meter for gradient variance: by hand, against gradients that are all kept, and on rollouts with a mask."""

import math

import pytest
import torch
from util import DEVICE, rng, tiny

import losses
from experiments import variance
from kv_compress import NEVER, Rollout, rollout

PROMPTS = [[3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [5, 4, 3, 8]]
NEW = 5


def drawer(model, seed, **options):
    generator = rng(seed)
    return lambda: rollout(model, PROMPTS, 3, NEW, eos_ids=[1], generator=generator, **options)


def test_meter_by_hand():
    """(1,0), (3,0), (2,3): mean (2,1), variances 1 and 3."""
    meter = variance.Meter()
    for g in ((1, 0), (3, 0), (2, 3)):
        meter.add(torch.tensor(g).double())
    assert meter.mean.tolist() == pytest.approx([2, 1])
    assert meter.trace == pytest.approx(4)


def test_meter_keeps_no_history_and_agrees_with_one_that_does():
    series = 1e6 + torch.randn(50, 7, generator=torch.Generator().manual_seed(0)).double()  # a mean far above the noise
    meter = variance.Meter()
    for g in series:
        meter.add(g)
    torch.testing.assert_close(meter.mean, series.mean(0))
    assert meter.trace == pytest.approx(series.var(0).sum().item(), rel=1e-6)
    assert sum(x.numel() for x in vars(meter).values() if torch.is_tensor(x)) == 7


@pytest.mark.parametrize("options", [{}, {"prompt_budget": 6, "sinks": 1, "recent": 2}])
def test_every_estimator_against_gradients_that_are_kept(options):
    student, teacher = tiny(0, dtype=torch.float64), tiny(1, dtype=torch.float64)
    meters, kl = variance.measure(student, teacher, drawer(student, 7, **options), 4, NEW)

    kept, draw, kls = {"sampled": [], "vopd": [], "return-to-go": [], "full": []}, drawer(student, 7, **options), []
    for _ in range(4):
        out = draw()
        logits = student(out.tokens[:, :-1], evicted_at=out.evicted_at[..., :-1]).log_softmax(-1)
        q = teacher(out.tokens[:, :-1]).detach().log_softmax(-1)
        total = dict.fromkeys(kept, 0.0)
        for b in range(len(logits)):  # token by token, from the definitions
            where = range(int(out.prompt_len[b]) - 1, int(out.length[b]) - 1)
            reward = {t: (q[b, t] - logits[b, t])[out.tokens[b, t + 1]].detach() for t in where}
            for t in where:
                logp = logits[b, t, out.tokens[b, t + 1]]
                exact = (logits[b, t].exp() * (logits[b, t] - q[b, t])).sum()
                total["sampled"] = total["sampled"] - reward[t] * logp
                total["vopd"] = total["vopd"] - (reward[t] + exact.detach()) * logp
                total["return-to-go"] = total["return-to-go"] - sum(reward[s] for s in where if s >= t) * logp
                total["full"] = total["full"] + exact
                kls.append(exact.item())
        for name, loss in total.items():
            grads = torch.autograd.grad(loss / (len(logits) * NEW), list(student.parameters()), retain_graph=True)
            kept[name].append(torch.cat([g.flatten() for g in grads]))
    for name, gradients in kept.items():
        gradients = torch.stack(gradients)
        torch.testing.assert_close(meters[name].mean, gradients.mean(0), msg=name)
        assert meters[name].trace == pytest.approx(gradients.var(0).sum().item()), name
    assert kl == pytest.approx(sum(kls) / len(kls))
    assert set(meters) == {*variance.ADVANTAGES, *variance.DIRECT}


def test_the_student_is_scored_under_its_own_mask():
    student = tiny(0)
    out = drawer(student, 3, prompt_budget=6, sinks=1, recent=2)()
    assert (out.evicted_at[..., :4] < NEVER).any()
    logits, _, targets, mask = variance.score(student, student, out)
    gap = losses.token_logprobs(logits, targets) - out.logp[:, 1:]
    assert gap[mask].abs().max() < 1e-4


def test_a_student_that_is_its_teacher_has_no_gradient():
    student = tiny(0)
    meters, kl = variance.measure(student, tiny(0), drawer(student, 3), 2, NEW)
    assert kl == pytest.approx(0, abs=1e-6)
    for name, meter in meters.items():
        assert meter.trace < 1e-9 and meter.mean.norm() < 1e-5, name


def test_distillation_brings_the_student_nearer():
    student, teacher = tiny(0), tiny(1)

    def kl():
        return variance.loss_sum("full", *variance.score(student, teacher, drawer(student, 3)())).item()

    before = kl()
    variance.distil(student, teacher, drawer(student, 4), 10, learning_rate=1e-2)
    assert kl() < 0.8 * before


def test_effective_sizes_by_hand():
    """Two rows with response tokens at 1, 2 and at 1: ratios (2, .5) and (1e-5)."""
    response = torch.tensor([[False, True, True], [False, True, False]], device=DEVICE)
    zeros, ints = torch.zeros(2, 3, device=DEVICE), torch.zeros(2, dtype=torch.int64, device=DEVICE)
    out = Rollout(ints, zeros.long(), ints, ints, response, response[:, 0], zeros, zeros, 0, 0, 0)
    dense = torch.tensor([[2, 0.5], [1e-5, 99]], device=DEVICE).log()
    w = (2, 1e-5)
    both = sum(w) ** 2 / sum(x * x for x in w) / 2
    assert variance.effective_sizes(dense, out, 1) == pytest.approx((both, both, 0.5, 0.5), rel=1e-4)
    v = (1, 1e-5)
    tokens = (2, 0.5, 1e-5)
    want = (sum(v) ** 2 / sum(x * x for x in v) / 2, sum(tokens) ** 2 / sum(x * x for x in tokens) / 3, 0.5, 0.5)
    assert variance.effective_sizes(dense, out, 2) == pytest.approx(want, rel=1e-4)
    assert variance.effective_sizes(dense, out, 9) == pytest.approx(want, rel=1e-4)


@pytest.mark.parametrize("edge", [0.0, 1.0])
def test_hot_spots_against_every_action(edge):
    """Covariance of (r_a - b)(onehot_a - pi) over all actions a of each state, from its definition."""
    student, teacher = tiny(0, dtype=torch.float64), tiny(1, dtype=torch.float64)
    bins = variance.hot_spots(student, teacher, drawer(student, 5), 1, edges=(edge, 2.0, math.inf))
    logits, q, targets, mask = variance.score(student, teacher, drawer(student, 5)())
    want, inside = {"sampled": 0.0, "mean": 0.0, "vopd": 0.0, "vopd_optimal": 0.0}, 0
    p, r = logits[mask].softmax(-1).detach(), (q.log_softmax(-1) - logits.log_softmax(-1))[mask].detach()  # (n, V)
    batch_mean = r.gather(-1, targets[mask][:, None]).mean()
    for pi, reward in zip(p, r, strict=True):
        if not edge <= -(pi @ reward) < 2:
            continue
        inside += 1
        score = torch.eye(len(pi), device=pi.device, dtype=pi.dtype) - pi  # (V, V), a row an action
        norm = score.square().sum(1)
        baselines = {"sampled": 0.0, "mean": batch_mean, "vopd": pi @ reward}
        baselines["vopd_optimal"] = (pi @ (norm * reward)) / (pi @ norm)
        for name, b in baselines.items():
            g = (reward - b)[:, None] * score
            want[name] += (pi @ (g - pi @ g).square().sum(1)).item()
    assert bins[0]["tokens"] == inside > 0
    for name, total in want.items():
        assert bins[0][name] == pytest.approx(total / inside), name
    assert bins[0]["vopd_optimal"] < min(bins[0][name] for name in ("sampled", "mean", "vopd", "vopd k=20"))
