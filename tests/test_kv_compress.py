"""The compressed cache: its record replays exactly, its victims are the right ones, and it costs no more than it says.

The strongest test is the oracle: it keeps every key, marks which are still alive, and shares no code with the cache.
"""

import math
from collections import defaultdict
from contextlib import ExitStack
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from util import DEVICE, HEADS, NEVER, Reference, rng, softmax, tiny

from kv_compress import POLICIES, KVCache, LayerView, SharedPrompts, check_options, rollout

FIVE = ["snapkv", "h2o", "rkv", "streaming", "random"]
FOUR = FIVE[:4]  # those whose victims follow from the model
NO_EOS = [-1]  # never drawn


def draws(examples):
    return settings(derandomize=True, database=None, deadline=None, max_examples=examples)


def prompts_of(lengths, seed=0):
    """Random prompts; the n-th does not depend on the others."""
    seeds = (torch.Generator().manual_seed(100 * seed + n) for n in range(len(lengths)))
    return [torch.randint(23, (P,), generator=g).tolist() for P, g in zip(lengths, seeds, strict=True)]


@st.composite
def cases(draw, policies=FIVE):
    """Heads, ragged prompts, and legal budgets from the smallest to beyond the length."""
    sinks, recent = draw(st.integers(0, 2)), draw(st.integers(0, 4))
    floor = sinks + recent + 1
    kv_budget = draw(st.sampled_from([0, floor, floor + 1, floor + 3, 40]))
    return SimpleNamespace(
        seed=draw(st.integers(0, 99)),
        heads=draw(st.sampled_from(HEADS)),
        lengths=draw(st.lists(st.integers(1, 14), min_size=1, max_size=4)),
        group_size=draw(st.integers(1, 3)),
        max_new_tokens=draw(st.integers(1, 12)),
        temperature=draw(st.sampled_from([1.0, 0.6, 0])),
        eos_ids=draw(st.sampled_from([NO_EOS, [3], [0, 5, 11]])),
        cache=dict(
            policy=draw(st.sampled_from(policies)),
            kv_budget=kv_budget,
            prompt_budget=draw(st.sampled_from([0, floor, floor + 2, 40, 0.3, 0.75, 1.0])),
            sinks=sinks,
            recent=recent,
            pool=draw(st.sampled_from([1, 3, 5])),
            interval=draw(st.integers(1, min(4, kv_budget - sinks) if kv_budget else 4)),
        ),
    )


def sample(model, prompts, case):
    options = dict(temperature=case.temperature, eos_ids=case.eos_ids, generator=rng(case.seed), **case.cache)
    return rollout(model, prompts, case.group_size, case.max_new_tokens, **options)


def kept_of_prompt(P, kv_budget, prompt_budget, sinks, recent, **_):
    """DESIGN section 4, Budgets: how many keys of a P-token prompt are left after its prefill."""
    if isinstance(prompt_budget, float):
        prompt_budget = max(sinks + recent + 1, int(prompt_budget * P))
    return min(P, prompt_budget or P, kv_budget or P)


def scored(model, r, evicted_at, temperature=1.0):
    """The learner's side: its logp of every response token, (B,T), at the place where the sampler notes its own."""
    with torch.no_grad():
        logp = (model(r.tokens, evicted_at).float() / (temperature or 1.0)).log_softmax(-1)  # (B, T, V)
    logp = logp[:, :-1].gather(-1, r.tokens[:, 1:, None]).squeeze(-1)  # (B, T-1): logits[t-1] score tokens[t]
    return F.pad(logp, (1, 0)) * r.response_mask


def blinded(r):
    """(B,) rows that dropped a key before a scored query: the last, at length - 2, scores the last token."""
    return ((r.evicted_at > 0) & (r.evicted_at < r.length[:, None, None] - 1)).any(0).flatten(1).any(1)


def varied(r):
    """(B,) rows that were fed two different tokens. Equal tokens have equal values: of such a row any view is alike."""
    fed = torch.arange(r.tokens.shape[1], device=DEVICE) < r.length[:, None] - 1
    return (fed & (r.tokens != r.tokens[:, :1])).any(1)


# ---- rules 1 and 10: the learner replays the record -----------------------------------------------------------------


def check_record(r, prompts, case):
    """Whatever DESIGN section 4 says of a Rollout, but for the choice of the victims."""
    G, new, o, T = case.group_size, case.max_new_tokens, case.cache, r.tokens.shape[1]
    nkv, eos = case.heads[1], set(case.eos_ids)
    assert (r.tokens.dtype, r.logp.dtype, r.evicted_at.dtype) == (torch.int64, torch.float32, torch.int32)
    assert r.evicted_at.shape == (2, len(prompts) * G, nkv, T)
    assert r.length.max() == T  # the loop ends with the last row
    assert (r.logp <= 0).all() and (r.logp[~r.response_mask] == 0).all()
    for b in range(len(prompts) * G):
        prompt, length, tokens = prompts[b // G], int(r.length[b]), r.tokens[b].tolist()
        P, response = len(prompt), tokens[len(prompt) : length]
        assert r.prompt_len[b] == P and tokens[:P] == prompt  # rule 10: the very ids
        assert r.response_mask[b].tolist() == [P <= t < length for t in range(T)]  # EOS is in it
        assert not eos & set(response[:-1])  # a row stops at its first EOS, whichever it is
        assert bool(r.finished[b]) == (response[-1] in eos)
        assert r.finished[b] or len(response) == new
        assert not any(tokens[length:])

        keep, slots = kept_of_prompt(P, **o), o["kv_budget"] or P + new
        for record in r.evicted_at[:, b].flatten(0, 1).tolist():  # one layer and kv head
            assert not any(record[length:])  # padding is evicted before it is born
            gone = {j: t for j, t in enumerate(record[:length]) if t != NEVER}
            assert all(o["sinks"] <= j < t - o["recent"] for j, t in gone.items())  # the protected stay
            assert all(t == P or P < t < length - 1 for t in gone.values())  # the last token is not fed: no victim
            for i in range(P, length - 1):  # a query sees itself and a cache as full as it may be
                assert sum(i < t for t in record[: i + 1]) == min(keep + i - P + 1, slots)


def check_replay(case):
    model, prompts = tiny(case.seed, *case.heads), prompts_of(case.lengths, case.seed)
    r = sample(model, prompts, case)
    check_record(r, prompts, case)
    masked, dense = ((scored(model, r, view, case.temperature) - r.logp).abs() for view in (r.evicted_at, None))
    assert masked.max() <= 1e-4
    assert (dense.amax(1)[blinded(r) & varied(r)] > 1e-3).all()
    assert (dense.amax(1)[~blinded(r)] <= 1e-4).all()
    first = r.prompt_len[:, None]
    assert dense.gather(1, first).max() <= 1e-4  # rule 4: a prompt's logits are dense whatever the budget


@pytest.mark.parametrize("policy", FIVE)
def test_the_learner_replays_the_sampler(policy):
    @draws(20)
    @given(cases([policy]))
    def check(case):
        check_replay(case)

    check()


@pytest.mark.slow
@draws(1000)
@given(cases())
def test_the_learner_replays_the_sampler_in_a_thousand_cases(case):
    check_replay(case)


@pytest.mark.parametrize("policy", FIVE)
@pytest.mark.parametrize("qk_norm", [False, True])
def test_replay_with_every_switch_of_the_model_on(policy, qk_norm):
    """q/k norm, biases, a head size that is not n_embd / n_head, a head of its own; in float32 and under bf16."""
    model = tiny(1, 6, 2, qk_norm=qk_norm, qkv_bias=True, head_dim=10, tie_head=False)
    options = dict(eos_ids=NO_EOS, policy=policy, kv_budget=9, prompt_budget=0.8, sinks=1, recent=3)
    r = rollout(model, prompts_of([14, 3, 8]), 2, 12, generator=rng(0), **options)
    assert (scored(model, r, r.evicted_at) - r.logp).abs().max() <= 1e-4
    assert blinded(r).all() and (scored(model, r, None) - r.logp).abs().amax(1).min() > 1e-3

    with torch.autocast(DEVICE, torch.bfloat16):  # rule 9: half precision inside, float32 masters and logp outside
        r = rollout(model, prompts_of([14, 3, 8]), 2, 12, generator=rng(0), **options)
        d = rollout(model, prompts_of([14, 3, 8]), 2, 12, generator=rng(0), eos_ids=NO_EOS)
        gap, dense_gap = ((scored(model, x, x.evicted_at) - x.logp).abs() for x in (r, d))
    assert gap.max() < 0.2 and gap.mean() < 2 * dense_gap.mean() < 0.02  # measured: both .05 at most, .004 on average
    assert r.logp.dtype == torch.float32 and {p.dtype for p in model.parameters()} == {torch.float32}
    assert r.kv_bytes == 2 * (2 * 6 * 2 * 9 * 10) * 2  # K and V: L B nkv S hs, two bytes each


def test_selected_rows_are_rows_of_the_rollout():
    """A micro-batch: any rows in any order, cut to the longest of them, and still replayed exactly."""
    model, rows = tiny(2), torch.tensor([7, 0, 3], device=DEVICE)
    options = dict(policy="h2o", eos_ids=[3, 7, 12], kv_budget=8, sinks=1, recent=3)
    r = rollout(model, prompts_of([5, 1, 14, 9], seed=3), 2, 12, generator=rng(1), **options)
    part = r.select(rows)
    T = part.tokens.shape[1]
    assert part.length.tolist() == r.length[rows].tolist() and part.length.max() == T < r.tokens.shape[1]
    for name in ("tokens", "response_mask", "logp"):
        assert torch.equal(getattr(part, name), getattr(r, name)[rows, :T])
    assert torch.equal(part.finished, r.finished[rows]) and torch.equal(part.prompt_len, r.prompt_len[rows])
    assert (scored(model, part, part.evicted_at) - part.logp).abs().max() <= 1e-4 and blinded(part).any()


# ---- rule 2: the oracle ---------------------------------------------------------------------------------------------


def oracle(model, prompt, response, *, new, eos_ids, policy, kv_budget, prompt_budget, sinks, recent, pool, interval):
    """Tokens, logits (one row a response token) and evicted_at (L,nkv,T) of one row, from the sentences of DESIGN.

    Nothing is ever overwritten: Q, K, V hold every position, and alive[l,h] is the set of keys that are still seen.
    response: the tokens to follow, or None to decode greedily.
    """
    m, c = Reference(model), model.config
    L, nkv, g, P, W = c.n_layer, c.n_kv_head, c.n_head // c.n_kv_head, len(prompt), max(recent, 1)
    Q, K, V = ([[] for _ in range(L)] for _ in range(3))  # Q[l][i] (nh,hs), K[l][j], V[l][j] (nkv,hs)
    alive = {(l, h): set(range(P)) for l in range(L) for h in range(nkv)}
    total = {(l, h): defaultdict(float) for l, h in alive}
    scores = {}
    evicted_at = np.full((L, nkv, P + new), NEVER)

    def attention(l, h, i):
        """What query i gives to the keys alive: {j: (g,) probabilities of the query heads of kv head h}."""
        keys = sorted(j for j in alive[l, h] if j <= i)
        logits = Q[l][i][h * g : (h + 1) * g] @ np.stack([K[l][j][h] for j in keys], axis=1) / math.sqrt(c.head_dim)
        return dict(zip(keys, softmax(logits).T, strict=True))

    def attend(l, i):
        """y (nh,hs) of query i; every key's attention is added to its total, mean over the query heads."""
        y = np.zeros_like(Q[l][i])
        for h in range(nkv):
            for j, p in attention(l, h, i).items():
                y[h * g : (h + 1) * g] += p[:, None] * V[l][j][h]
                total[l, h][j] += p.mean()
        return y

    def score(l, h, newest, at_prefill):
        keys = sorted(alive[l, h])
        if policy == "streaming":
            return {j: j for j in keys}
        if policy == "h2o":
            return {j: total[l, h][j] for j in keys}
        window = range(max(0, newest - W + 1), newest + 1)
        rows = [attention(l, h, i) for i in window]
        attn = {j: sum(row[j].mean() for row in rows if j in row) / len(rows) for j in keys}
        if at_prefill:
            near = range(-(pool // 2), pool // 2 + 1)
            outside = {j: p for j, p in attn.items() if j not in window}
            attn |= {j: sum(outside.get(j + d, 0.0) for d in near) / pool for j in outside}
        if policy == "snapkv":
            return attn
        unit = {j: K[l][j][h] / np.linalg.norm(K[l][j][h]) for j in keys}
        similar = [np.mean([unit[j] @ unit[i] for i in keys if i != j] or [0.0]) for j in keys]
        return {j: 0.1 * attn[j] - 0.9 * r for j, r in zip(keys, softmax(np.array(similar)), strict=True)}

    def evict(l, h, newest, at):
        """The lowest score goes; of equal ones (pooling makes some) the later."""
        may_go = [j for j in alive[l, h] if sinks <= j <= newest - recent and j in scores[l, h]]
        victim = min(may_go, key=lambda j: (scores[l, h][j], -j))
        alive[l, h].remove(victim)
        evicted_at[l, h, victim] = at

    x = m.weights["embed.weight"][prompt]
    for l in range(L):
        for store, new_rows in zip((Q, K, V), m.qkv(l, x, range(P)), strict=True):
            store[l] = list(new_rows)
        x = m.residual(l, x, np.stack([attend(l, i) for i in range(P)]))
    keep = kept_of_prompt(P, kv_budget, prompt_budget, sinks, recent)
    for l, h in alive:
        scores[l, h] = score(l, h, P - 1, at_prefill=True) if keep < P else {}
        for _ in range(P - keep):
            evict(l, h, P - 1, at=P)

    tokens, logits = list(prompt), []
    for t in range(P, P + new):
        logits.append(m.logits(x[-1]))
        tokens.append(int(logits[-1].argmax()) if response is None else response[t - P])
        if tokens[-1] in eos_ids or t == P + new - 1:
            return tokens, np.stack(logits), evicted_at[..., : len(tokens)]
        x = m.weights["embed.weight"][tokens[-1:]]
        for l in range(L):
            q, k, v = m.qkv(l, x, [t])
            for h in range(nkv):
                if kv_budget and (t - P) % interval == 0:
                    scores[l, h] = score(l, h, t - 1, at_prefill=False)
                if len(alive[l, h]) == kv_budget:
                    evict(l, h, t - 1, at=t)
                alive[l, h].add(t)
            for store, new_rows in zip((Q, K, V), (q, k, v), strict=True):
                store[l].append(new_rows[0])
            x = m.residual(l, x, attend(l, t)[None])


def check_oracle(case):
    model = tiny(case.seed, *case.heads, dtype=torch.float64)
    prompts, steps, B = prompts_of(case.lengths, case.seed), [], len(case.lengths) * case.group_size

    def note(module, args, kwargs, output):
        rows = kwargs["cache"].rows  # those that have not left the batch
        output = output[:, -1] if steps else output[:, -1].repeat_interleave(case.group_size, dim=0)  # (n, V)
        steps.append(output.new_zeros(B, output.shape[1]).index_copy(0, rows, output))

    model.register_forward_hook(note, with_kwargs=True)
    r = sample(model, prompts, case)
    logits = torch.stack(steps, dim=1).cpu().numpy()  # (B, steps, V)
    for b in range(len(r.tokens)):
        row, P = r.tokens[b, : r.length[b]].tolist(), int(r.prompt_len[b])
        options = dict(new=case.max_new_tokens, eos_ids=case.eos_ids, **case.cache)
        tokens, want, evicted_at = oracle(model, row[:P], row[P:] if case.temperature else None, **options)
        assert row == tokens
        np.testing.assert_array_equal(r.evicted_at[:, b, :, : len(row)].cpu().numpy(), evicted_at)
        np.testing.assert_allclose(logits[b, : len(row) - P], want, atol=1e-10)  # rule 9: float64 stays float64


@pytest.mark.parametrize("policy", FOUR)
def test_the_oracle_names_the_same_victims_and_tokens(policy):
    for interval in (1, 3):  # two long rows, each slot overwritten several times
        cache = dict(policy=policy, kv_budget=9, prompt_budget=0.8, sinks=1, recent=4, pool=3, interval=interval)
        case = dict(seed=1, heads=(6, 2), lengths=[18, 3], group_size=1, max_new_tokens=30, temperature=1)
        check_oracle(SimpleNamespace(**case, eos_ids=NO_EOS, cache=cache))

    @draws(10)
    @given(cases([policy]))
    def check(case):
        check_oracle(case)

    check()


@pytest.mark.parametrize("policy", FOUR)
def test_the_oracle_agrees_while_rows_end_and_leave(policy):
    """Ten rows in full caches end one after the other: some stay in the batch for a while, most leave it on a CPU."""
    cache = dict(policy=policy, kv_budget=8, prompt_budget=0, sinks=1, recent=3, pool=3, interval=2)
    case = dict(seed=2, heads=(6, 2), lengths=[6, 9, 5, 7, 8], group_size=2, max_new_tokens=16, temperature=1)
    check_oracle(SimpleNamespace(**case, eos_ids=[3, 7, 12], cache=cache))


@pytest.mark.slow
@draws(300)
@given(cases(FOUR))
def test_the_oracle_names_the_same_victims_and_tokens_in_many_cases(case):
    check_oracle(case)


def test_random_evicts_each_key_alike():
    """The oracle cannot foresee noise, but 400 heads (100 prompts, 2 layers, 2 kv heads) show its distribution."""
    model, prompts = tiny(), prompts_of([12] * 100)
    options = dict(policy="random", eos_ids=NO_EOS, sinks=2, recent=3)
    for budgets, gone in ((dict(prompt_budget=8), 4), (dict(kv_budget=12), 1)):
        a, b, c = (rollout(model, prompts, 1, 2, generator=rng(s), **budgets, **options).evicted_at for s in (0, 0, 1))
        assert torch.equal(a, b) and not torch.equal(a, c)
        victims = a[..., :12] != NEVER  # (L, B, nkv, P): of positions 2..8 `gone` keys go, the others are protected
        assert (victims.sum(-1) == gone).all() and (a[..., :12][victims] == 12).all()
        count, p = victims.sum((0, 1, 2)).tolist(), gone / 7
        assert all(abs(n - 400 * p) < 5 * math.sqrt(400 * p * (1 - p)) for n in count[2:9])
        assert sum(count[:2] + count[9:]) == 0
        same = (victims == victims[:1, :, :1]).all(-1).all(2).all(0)  # (B,) all heads of a row agree
        assert same.float().mean() < 0.1


# ---- rules 3 and 4: batches and large budgets change nothing --------------------------------------------------------

BUDGETS = [
    dict(kv_budget=7, interval=1),
    dict(kv_budget=9, prompt_budget=0.6, interval=3),
    dict(prompt_budget=6),
]


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("policy", FOUR)
def test_a_row_does_not_notice_its_batch(policy, budget):
    options = dict(temperature=0, eos_ids=[3, 7, 12, 16, 20], policy=policy, sinks=1, recent=3, **budget)
    prompts, lengths = prompts_of([5, 1, 14], seed=3), set()
    for dtype in (torch.float64, torch.float32):
        model = tiny(2, *HEADS[BUDGETS.index(budget)], dtype=dtype)
        batch = rollout(model, prompts, 2, 10, **options)
        for n, prompt in enumerate(prompts):
            alone = rollout(model, [prompt], 1, 10, **options)
            T = int(alone.length)
            lengths.add(T - len(prompt))
            for b in (2 * n, 2 * n + 1):
                assert batch.length[b] == T and torch.equal(batch.tokens[b, :T], alone.tokens[0])
                assert torch.equal(batch.evicted_at[:, b, :, :T], alone.evicted_at[:, 0])
                torch.testing.assert_close(batch.logp[b, :T], alone.logp[0], atol=1e-5, rtol=0)
        assert (batch.evicted_at[:, 4, :, :14] == 14).any()  # the 14-token prompt was compressed
    assert len(lengths) > 1  # rows of the batch end at different steps


@pytest.mark.parametrize("policy", FIVE)
def test_a_budget_that_fits_everything_is_exactly_dense(policy):
    model, prompts = tiny(4, dtype=torch.float64), prompts_of([9, 1, 5], seed=4)
    for temperature in (0, 0.6):
        options = dict(temperature=temperature, eos_ids=[3], policy=policy)
        fits = [rollout(model, prompts, 2, 8, generator=rng(0), kv_budget=k, **options) for k in (0, 17, 40)]
        for r in fits:
            for name in ("tokens", "logp", "evicted_at"):
                assert torch.equal(getattr(r, name), getattr(fits[0], name))
            assert r.kv_bytes == r.kv_bytes_dense == fits[0].kv_bytes
            real = torch.arange(r.tokens.shape[1], device=DEVICE) < r.length[:, None]
            assert torch.equal(r.evicted_at, torch.where(real, NEVER, 0).int()[None, :, None].expand_as(r.evicted_at))
            torch.testing.assert_close(scored(model, r, None, temperature), r.logp, atol=1e-5, rtol=0)
    with torch.no_grad():  # greedy, the naive way: the whole row again for every token
        r = rollout(model, prompts, 1, 8, temperature=0, eos_ids=NO_EOS, policy=policy, kv_budget=17)
        for b, prompt in enumerate(prompts):
            row = list(prompt)
            for _ in range(8):
                row.append(int(model(torch.tensor([row], device=DEVICE))[0, -1].argmax()))
            assert r.tokens[b, : r.length[b]].tolist() == row


@pytest.mark.parametrize("policy", FIVE)
def test_a_prompt_is_prefilled_and_compressed_once(policy):
    model, prompts, shapes = tiny(5), prompts_of([13, 10]), []
    model.register_forward_pre_hook(lambda module, args: shapes.append(tuple(args[0].shape)))
    r = rollout(model, prompts, 3, 4, eos_ids=NO_EOS, policy=policy, prompt_budget=0.6, sinks=1, recent=3)
    assert shapes == [(2, 13), (6, 1), (6, 1), (6, 1)]
    evicted_at = r.evicted_at.unflatten(1, (2, 3))
    for n, (P, kept) in enumerate(((13, 7), (10, 6))):
        first = evicted_at[:, n, 0, :, :P]
        assert ((first == NEVER).sum(-1) == kept).all() and ((first == P).sum(-1) == P - kept).all()
        assert (evicted_at[:, n, :, :, :P] == first[:, None]).all()  # its samples share the choice
    assert len(set(map(tuple, r.tokens[:3].tolist()))) > 1  # and go their own ways
    slot = 2 * (2 * 6 * 2 * 6) * 4  # K and V: L B nkv hs, four bytes each
    assert r.kv_bytes == slot * (7 + 4) and r.kv_bytes_dense == slot * (13 + 4)  # kept and new keys, not the prompt's


# ---- worked out by hand ---------------------------------------------------------------------------------------------

N = NEVER


def test_streaming_by_hand():
    """One sink, two protected, five slots: each token from the sixth key on pushes out the oldest but the sink."""
    options = dict(policy="streaming", eos_ids=NO_EOS, sinks=1, recent=2, kv_budget=5)
    r = rollout(tiny(), prompts_of([4, 7, 1]), 1, 6, generator=rng(0), **options)
    expected = [
        [N, 5, 6, 7, 8, N, N, N, N, N, 0, 0, 0],  # 4 prompt keys and token 4 fill the slots; 5..8 evict; 9 is not fed
        [N, 7, 7, 7, 8, 9, 10, 11, N, N, N, N, N],  # of 7 prompt keys 0, 3..6 stay, and at once token 7 evicts 3
        [N, 5, N, N, N, N, N, 0, 0, 0, 0, 0, 0],  # a one-token prompt: five keys fit, the sixth evicts 1
    ]
    assert (r.evicted_at == torch.tensor(expected, device=DEVICE)[None, :, None]).all()
    r = rollout(tiny(), prompts_of([4, 7, 1]), 1, 6, generator=rng(0), **options | dict(kv_budget=0, prompt_budget=4))
    expected = [[N] * 10 + [0] * 3, [N, 7, 7, 7] + [N] * 9, [N] * 7 + [0] * 6]  # only the prompt of 7 is cut, to 4
    assert (r.evicted_at == torch.tensor(expected, device=DEVICE)[None, :, None]).all()


def spy(monkeypatch, statistic):
    """A policy "spy" whose score is one statistic, and the list of what it was shown."""
    shown = []

    def score(c):
        shown.append(getattr(c, statistic).clone())
        return shown[-1]

    score.needs = {statistic}
    monkeypatch.setitem(POLICIES, "spy", score)
    return shown


def feed(cache, q, keys):
    """One layer of one kv head: tokens whose keys are (B,T,hs) and whose query heads are all (B,nh,T,hs)."""
    cache.advance(keys.shape[1])
    return cache.attend(0, q, keys[:, None], keys[:, None])


def test_window_attention_by_hand(monkeypatch):
    """Keys such that query head A sees them in the ratio of w, and head B all alike; a window of the last 2 queries.

    Row 0, w = 4 1 1 2 2.  A: query 3 gives 4 1 1 2 /8, query 4 gives 4 1 1 2 2 /10, mean .45 .1125 .1125 .225 .1
                           B: 1/4 each and 1/5 each, mean .225 .225 .225 .225 .1
    Keys 0..2 stand outside of the window and are averaged over 3 neighbours among themselves, 0 beyond the ends:
                           A: .1875 .225 .075   B: .15 .225 .15   mean of the heads .16875 .225 .1125
    So key 1, between the others, stays, though key 0 alone got more. Row 1 has 3 tokens, w = 4 1 1, row 2 has 1,
    fewer than the window; the rest is padding.
    """
    shown = spy(monkeypatch, "window_attn")
    config = SimpleNamespace(n_layer=1, n_head=2, n_kv_head=1, head_dim=2)
    options = dict(policy="spy", kv_budget=3, sinks=0, recent=2, pool=3, interval=1, device=DEVICE)
    cache = KVCache(config, [5, 3, 1], 1, 3, **options)
    w = torch.tensor([[4, 1, 1, 2, 2], [4, 1, 1, 1e9, 1e9], [4, 1e9, 1e9, 1e9, 1e9]], device=DEVICE)
    q = torch.tensor([[math.sqrt(2), 0], [0, 0]], device=DEVICE)[None, :, None]  # over sqrt(hs): A reads log w, B 0
    feed(cache, q.expand(3, 2, 5, 2), torch.stack((w.log(), w.log()), dim=-1))
    expected = [[0.16875, 0.225, 0.1125, 0.225, 0.1], [0.575 / 3, 0.3, 0.125, 0, 0], [1, 0, 0, 0, 0]]
    torch.testing.assert_close(shown[0][:, 0].cpu(), torch.tensor(expected), atol=1e-6, rtol=0)
    assert cache.evicted_at[0, :, 0, :5].tolist() == [[5, N, 5, N, N], [N] * 5, [N] * 5]

    # Decoding, nothing is pooled. Row 0 holds keys 1 3 4: A gives 1 2 /3 and 1 2 2 /5, B 1 1 /2 and 1 1 1 /3.
    feed(cache, q.expand(3, 2, 1, 2), torch.zeros(3, 1, 2, device=DEVICE))
    expected = [[(1 / 3 + 1 / 5 + 1 / 2 + 1 / 3) / 4, 1.9 / 4, 2.2 / 12], [0.575, 0.3, 0.125], [1, 0, 0]]
    torch.testing.assert_close(shown[1][:, 0].cpu(), torch.tensor(expected), atol=1e-6, rtol=0)
    assert cache.evicted_at[0, :, 0].tolist() == [[5, 5, 5, N, N, N, N, N], [3] + [N] * 7, [N] * 8]  # row 2 has room


def test_total_attention_by_hand(monkeypatch):
    """Keys of zeros: query i gives 1/(i+1) to each key. Three slots, the newest key is not protected. In float64."""
    shown = spy(monkeypatch, "total_attn")
    config = SimpleNamespace(n_layer=1, n_head=2, n_kv_head=1, head_dim=2)
    kind = dict(dtype=torch.float64, device=DEVICE)
    cache = KVCache(config, [3], 1, 4, policy="spy", kv_budget=3, sinks=0, recent=0, interval=1, **kind)
    for T in (3, 1, 1, 1):
        feed(cache, torch.ones(1, 2, T, 2, **kind), torch.zeros(1, T, 2, **kind))
    expected = [[11 / 6, 5 / 6, 2 / 6], [13 / 6, 7 / 6, 2 / 6], [15 / 6, 9 / 6, 2 / 6]]  # a new key starts from 0
    torch.testing.assert_close(torch.stack(shown).flatten(1), torch.tensor(expected, **kind), atol=1e-14, rtol=0)
    assert cache.evicted_at.flatten().tolist() == [N, N, 3, 4, 5, N, N]  # so the newest goes every time


def test_redundancy_is_the_mean_similarity_to_all_others():
    """rkv's linear form against the definition, row by row, with free slots full of rubbish."""
    k = torch.randn(2, 3, 9, 4, generator=rng(0), device=DEVICE, dtype=torch.float64)
    attn = torch.rand(2, 3, 9, generator=rng(1), device=DEVICE, dtype=torch.float64)
    pos = torch.arange(9, device=DEVICE).expand(2, 3, 9).clone()
    pos[0, 0, 4:], pos[1, 2, 1:] = -1, -1  # four keys; one key
    k[pos < 0] = 1e6
    scores = POLICIES["rkv"](LayerView(k, pos, window_attn=attn))
    for b in range(2):
        for h in range(3):
            filled = [s for s in range(9) if pos[b, h, s] >= 0]
            similarity = [
                np.mean([F.cosine_similarity(k[b, h, i], k[b, h, j], dim=0).item() for i in filled if i != j] or [0])
                for j in filled
            ]
            want = 0.1 * attn[b, h, filled].cpu().numpy() - 0.9 * softmax(np.array(similarity))
            np.testing.assert_allclose(scores[b, h, filled].cpu().numpy(), want, atol=1e-12)


def test_scores_are_refreshed_every_interval(monkeypatch):
    """Nine tokens are fed to a full cache: interval 4 asks the policy before the 1st, 5th and 9th, in both layers."""
    shown, records = spy(monkeypatch, "pos"), []
    POLICIES["spy"].needs = set()
    for interval, calls in ((1, 9), (4, 3), (5, 2)):
        shown.clear()
        options = dict(policy="spy", kv_budget=6, sinks=1, recent=2, eos_ids=NO_EOS, interval=interval)
        records.append(rollout(tiny(), prompts_of([6]), 1, 10, generator=rng(0), **options).evicted_at)
        assert len(shown) == 2 * calls
    assert torch.equal(records[0], records[1]) and torch.equal(records[0], records[2])  # the oldest stays the oldest


class Scripted(torch.nn.Module):
    """A model that wants script[b][step] next, with probability 1/2, and the five other tokens with 1/10 each."""

    def __init__(self, script):
        super().__init__()
        self.config = SimpleNamespace(block_size=16, vocab_size=6, n_layer=1, n_head=1, n_kv_head=1, head_dim=2)
        self.weight = torch.nn.Parameter(torch.zeros((), device=DEVICE))
        self.script, self.fed = script, []

    def forward(self, idx, cache):
        self.fed.append(idx.tolist())
        scripts = [[*self.script[row], *[5] * 9] for row in cache.rows.tolist()]
        wanted = torch.tensor([script[len(self.fed) - 1] for script in scripts], device=DEVICE)
        return math.log(5) * F.one_hot(wanted, 6)[:, None].float()


def test_rows_end_at_their_own_eos_by_hand():
    """EOS ids 1 and 4. An EOS inside a prompt ends nothing, token 0 is a token like any other until a row has ended."""
    model = Scripted([[4, 5, 5, 5], [5, 0, 1, 5], [5, 2, 5, 1]])
    r = rollout(model, [[2, 4], [3, 3, 3], [2]], 1, 9, temperature=0, eos_ids=[1, 4])
    assert r.tokens.tolist() == [[2, 4, 4, 0, 0, 0], [3, 3, 3, 5, 0, 1], [2, 5, 2, 5, 1, 0]]
    assert r.length.tolist() == [3, 6, 5] and r.finished.tolist() == [True, True, True]
    mask = torch.tensor([[0, 0, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 0]], dtype=torch.bool, device=DEVICE)
    assert torch.equal(r.response_mask, mask)
    torch.testing.assert_close(r.logp, -math.log(2) * mask)  # greedy, so at temperature 1
    assert (r.evicted_at != 0).tolist() == [[[[t < n for t in range(6)]] for n in (3, 6, 5)]]
    if DEVICE == "cpu":  # a row that has ended leaves the batch; elsewhere the host does not wait to know
        assert model.fed == [[[2, 4, 0], [3, 3, 3], [2, 0, 0]], [[5], [5]], [[0], [2]], [[5]]]

    r = rollout(Scripted(model.script), [[2, 4], [3, 3, 3], [2]], 1, 2, temperature=0, eos_ids=[1, 4])
    assert r.tokens.tolist() == [[2, 4, 4, 0, 0], [3, 3, 3, 5, 0], [2, 5, 2, 0, 0]]
    assert r.length.tolist() == [3, 5, 3] and r.finished.tolist() == [True, False, False]


def test_temperature_divides_the_logits():
    """Odds of 5 to 1 are 25 to 1 at temperature 1/2: the wanted token has 25/30, and its logp says so."""
    model = Scripted([[2]] * 500)
    r = rollout(model, [[3]] * 500, 1, 1, temperature=0.5, eos_ids=NO_EOS, generator=rng(0))
    wanted = r.tokens[:, 1] == 2
    assert abs(wanted.float().mean() - 25 / 30) < 0.07
    torch.testing.assert_close(r.logp[:, 1], torch.where(wanted, 25 / 30, 1 / 30).log())


def test_tokens_are_drawn_as_often_as_their_probabilities_say():
    """Six tokens, two of them impossible, the first and one in the middle; 4,000 draws within five standard errors."""
    p = torch.tensor([0, 0.05, 0.6, 0, 0.25, 0.1], dtype=torch.float64)
    model = Scripted([[0]] * 4000)
    model.forward = lambda idx, cache: p.log().float().expand(len(idx), 1, 6).to(DEVICE)
    r = rollout(model, [[3]] * 4000, 1, 1, eos_ids=NO_EOS, generator=rng(0))
    share = r.tokens[:, 1].bincount(minlength=6).double().cpu() / 4000
    assert ((share - p).abs() <= 5 * (p * (1 - p) / 4000).sqrt()).all()


# ---- rule 11: memory ------------------------------------------------------------------------------------------------


class NewStorages(TorchDispatchMode):
    """Notes the bytes of every storage that an operation creates; a view or an in-place result creates none."""

    def __init__(self):
        super().__init__()
        self.largest = defaultdict(int)  # operation -> bytes

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        given, made = ([x for x in tree_leaves(t) if isinstance(x, torch.Tensor)] for t in ((args, kwargs), result))
        given = {x.untyped_storage().data_ptr() for x in given}
        for storage in (x.untyped_storage() for x in made):
            if storage.data_ptr() not in given:
                self.largest[str(operation)] = max(self.largest[str(operation)], storage.nbytes())
        return result


def watched_rollout(dtype=torch.float32, eos_ids=NO_EOS, **options):
    """A rollout of 8 rows in 32 slots, watched from the end of the prefill to its return.

    One layer's K has 8 * 2 * 32 * 16 numbers: more than any activation, so that nothing has to be left out.
    Returns the rollout, the largest new storage of each operation, and where K and V lay in each step.
    """
    model = tiny(0, 4, 2, dtype, n_embd=64)
    meter, places = NewStorages(), []
    with ExitStack() as stack:

        def after_forward(module, args, kwargs, output):
            cache = kwargs["cache"]
            places.append((cache.k, cache.v))  # held, so that no later storage can lie at the same address
            if len(places) == 1:
                stack.enter_context(meter)

        stack.callback(model.register_forward_hook(after_forward, with_kwargs=True).remove)
        r = rollout(model, prompts_of([40, 23]), 4, 10, eos_ids=eos_ids, generator=rng(0), **options)
    places = [tuple((x.data_ptr(), x.untyped_storage().nbytes()) for x in kv) for kv in places]
    return r, meter.largest, places


ONE_LAYERS_K = 8 * 2 * 32 * 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("policy", FIVE)
def test_decoding_allocates_nothing_larger_than_one_layers_keys(policy, dtype):
    r, largest, places = watched_rollout(dtype, policy=policy, kv_budget=32, prompt_budget=0.9)
    assert ((r.evicted_at > 40) & (r.evicted_at < NEVER)).any()  # it did evict while it was watched
    assert max(largest.values()) <= ONE_LAYERS_K * dtype.itemsize
    assert len(places) == 10 and len(set(places)) == 1  # K and V stay where they were allocated, as large as then
    assert (
        r.kv_bytes == sum(nbytes for _, nbytes in places[0]) == 2 * 2 * ONE_LAYERS_K * dtype.itemsize
    )  # K and V, two layers
    assert r.kv_bytes_dense == r.kv_bytes * 50 // 32


def test_rows_that_end_leave_the_storage_where_it_is():
    r, largest, places = watched_rollout(eos_ids=[*range(6)], policy="h2o", kv_budget=32, prompt_budget=0.9)
    assert len(set(r.length.tolist())) > 3  # so several left, if this is a CPU
    assert max(largest.values()) <= ONE_LAYERS_K * 4 and len(set(places)) == 1


@pytest.mark.parametrize("mistake", ["append and slice", "repeat the heads", "move", "float32 copy"])
def test_the_meter_sees_what_it_must_not_find(mistake, monkeypatch):
    """The usual ways to evict or to attend, beside the right one: each is larger than one layer's K, or moves it."""
    decode = KVCache._decode

    def wrong(self, layer, q, k, v):
        if mistake == "append and slice":
            torch.cat((self.k[layer], k), dim=2)[:, :, 1:].contiguous()
        if mistake == "repeat the heads":
            self.k[layer].repeat_interleave(2, dim=1)
        if mistake == "move":
            self.k = self.k.clone()
        if mistake == "float32 copy":
            self.k[layer].float()
        return decode(self, layer, q, k, v)

    monkeypatch.setattr(KVCache, "_decode", wrong)
    _, largest, places = watched_rollout(torch.bfloat16, kv_budget=32)
    assert max(largest.values()) > ONE_LAYERS_K * 2
    assert (len(set(places)) > 1) == (mistake == "move")


# ---- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(policy="snap"), "policy='snap': must be one of snapkv, h2o, streaming, random, rkv"),
        (dict(kv_budget=6), r"kv_budget=6: must be 0 .* at least sinks \+ recent \+ 1 = 7"),
        (dict(kv_budget=-1), "kv_budget=-1: must be 0 .* = 7"),
        (dict(prompt_budget=6), r"prompt_budget=6: .* at least sinks \+ recent \+ 1 = 7"),
        (dict(prompt_budget=1), "prompt_budget=1: .* fraction"),  # one key; all keys are 1.0
        (dict(prompt_budget=1.5), r"prompt_budget=1.5: a fraction must be in \(0, 1\]"),
        (dict(prompt_budget=-0.5), "prompt_budget=-0.5: a fraction must be in"),
        (dict(prompt_budget=math.nan), "prompt_budget=nan: a fraction must be in"),
        (dict(sinks=-1), "sinks=-1: must be at least 0"),
        (dict(recent=-1), "recent=-1: must be at least 0"),
        (dict(pool=0), "pool=0: must be at least 1"),
        (dict(pool=4), "pool=4: must be odd"),
        (dict(interval=0), "interval=0: must be at least 1"),
        (dict(kv_budget=9, interval=8), "interval=8: must be at most kv_budget - sinks = 7"),
    ],
)
def test_a_bad_cache_option_is_refused(options, message):
    options = dict(sinks=2, recent=4) | options
    for refuses in (check_options, lambda **o: rollout(tiny(), [[1]], 1, 1, eos_ids=[], **o)):
        with pytest.raises(ValueError, match=message) as error:
            refuses(**options)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("prompts", "group_size", "new", "options", "message"),
    [
        ([], 1, 1, {}, "no prompts: .* at least one prompt"),
        ([[1], [], [2]], 1, 1, {}, "prompt 1 of 3 is empty: .* at least one token"),
        ([[1]], 0, 1, {}, "group_size=0, max_new_tokens=1: both must be at least 1"),
        ([[1]], 1, 0, {}, "group_size=1, max_new_tokens=0: both"),
        ([[1], [1] * 60], 1, 5, {}, "prompt of 60 tokens and max_new_tokens=5 exceed block_size=64"),
        ([[1]], 1, 1, {"temperature": -0.1}, r"temperature=-0.1: must be 0 \(greedy\) or at least 0.001"),
        ([[1]], 1, 1, {"temperature": math.nan}, "temperature=nan: must be 0"),
        ([[1]], 1, 1, {"temperature": 1e-300}, "temperature=1e-300: must be 0"),
        ([[1], [2, 23]], 1, 1, {}, "token id 23"),
        ([[1], [2, -1]], 1, 1, {}, "token id -1"),
    ],
)
def test_a_bad_rollout_is_refused(prompts, group_size, new, options, message):
    with pytest.raises(ValueError, match=message):
        rollout(tiny(), prompts, group_size, new, eos_ids=[], **options)


def test_a_cache_takes_its_prompts_once_and_then_one_token_a_row():
    model = tiny()
    for fed in ((4,), (3, 2), (3, 1, 1, 1)):  # another length, two at once, more than it was made for
        cache = KVCache(model.config, [3, 2], 1, 2, device=DEVICE)
        with pytest.raises(ValueError, match=r"a cache takes 3 once, then 1 up to 2 times"):
            for T in fed:
                model(torch.ones(2, T, dtype=torch.int64, device=DEVICE), cache=cache)


def test_the_longest_legal_rollout_fits():
    assert rollout(tiny(), [[1] * 60], 1, 4, eos_ids=[]).length == 64


# ---- the learner's pass with shared prompts --------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("new", [1, 9])
@pytest.mark.parametrize(
    "budgets", [{}, {"prompt_budget": 0.5, "recent": 1}, {"kv_budget": 6, "recent": 2}, {"kv_budget": 4, "sinks": 0}]
)
def test_shared_prompts_give_what_whole_rows_give(budgets, new, masked):
    """States and gradients alike in float64: ragged prompts, early ends, rows picked in any order, keys all evicted."""
    options = {"sinks": 1, "recent": 0, "pool": 1} | budgets
    model = tiny(n_head=6, n_kv_head=2, dtype=torch.float64)
    roll = rollout(model, prompts_of([3, 17, 8]), 4, new, eos_ids=[0, 1], generator=rng(1), **options)
    for batch in (roll, roll.select(torch.tensor([5, 0, 7, 11, 3], device=DEVICE))):
        shared = SharedPrompts(batch, masked)
        once = model.hidden(shared.tokens, cache=shared)  # (n, C)
        evicted_at = batch.evicted_at[..., :-1] if masked else None
        whole = model.hidden(batch.tokens[:, :-1], evicted_at)[batch.response_mask[:, 1:]]  # (n, C)
        torch.testing.assert_close(once, whole, rtol=0, atol=1e-10)
        weights = torch.randn(whole.shape, generator=rng(2), device=DEVICE, dtype=torch.float64)
        used = [p for name, p in model.named_parameters() if not name.startswith("head")]
        one, other = (torch.autograd.grad((x * weights).sum(), used) for x in (once, whole))
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-9)
