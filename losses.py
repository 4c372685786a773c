"""Every loss of the project, as pure functions on tensors: GRPO, SMD, on-policy distillation, importance corrections.

All of them work on *aligned* tensors: logits[b, i] scores targets[b, i], and the caller shifts once (logits[:, :-1],
tokens[:, 1:]). B rows, T positions, V vocabulary, G samples per prompt; `mask` (B,T) is True on response tokens, the
EOS token included.

    pi    the student at temperature tau; tau divides the logits here exactly as it did in the sampler
    pi_m  the same weights under the shadow mask: the distribution that drew the tokens
    pi_d  the same weights with the full view
    q     the teacher

Whatever is reported of a micro-batch is a sum, a maximum or a count, so that the pieces of a step add up to the step.

Simplifications: no KL to a reference policy, no entropy bonus, one temperature for student and teacher.
"""

import math

import torch

MAX_LOG_RATIO = 20.0  # exp(20) = 5e8 is finite, and so is its square: a range for float32, not a correction
TRUNCATION = 2.0  # cap of importance mode token_truncated, the usual default of truncated importance sampling
SPARSE_RL_VETO, SPARSE_RL_CAP = 1e-4, 1.5


# ---- shared pieces ---------------------------------------------------------------------------------------------------


def _one_of(name, value, allowed):
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; allowed: {', '.join(allowed)}")


def _scale(logits, temperature):
    """logits / tau in float32 (float64 stays float64). float32 logits at tau = 1 come back as they are, uncopied."""
    if not temperature > 0:
        raise ValueError(
            f"temperature is {temperature}; a loss needs one above 0 (0, greedy decoding, has no gradient)"
        )
    if logits.dtype not in (torch.float32, torch.float64):
        logits = logits.float()
    return logits if temperature == 1 else logits / temperature


def _support(student_logits, teacher_logits, k):
    """Both models' logits on the student's k likeliest tokens (k = 0 or None: on all V). (...,V) x 2 -> (...,k) x 2"""
    V = student_logits.size(-1)
    if teacher_logits.size(-1) != V:
        raise ValueError(
            f"the student has {V} tokens and the teacher {teacher_logits.size(-1)}; they must share one vocabulary"
        )
    k = k or V
    if not 1 <= k <= V:
        raise ValueError(f"k is {k}; allowed: 1 to the vocabulary size {V}, or 0 for all of it")
    if k == V:
        return student_logits, teacher_logits
    top = student_logits.detach().topk(k, dim=-1).indices  # (...,k)
    return student_logits.gather(-1, top), teacher_logits.gather(-1, top)


def _log_odds(logp, logq):
    """pi and log pi - log q, the latter 0 where pi is 0, because 0 log(0 / q) means 0, for q = 0 too. (...,V) x 2"""
    p = logp.exp()
    return p, torch.where(p > 0, logp - logq, 0.0)  # where, not a product: the unused branch must not send NaN back


def token_logprobs(logits, targets, temperature=1.0):
    """log pi(target) = z_target / tau - logsumexp(z / tau).    logits (...,V), targets (...) int64 -> (...)

    Natural logarithm of the whole vocabulary's softmax, computed in at least float32. Of the (...,V) log-softmax only
    the one wanted entry is built, so float32 logits at tau = 1 are never copied.
    """
    chosen = _scale(logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1), temperature)  # (...)
    return chosen - _scale(logits, temperature).logsumexp(-1)  # (...)


def entropy(logits, temperature=1.0):
    """H(pi) = -sum_v pi_v log pi_v in nats, with 0 log 0 = 0.    logits (...,V) -> (...)"""
    logp = _scale(logits, temperature).log_softmax(-1)  # (...,V)
    p, surprise = _log_odds(logp, torch.zeros_like(logp))
    return -(p * surprise).sum(-1)


# ---- GRPO and SMD ----------------------------------------------------------------------------------------------------


def group_advantages(rewards, group_size, scale="std"):
    """A_b = (r_b - mean) / (std + 1e-4) within each group of G samples of one prompt (GRPO, arXiv 2402.03300).

    rewards (B,) with row b = n*G + g, group_size G -> (B,) float32. Population std; scale="none" keeps r_b - mean.
    A group whose rewards are all equal gets exactly 0: its std may come out as 1e-9 instead of 0, and a division by
    that would turn rounding into a reward. Example, G = 4: rewards 1 0 0 1 -> advantages 1 -1 -1 1 (times 0.9998).
    """
    _one_of("scale", scale, ("std", "none"))
    if group_size < 1 or len(rewards) % group_size:
        raise ValueError(f"{len(rewards)} rewards do not make groups of {group_size}; the number must divide evenly")
    rewards = rewards.float()
    if not rewards.isfinite().all():
        bad = int((~rewards.isfinite()).nonzero()[0])
        raise ValueError(f"reward {bad} is {rewards[bad].item()}; every reward must be a finite number")
    r = rewards.view(-1, group_size)  # (N, G)
    centred = r - r.mean(1, keepdim=True)
    if scale == "std":
        centred = centred / (r.std(1, keepdim=True, correction=0) + 1e-4)
    equal = r.amax(1, keepdim=True) == r.amin(1, keepdim=True)  # (N, 1)
    return torch.where(equal, 0.0, centred).flatten()


def grpo_loss(logp, old_logp, advantages, mask, *, clip=0.2, clip_high=None, normalizer, weights=None):
    """The clipped policy-gradient loss of PPO and GRPO (arXiv 1707.06347, 2402.03300), one term per response token:

        L = - sum_bt w_bt min(rho_bt A_bt, clamp(rho_bt, 1 - clip, 1 + clip_high) A_bt) / normalizer
        rho_bt = exp(clamp(logp - old_logp, -20, 20))

    logp, old_logp, mask (B,T); advantages (B,) or (B,T); weights None or (B,T), see importance_weights; clip_high None
    means clip. normalizer: the response tokens of the whole optimiser step, over micro-batches and ranks. It comes
    from outside because a mean of means would give tokens of short micro-batches more weight.

    Positions off the mask may hold anything, NaN included: they reach neither the loss nor the gradient.
    Returns the loss and detached stats: clipped (count of tokens whose gradient the clip removed), ratio_max, gap_max
    and gap_sum (of |logp - old_logp| over response tokens), push_down (the sum of |A| over the tokens with A < 0 that
    the learner gives less than .001: to make a token less likely that it would hardly say moves all others).
    """
    if not normalizer > 0:
        raise ValueError(f"normalizer is {normalizer}; it counts the response tokens of a step and must be above 0")
    if advantages.dim() < logp.dim():
        advantages = advantages.unsqueeze(-1)  # (B, 1)
    gap = torch.where(mask, logp - old_logp, 0.0)  # (B, T), before exp: exp(inf) * 0 would be NaN on the way back
    rho = gap.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()  # (B, T)
    free = rho * advantages
    kept = rho.clamp(1 - clip, 1 + (clip if clip_high is None else clip_high)) * advantages
    gain = torch.minimum(free, kept)  # (B, T)
    if weights is not None:
        gain = gain * weights
    loss = -torch.where(mask, gain, 0.0).sum() / normalizer
    with torch.no_grad():
        stats = {
            "clipped": (mask & (kept < free)).sum(),
            "ratio_max": torch.where(mask, rho, 0.0).max(),
            "gap_max": gap.abs().max(),
            "gap_sum": gap.abs().sum(),
            "push_down": -torch.where(mask & (logp < math.log(1e-3)), advantages, 0.0).clamp(max=0).sum(),
        }
    return loss, stats


def smd_loss(
    masked_logits,
    dense_logits,
    targets,
    old_logp,
    advantages,
    mask,
    *,
    lam,
    track_b,
    clip=0.2,
    clip_high=None,
    normalizer,
    temperature=1.0,
):
    """Shadow Mask Distillation (arXiv 2605.06850): the learner wears the sampler's blindfold, the full view teaches.

        L = L_A + lam * sum_bt KL_bt / normalizer
        L_A   grpo_loss on pi_m, with the sampler's own logp as old: rho = 1 at the first update
        KL    dense_teaches_masked   KL(pi_m || sg pi_d)   the paper's text: pi_m carries the gradient
              masked_teaches_dense   KL(pi_d || sg pi_m)   the authors' public code: pi_d carries it

    masked_logits (B,T,V); dense_logits the same, or None when lam is 0; targets, old_logp, mask (B,T); advantages (B,)
    or (B,T). Only response positions are scored, so whatever padding holds reaches nothing.
    Returns the loss and grpo_loss's stats plus kd, the sum of the KL over response tokens (0 when lam is 0).
    """
    _one_of("track_b", track_b, ("dense_teaches_masked", "masked_teaches_dense"))
    if lam < 0 or (lam > 0 and dense_logits is None):
        raise ValueError(
            f"lam is {lam} and dense_logits is {'missing' if dense_logits is None else 'given'}; "
            "lam must be at least 0, and above 0 Track B needs the dense logits"
        )
    masked_logits = masked_logits[mask]  # (n, V), n response tokens
    picked = token_logprobs(masked_logits, targets[mask], temperature)  # (n,)
    logp = picked.new_zeros(mask.shape).masked_scatter(mask, picked)  # (B, T)
    loss, stats = grpo_loss(logp, old_logp, advantages, mask, clip=clip, clip_high=clip_high, normalizer=normalizer)
    kd = loss.new_zeros(())
    if lam > 0:
        student, teacher = masked_logits, dense_logits[mask]  # (n, V) x 2
        if track_b == "masked_teaches_dense":
            student, teacher = teacher, student
        kd = reverse_kl(student, teacher, temperature=temperature).sum()
        loss = loss + lam * kd / normalizer
    return loss, stats | {"kd": kd.detach()}


# ---- on-policy distillation ------------------------------------------------------------------------------------------


def reverse_kl(student_logits, teacher_logits, *, temperature=1.0, k=None):
    """KL(pi || q) = sum_v pi_v (log pi_v - log q_v), differentiable in the student, the teacher held constant.

    student_logits, teacher_logits (...,V) -> (...). Its gradient is the exact competitor of every sampled estimator
    below (opd=full). With k the sum runs over the student's k likeliest tokens, both models renormalised there
    (opd=topk_kl): cheaper, and biased, because the rest of the vocabulary feels nothing (vOPD, arXiv 2605.07865).
    A token that both models forbid (logit -inf) adds 0; one that only the teacher forbids makes the KL infinite.
    """
    student, teacher = _support(student_logits, teacher_logits.detach(), k)
    logp = _scale(student, temperature).log_softmax(-1)  # (...,k or V)
    logq = _scale(teacher, temperature).log_softmax(-1)
    p, log_odds = _log_odds(logp, logq)
    return (p * log_odds).sum(-1)


def _optimal_baseline(student_logits, teacher_logits, temperature):
    """b* = E[n r] / E[n] under pi, r_a = log q_a - log pi_a, n_a = 1 - 2 pi_a + sum_v pi_v^2.    (...,V) x 2 -> (...)

    n_a = |onehot_a - pi|^2 is the squared norm of the score in logit space, and E[n (r - b)^2] is least at b = b*.
    float64, because a confident student has E[n] = 1 - sum pi^2 near 0, which float32 would fill with rounding.
    """
    logp = _scale(student_logits.double(), temperature).log_softmax(-1)
    logq = _scale(teacher_logits.double(), temperature).log_softmax(-1)
    p, log_odds = _log_odds(logp, logq)
    n = 1 - 2 * p + p.square().sum(-1, keepdim=True)  # (...,V)
    mean_n = (p * n).sum(-1)  # (...)
    best = -(p * n * log_odds).sum(-1) / mean_n
    return torch.where(mean_n < 1e-12, -(p * log_odds).sum(-1), best)


def other_rows_mean(r, mask, total, count):
    """The plain control's baseline: for each row the mean of r over the response tokens of all *other* rows.

    r (B,T), 0 off the mask (B,T); total and count: the sum of r and the number of response tokens over every row of the
    step, all micro-batches and ranks -> (B,1). 0 when there is no other row. A row's own tokens stay out because a
    baseline must not depend on the action that it is subtracted from.
    """
    rest = count - mask.sum(1, keepdim=True)  # (B, 1)
    return (total - r.sum(1, keepdim=True)) / rest.clamp(min=1)


def _returns_to_go(r, gamma):
    """R_t = r_t + gamma R_{t+1} along the last dimension. r (B,T), 0 off the response -> (B,T)"""
    out, tail = r.clone(), 0.0
    for t in reversed(range(r.size(1))):
        out[:, t] = tail = r[:, t] + gamma * tail
    return out


@torch.no_grad()
def opd_advantages(
    student_logits, teacher_logits, targets, *, baseline="none", k=0, gamma=0.0, mask=None, temperature=1.0
):
    """On-policy distillation as a policy gradient: A_t for the loss -sum_t A_t log pi(y_t) (vOPD, arXiv 2605.07865).

        r_t = log q(y_t) - log pi(y_t)         E_pi[r_t grad log pi(y_t)] = -grad KL(pi || q)
        none     A = r                         the single-sample estimator: right on average, noisy
        mean     A = r - mean of r over the other rows' response tokens
        value    A = r - V, V = E_pi[r] = -KL(pi || q): the closed-form value function. With k > 0, V is taken on the
                 student's k likeliest tokens, both models renormalised; r keeps the full normaliser
        optimal  A = r - b*, b* = E[n r] / E[n]: the least variance in logit space of all baselines that see only the
                 state (Greensmith, Bartlett, Baxter 2004); n is the squared norm of the score
        gamma    r_t becomes its return-to-go, sum_{s >= t} gamma^(s-t) r_s; V stays the one-step value

    student_logits, teacher_logits (B,T,V), targets (B,T), mask (B,T) or None (every position counts) -> (B,T),
    detached, 0 off the mask. V and b* depend on the state alone, so they leave the mean gradient of the sum over tokens
    unchanged. Computed once per rollout, with the student that sampled, one row at a time: what is needed beside the
    logits is (T,V), never a second (B,T,V).
    """
    _one_of("baseline", baseline, ("none", "mean", "value", "optimal"))
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma is {gamma}; allowed: 0 (the immediate reward) to 1 (the undiscounted return)")
    mask = torch.ones_like(targets, dtype=torch.bool) if mask is None else mask
    rewards, baselines = [], []
    for s, q, y in zip(student_logits, teacher_logits, targets, strict=True):  # (T, V), (T, V), (T,)
        r = token_logprobs(q, y, temperature) - token_logprobs(s, y, temperature)  # (T,)
        b = torch.zeros_like(r)
        if baseline == "value":
            b = -reverse_kl(s, q, temperature=temperature, k=k)
        elif baseline == "optimal":
            b = _optimal_baseline(s, q, temperature).to(r)
        rewards.append(r)
        baselines.append(b)
    r = torch.where(mask, torch.stack(rewards), 0.0)  # (B, T)
    if gamma > 0:
        r = _returns_to_go(r, gamma)
    b = torch.stack(baselines)  # (B, T)
    if baseline == "mean":
        b = other_rows_mean(r, mask, r.sum(), mask.sum())  # (B, 1)
    return torch.where(mask, r - b, 0.0)


# ---- importance corrections ------------------------------------------------------------------------------------------


@torch.no_grad()
def importance_weights(dense_logp, sampler_logp, mask, mode="token"):
    """Weights for a full-view learner whose tokens came from a compressed cache: xi_bt = pi_d(y_t) / pi_m(y_t).

        token            w_bt = xi_bt               corrects each action, not the distribution of the states before it
        token_truncated  w_bt = min(xi_bt, 2)
        sequence         w_bt = prod_s xi_bs        exact, and of a variance that grows with the length
        sparse_rl        w_bt = min(xi_bt, 1.5), all 0 in a row with any xi < 1e-4 (Sparse-RL, arXiv 2601.10079)

    dense_logp (the old policy with the full view), sampler_logp, mask (B,T) -> weights (B,T), detached, 0 off the mask.
    Every log-ratio is clamped to +-20 before exp, the sequence's after summing. sparse_rl weights still have to be
    divided by their mean over the unvetoed response tokens of the step, weight_sum / weight_count added up over
    micro-batches and ranks: a mean taken in here would depend on the micro-batch.

    stats: weight_sum, weight_count, weight_max over unvetoed response tokens; vetoed and rows, counts of rows with a
    response; seq_sum and seq_sq_sum, of the sequence weight and its square whichever the mode, so that the effective
    sample size of the step, in sequences, is seq_sum^2 / seq_sq_sum.
    """
    _one_of("mode", mode, ("token", "token_truncated", "sequence", "sparse_rl"))
    log_xi = torch.where(mask, dense_logp - sampler_logp, 0.0)  # (B, T)
    xi = log_xi.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()  # (B, T)
    sequence = log_xi.sum(1).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()  # (B,)
    rows = mask.any(1)  # (B,)
    kept = mask  # (B, T)
    if mode == "token":
        w = xi
    elif mode == "token_truncated":
        w = xi.clamp(max=TRUNCATION)
    elif mode == "sequence":
        w = sequence.unsqueeze(1).expand_as(xi)
    else:
        w = xi.clamp(max=SPARSE_RL_CAP)
        kept = mask & (xi >= SPARSE_RL_VETO).all(1, keepdim=True)
    w = torch.where(kept, w, 0.0)
    stats = {
        "weight_sum": w.sum(),
        "weight_count": kept.sum(),
        "weight_max": w.max(),
        "vetoed": (rows & ~kept.any(1)).sum(),
        "rows": rows.sum(),
        "seq_sum": sequence[rows].sum(),
        "seq_sq_sum": sequence[rows].square().sum(),
    }
    return w, stats
