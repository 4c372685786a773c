"""On-policy distillation by enumeration: no sampling, float64, so that a bias is a number and not a matter of luck.

The world is a policy small enough to write down: V tokens, token 0 ends the sequence, the state is the previous token,
and all sequences of at most three tokens are listed with their probabilities. The gradient is taken in the policy's own
logits, one row of V numbers a state.
"""

import math
from itertools import product

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import losses

EOS = 0
ESTIMATORS = {
    "vanilla": {"baseline": "none"},
    "value": {"baseline": "value"},
    "value, k=2": {"baseline": "value", "k": 2},
    "value, k=V": {"baseline": "value", "k": 5},
    "optimal": {"baseline": "optimal"},
}


class World:
    """Every sequence of a Markov policy. tokens, mask (S,T); states (S,T): the row of logits a token is drawn from."""

    def __init__(self, V=5, T=3):
        self.V, rows = V, []
        for seq in product(range(V), repeat=T):
            end = seq.index(EOS) + 1 if EOS in seq else T
            if all(y == EOS for y in seq[end:]):  # one padded copy of each sequence
                rows.append((seq, [t < end for t in range(T)]))
        self.tokens = torch.tensor([seq for seq, _ in rows])
        self.mask = torch.tensor([m for _, m in rows])
        self.states = torch.cat([torch.full((len(rows), 1), V), self.tokens[:, :-1]], 1)  # state V: nothing drawn yet

    def logits(self, seed, scale=1.5):
        g = torch.Generator().manual_seed(seed)
        return scale * torch.randn(self.V + 1, self.V, generator=g, dtype=torch.float64)

    def probability(self, table, temperature=1.0):
        """P(sequence) under a table of logits (V+1, V) -> (S,)"""
        logp = losses.token_logprobs(table[self.states], self.tokens, temperature)
        return (logp * self.mask).sum(1).exp()

    def mean_gradient(self, table, advantages, sampler, temperature=1.0):
        """E over sequences from `sampler` of grad -sum_t A_t log pi(y_t), in the logits of pi. advantages (S,T)"""
        table = table.clone().requires_grad_()
        logp = losses.token_logprobs(table[self.states], self.tokens, temperature)
        weight = self.probability(sampler, temperature)[:, None].expand_as(logp)
        loss, _ = losses.grpo_loss(logp, logp.detach(), advantages, self.mask, normalizer=1, weights=weight)
        return torch.autograd.grad(loss, table)[0]

    def exact_gradient(self, table, teacher, sampler, temperature=1.0, k=None):
        """E over sequences from `sampler` of sum_t grad KL(pi || q) at their states: the direct losses."""
        table = table.clone().requires_grad_()
        kl = losses.reverse_kl(table[self.states], teacher[self.states], temperature=temperature, k=k)
        loss = (self.probability(sampler, temperature) * (kl * self.mask).sum(1)).sum()
        return torch.autograd.grad(loss, table)[0]

    def advantages(self, table, teacher, **settings):
        return losses.opd_advantages(table[self.states], teacher[self.states], self.tokens, mask=self.mask, **settings)


@pytest.fixture(scope="module")
def world():
    return World()


def test_the_world_is_complete(world):
    assert world.probability(world.logits(0)).sum().item() == pytest.approx(1, abs=1e-12)


# ---- the estimators' means -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.6, 1.0])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_state_only_baselines_have_the_exact_gradient_as_their_mean(world, name, temperature):
    student, teacher = world.logits(1), world.logits(2)
    A = world.advantages(student, teacher, temperature=temperature, **ESTIMATORS[name])
    got = world.mean_gradient(student, A, student, temperature)
    want = world.exact_gradient(student, teacher, student, temperature)
    assert want.abs().max() > 0.1
    assert (got - want).abs().max() < 1e-10


@pytest.mark.parametrize("V", [5, 6, 7])
def test_other_vocabularies_too(V):
    world = World(V, T=2)
    student, teacher = world.logits(3), world.logits(4)
    want = world.exact_gradient(student, teacher, student)
    for settings in ({}, {"baseline": "value"}, {"baseline": "value", "k": 2}, {"baseline": "optimal"}):
        got = world.mean_gradient(student, world.advantages(student, teacher, **settings), student)
        assert (got - want).abs().max() < 1e-10


@pytest.mark.parametrize("k", [1, 2, 4])
def test_the_topk_loss_is_biased(world, k):
    student, teacher = world.logits(1), world.logits(2)
    want = world.exact_gradient(student, teacher, student)
    bias = world.exact_gradient(student, teacher, student, k=k) - want
    print(f"topk_kl, k={k} of {world.V}: |bias| / |gradient| = {bias.norm() / want.norm():.3f}")
    assert bias.norm() > 0.01 * want.norm()


def test_return_to_go_is_the_gradient_of_the_whole_sequences_kl(world):
    """gamma = 1 is another objective: KL between distributions of sequences, states no longer held fixed."""
    student, teacher = world.logits(1), world.logits(2)
    table = student.clone().requires_grad_()
    p, q = world.probability(table), world.probability(teacher)
    want = torch.autograd.grad((p * (p / q).log()).sum(), table)[0]
    for settings in ({}, {"baseline": "value"}, {"baseline": "optimal"}):
        A = world.advantages(student, teacher, gamma=1.0, **settings)
        assert (world.mean_gradient(student, A, student) - want).abs().max() < 1e-10
    one_step = world.exact_gradient(student, teacher, student)
    assert (one_step - want).norm() > 0.1 * want.norm()


def test_the_mean_baseline_over_all_batches_of_two():
    """Rows are independent, so the mean of the other row is a constant to this one: no bias, checked on every pair."""
    world = World(V=4, T=2)
    student, teacher = world.logits(5), world.logits(6)
    p = world.probability(student)
    total = torch.zeros_like(student)
    for i, j in product(range(len(p)), repeat=2):
        pair = torch.tensor([i, j])
        s, q, y, mask = student[world.states[pair]], teacher[world.states[pair]], world.tokens[pair], world.mask[pair]
        A = losses.opd_advantages(s, q, y, baseline="mean", mask=mask)
        score = torch.nn.functional.one_hot(y, 4) - s.softmax(-1)  # (2, T, V): grad log pi in the logits of its state
        total.index_put_((world.states[pair],), -p[i] * p[j] * (A * mask)[..., None] * score, accumulate=True)
    assert (total / 2 - world.exact_gradient(student, teacher, student)).abs().max() < 1e-10


def test_a_token_count_as_divisor_adds_a_bias_of_one_over_the_batch():
    """Dividing by the tokens of the batch, which the sampled EOS decides: V then moves the mean gradient, by O(1/n).

    Exact for any batch of n independent rows of one or two tokens:
    E[sum_b g_b / sum_b len_b] = n E[g_1 / (len_1 + rest)], where rest is n - 1 plus a binomial number.
    """
    world = World(V=5, T=2)
    student, teacher = world.logits(1), world.logits(2)
    p = world.probability(student)
    ends_at_once = p[world.mask.sum(1) == 1].sum().item()

    def mean_gradient(n, **settings):
        A = world.advantages(student, teacher, **settings)
        inverse = torch.tensor(
            [
                sum(
                    math.comb(n - 1, m) * ends_at_once ** (n - 1 - m) * (1 - ends_at_once) ** m / (length + n - 1 + m)
                    for m in range(n)
                )
                for length in world.mask.sum(1).tolist()
            ]
        ).double()
        return world.mean_gradient(student, A * n * inverse[:, None], student)

    moved = [(mean_gradient(n, baseline="value") - mean_gradient(n)).norm().item() for n in (8, 16, 32)]
    size = mean_gradient(32).norm().item()
    print(
        f"token-mean divisor: V moves the mean gradient by {[f'{m / size:.4f}' for m in moved]} of it at n = 8, 16, 32"
    )
    assert moved[2] > 1e-4 * size  # there is a bias,
    assert moved[0] / moved[1] == pytest.approx(2, rel=0.1) and moved[1] / moved[2] == pytest.approx(2, rel=0.1)


# ---- variance --------------------------------------------------------------------------------------------------------


def one_state(student, teacher, **settings):
    """Per-token advantages of a single state: every token once. student, teacher (V,) -> (V,)"""
    V = len(student)
    y = torch.arange(V)[:, None]  # V rows of one position
    return losses.opd_advantages(student.expand(V, 1, V), teacher.expand(V, 1, V), y, **settings)[:, 0]


def variance(student, A):
    """Trace of the covariance, in logit space, of the estimator A_a (onehot_a - pi) with a ~ pi."""
    pi = student.softmax(-1)
    g = A[:, None] * (torch.eye(len(pi)).double() - pi)  # (V, V), row a: the gradient when a is drawn
    return ((pi[:, None] * g**2).sum() - (pi @ g).square().sum()).item()


def minimise(f, low, high):
    """Ternary search: f is a parabola in b."""
    for _ in range(200):
        a, b = low + (high - low) / 3, high - (high - low) / 3
        low, high = (low, b) if f(a) < f(b) else (a, high)
    return (low + high) / 2


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("V", [2, 5, 7])
def test_optimal_has_the_least_variance_of_all_state_only_baselines(V, seed):
    g = torch.Generator().manual_seed(seed)
    student, teacher = 3 * torch.randn(2, V, generator=g, dtype=torch.float64)
    r = one_state(student, teacher)
    b = (r - one_state(student, teacher, baseline="optimal"))[0].item()
    best = minimise(lambda b: variance(student, r - b), -60, 60)
    assert b == pytest.approx(best, abs=1e-6)
    least = variance(student, r - b)
    for settings in ({}, {"baseline": "value"}, {"baseline": "value", "k": 2}):
        assert least <= variance(student, one_state(student, teacher, **settings)) + 1e-12


def test_value_is_worse_than_vanilla_where_the_teacher_rejects_the_students_favourite():
    """Kept because it is true: V is the mean reward, and a reward seldom drawn is where the score is long."""
    pi = torch.tensor([0.97, 0.01, 0.01, 0.005, 0.005], dtype=torch.float64)
    q = torch.tensor([1e-4, 0.3, 0.3, 0.2, 0.1999], dtype=torch.float64)
    names = {"vanilla": {}, "value": {"baseline": "value"}, "optimal": {"baseline": "optimal"}}
    v = {name: variance(pi.log(), one_state(pi.log(), q.log(), **settings)) for name, settings in names.items()}
    print("peaked student:", {name: f"{x / v['vanilla']:.3f}" for name, x in v.items()}, "of vanilla's variance")
    assert v["value"] > 5 * v["vanilla"]
    assert v["optimal"] < v["vanilla"]
    # and by hand, at the favourite: r = log(1e-4 / .97) = -9.180, V = -KL = -8.800, so A = r - V = -0.380
    assert one_state(pi.log(), q.log(), baseline="value")[0].item() == pytest.approx(-0.380, abs=1e-3)


def test_value_helps_a_spread_student():
    student, teacher = torch.zeros(2, 7, dtype=torch.float64)
    teacher[0] = 8.0
    v = [variance(student, one_state(student, teacher, baseline=b)) for b in ("none", "value", "optimal")]
    assert v[2] <= v[1] < 0.6 * v[0]


# ---- where the two papers meet ---------------------------------------------------------------------------------------


def test_four_biases_under_a_masked_sampler(world):
    """Tokens from pi_m. Vanilla and vOPD, masked and dense learner, each against its exact gradient at those states.

    The masked learner is exact with both. The dense learner is biased with both: V shifts the mean gradient of each
    state by V (pi_m - pi_d), towards or away from the exact one.
    """
    masked, teacher = world.logits(1), world.logits(2)
    dense = masked + 0.7 * world.logits(7, scale=1.0)
    size = world.exact_gradient(dense, teacher, masked).norm()
    bias = {}
    for view, learner in (("masked", masked), ("dense", dense)):
        exact = world.exact_gradient(learner, teacher, masked)
        for baseline in ("none", "value"):
            A = world.advantages(learner, teacher, baseline=baseline)
            bias[view, baseline] = world.mean_gradient(learner, A, masked) - exact
    print("|bias| / |gradient|:", {" ".join(key): f"{(b.norm() / size).item():.3g}" for key, b in bias.items()})
    assert bias["masked", "none"].abs().max() < 1e-10
    assert bias["masked", "value"].abs().max() < 1e-10
    assert bias["dense", "none"].norm() > 0.01 * size
    assert bias["dense", "value"].norm() > 0.01 * size
    reach = torch.zeros(world.V + 1, dtype=torch.float64)  # expected visits of each state under the masked sampler
    reach.index_put_((world.states,), world.probability(masked)[:, None] * world.mask, accumulate=True)
    V = -losses.reverse_kl(dense, teacher)  # (V+1,), one number a state
    shift = (reach * V)[:, None] * (masked.softmax(-1) - dense.softmax(-1))
    torch.testing.assert_close(bias["dense", "value"] - bias["dense", "none"], shift, atol=1e-10, rtol=0)


def test_v_moves_the_dense_learners_bias_both_ways(world):
    """Over 40 random worlds V lessens the bias in some and worsens it in others: neither is a rule."""
    better = worse = 0
    for seed in range(40):
        masked, teacher = world.logits(100 + seed), world.logits(200 + seed)
        dense = masked + 0.7 * world.logits(300 + seed, scale=1.0)
        exact = world.exact_gradient(dense, teacher, masked)
        none, value = (
            (world.mean_gradient(dense, world.advantages(dense, teacher, baseline=b), masked) - exact).norm()
            for b in ("none", "value")
        )
        better += int(value < none)
        worse += int(value > none)
    print(f"of 40 worlds: V lessens the dense learner's bias in {better}, worsens it in {worse}")
    assert better >= 10 and worse >= 10


# ---- edges -----------------------------------------------------------------------------------------------------------

ALL = [
    {"baseline": "none"},
    {"baseline": "mean"},
    {"baseline": "value"},
    {"baseline": "value", "k": 2},
    {"baseline": "optimal"},
    {"baseline": "value", "gamma": 1.0},
]


@pytest.mark.parametrize("settings", ALL)
@pytest.mark.parametrize("temperature", [0.6, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_teacher_that_is_the_student_teaches_nothing(settings, temperature, dtype):
    logits = (3 * torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(0))).to(dtype)
    targets = torch.arange(12).view(3, 4) % 6
    A = losses.opd_advantages(logits, logits, targets, temperature=temperature, **settings)
    assert A.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert (A == 0).all()
    for k in (None, 2):
        assert (losses.reverse_kl(logits, logits, temperature=temperature, k=k) == 0).all()


def test_advantages_by_hand():
    """Two rows of two tokens, the second token of row 1 off the mask; uniform student, teacher (1/2, 1/4, 1/4)."""
    student = torch.zeros(2, 2, 3, dtype=torch.float64)
    teacher = torch.tensor([0.5, 0.25, 0.25]).double().log().expand(2, 2, 3)
    targets, mask = torch.tensor([[0, 1], [2, 0]]), torch.tensor([[True, True], [True, False]])
    a, b = math.log(1.5), math.log(0.75)  # r of token 0, and of tokens 1 and 2
    V = (a + 2 * b) / 3
    half = (a + b) / 2  # V on the top 2: the student has ties, and on any two tokens with token 0 it is uniform
    cases = [
        ({}, [[a, b], [b, 0]]),
        ({"baseline": "value"}, [[a - V, b - V], [b - V, 0]]),
        ({"baseline": "optimal"}, [[a - V, b - V], [b - V, 0]]),  # a uniform student has equal n: b* = V
        ({"baseline": "mean"}, [[a - b, b - b], [b - half, 0]]),
        ({"gamma": 1.0}, [[a + b, b], [b, 0]]),
        ({"gamma": 0.5}, [[a + b / 2, b], [b, 0]]),
        ({"gamma": 1.0, "baseline": "value"}, [[a + b - V, b - V], [b - V, 0]]),
    ]
    for settings, want in cases:
        got = losses.opd_advantages(student, teacher, targets, mask=mask, **settings)
        torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64), msg=str(settings))


def test_the_value_on_the_top_k_by_hand():
    """Student (.5, .3, .2), teacher (.2, .3, .5), k = 2: both renormalised on tokens 0 and 1, the reward not."""
    student = torch.tensor([0.5, 0.3, 0.2]).double().log().view(1, 1, 3)
    teacher = torch.tensor([0.2, 0.3, 0.5]).double().log().view(1, 1, 3)
    kl = 5 / 8 * math.log((5 / 8) / (2 / 5)) + 3 / 8 * math.log((3 / 8) / (3 / 5))
    assert losses.reverse_kl(student, teacher, k=2).item() == pytest.approx(kl)
    for y, r in enumerate([math.log(0.2 / 0.5), 0.0, math.log(0.5 / 0.2)]):
        A = losses.opd_advantages(student, teacher, torch.tensor([[y]]), baseline="value", k=2)
        assert A.item() == pytest.approx(r + kl)


def test_a_row_alone_has_no_other_rows():
    student, teacher, y = torch.zeros(1, 3, 4), torch.randn(1, 3, 4), torch.tensor([[1, 2, 3]])
    A = losses.opd_advantages(student, teacher, y, baseline="mean")
    assert torch.equal(A, losses.opd_advantages(student, teacher, y))


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_k_of_the_whole_vocabulary_is_exact(temperature):
    g = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 3, 4, 6, generator=g)
    targets = torch.arange(12).view(3, 4) % 6
    exact = losses.reverse_kl(student, teacher, temperature=temperature)
    assert torch.equal(losses.reverse_kl(student, teacher, temperature=temperature, k=6), exact)
    value = {"baseline": "value", "temperature": temperature}
    a, b = (losses.opd_advantages(student, teacher, targets, k=k, **value) for k in (0, 6))
    assert torch.equal(a, b)


@pytest.mark.parametrize("k", [7, -1])
def test_an_impossible_k_is_refused(k):
    logits, y = torch.zeros(1, 2, 6), torch.zeros(1, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match=rf"k is {k}; allowed: 1 to the vocabulary size 6"):
        losses.reverse_kl(logits, logits, k=k)
    with pytest.raises(ValueError, match=rf"k is {k}; allowed: 1 to the vocabulary size 6"):
        losses.opd_advantages(logits, logits, y, baseline="value", k=k)


def test_other_bad_settings_are_refused():
    logits, y = torch.zeros(1, 2, 6), torch.zeros(1, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"baseline is 'vopd'; allowed: none, mean, value, optimal"):
        losses.opd_advantages(logits, logits, y, baseline="vopd")
    with pytest.raises(ValueError, match=r"gamma is 1.5; allowed"):
        losses.opd_advantages(logits, logits, y, gamma=1.5)
    with pytest.raises(ValueError, match=r"the student has 6 tokens and the teacher 5"):
        losses.reverse_kl(logits, logits[..., :5])


INF = math.inf
HOSTILE = {
    "both forbid a token": ([1.0, -INF, 0, 2], [0.0, -INF, 1, 0]),
    "both forbid all but one": ([1.0, -INF, -INF, -INF], [0.0, -INF, -INF, -INF]),
    "far apart": ([10.0, -80, 0, -80], [-80.0, 10, 0, 5]),
    "underflow meets forbidden": ([10.0, -80, 0, 0], [0.0, -INF, 0, 0]),
    "equal and extreme": ([10.0, -80, 0, 0], [10.0, -80, 0, 0]),
}


@pytest.mark.parametrize("case", HOSTILE)
@pytest.mark.parametrize("temperature", [0.05, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_hostile_logits_give_finite_values_and_gradients(case, temperature, dtype):
    student, teacher = (torch.tensor(x, dtype=dtype).view(1, 1, 4) for x in HOSTILE[case])
    if case == "underflow meets forbidden" and temperature == 1:  # the student gives what the teacher forbids a chance
        assert losses.reverse_kl(student, teacher) == INF
        return
    targets = torch.zeros(1, 1, dtype=torch.int64)
    for k in (None, 1, 2, 3):
        logits = student.clone().requires_grad_()
        kl = losses.reverse_kl(logits, teacher, temperature=temperature, k=k)
        kl.sum().backward()
        assert kl.isfinite().all() and kl >= -1e-4 and logits.grad.isfinite().all(), k
    for settings in ALL:
        assert losses.opd_advantages(student, teacher, targets, temperature=temperature, **settings).isfinite().all()
    logits = student.clone().requires_grad_()
    losses.token_logprobs(logits, targets, temperature).sum().backward()
    assert logits.grad.isfinite().all()
    loss, stats = losses.smd_loss(
        logits,
        teacher,
        targets,
        torch.zeros(1, 1),
        torch.ones(1),
        targets == 0,
        lam=0.1,
        track_b="dense_teaches_masked",
        clip=0.2,
        normalizer=1,
        temperature=temperature,
    )
    assert loss.isfinite() and torch.autograd.grad(loss, logits)[0].isfinite().all() and stats["kd"].isfinite()


def test_the_optimal_baseline_of_a_confident_student_is_not_rounding():
    """pi = 1 - 3e-7 on token 0: in float32, 1 - sum pi^2 would be noise."""
    student, teacher = torch.tensor([15.0, 0, 0, 0]), torch.tensor([-5.0, 1, 2, 3])
    got = one_state(student, teacher, baseline="optimal")
    want = one_state(student.double(), teacher.double(), baseline="optimal")
    assert (got - want).abs().max() < 1e-4
    b = (one_state(student.double(), teacher.double()) - want)[0].item()
    best = minimise(lambda b: variance(student.double(), one_state(student.double(), teacher.double()) - b), -60, 60)
    assert b == pytest.approx(best, abs=1e-4)


@pytest.mark.parametrize("settings", ALL)
def test_what_stands_off_the_mask_reaches_no_advantage(settings):
    g = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 3, 4, 6, generator=g)
    targets = torch.arange(12).view(3, 4) % 6
    mask = torch.tensor([[False, True, True, False], [True, True, True, True], [True, False, False, False]])
    want = losses.opd_advantages(student, teacher, targets, mask=mask, **settings)
    junk = student.masked_fill(~mask[..., None], math.nan), teacher.masked_fill(~mask[..., None], math.inf)
    got = losses.opd_advantages(*junk, targets.masked_fill(~mask, 5), mask=mask, **settings)
    assert torch.equal(got, want) and (got[~mask] == 0).all()


@pytest.mark.parametrize("settings", ALL)
def test_advantages_carry_no_gradient(settings):
    student = torch.randn(2, 3, 6, requires_grad=True)
    A = losses.opd_advantages(student, torch.randn(2, 3, 6), torch.zeros(2, 3, dtype=torch.int64), **settings)
    assert not A.requires_grad


def test_the_teacher_receives_no_gradient():
    student, teacher = torch.randn(2, 6, requires_grad=True), torch.randn(2, 6, requires_grad=True)
    losses.reverse_kl(student, teacher).sum().backward()
    assert student.grad is not None and teacher.grad is None


class Largest(TorchDispatchMode):
    """Remembers the largest tensor any operation made, inputs and their views excepted."""

    def __init__(self, *given):
        super().__init__()
        self.given, self.numel = {x.untyped_storage().data_ptr() for x in given}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in self.given:
                self.numel = max(self.numel, x.numel())
        return out


@pytest.mark.parametrize("temperature", [0.6, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_second_tensor_of_the_logits_size(dtype, temperature):
    B, T, V, k = 4, 8, 500, 5
    student, teacher = torch.randn(2, B, T, V, generator=torch.Generator().manual_seed(0)).to(dtype)
    targets = torch.zeros(B, T, dtype=torch.int64)
    largest = {}
    for name, settings in {"none": {}, "top-k": {"baseline": "value", "k": k}, "value": {"baseline": "value"}}.items():
        with Largest(student, teacher) as seen:
            losses.opd_advantages(student, teacher, targets, temperature=temperature, **settings)
        largest[name] = seen.numel
    assert max(largest.values()) <= T * V  # one row at a time
    if temperature == 1 and dtype == torch.float32:
        assert max(largest["none"], largest["top-k"]) <= T * k  # and the top-k baseline not even that
