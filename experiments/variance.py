"""How noisy is each estimator of the distillation gradient, where, and how fast do importance weights die?

`experiments.reproduce` runs these functions for its claims `variance`, `bridge` and `weights`. A student is frozen,
R independent rollout batches are drawn, and every estimator gets the same rollouts. Gradients are divided by the
constant B * max_new_tokens: a count of the sampled tokens would itself be random, and biased. Estimators are streamed,
so that memory is two gradients for each, whatever R.
"""

import itertools
import random
import time

import torch

import losses
from kv_compress import rollout
from train import load_task

ADVANTAGES = {  # estimators -sum A_t log pi(y_t): settings of losses.opd_advantages
    "sampled": {},
    "mean": {"baseline": "mean"},
    "vopd": {"baseline": "value"},
    "vopd k=1": {"baseline": "value", "k": 1},
    "vopd k=5": {"baseline": "value", "k": 5},
    "vopd k=20": {"baseline": "value", "k": 20},
    "vopd k=100": {"baseline": "value", "k": 100},
    "vopd_optimal": {"baseline": "optimal"},
    "return-to-go": {"gamma": 1.0},
}
DIRECT = {"topk_kl k=20": 20, "full": None}  # losses in closed form: k of losses.reverse_kl

PROMPTS, SAMPLES = 16, 4


class Meter:
    """Streaming mean and trace of the covariance of a series of vectors (Welford 1962).

    m_n = m_{n-1} + (g_n - m_{n-1}) / n,    S_n = S_{n-1} + (g_n - m_{n-1}) . (g_n - m_n),    trace = S_n / (n - 1)
    """

    def __init__(self):
        self.n, self.mean, self.squares, self.seconds = 0, 0.0, 0.0, 0.0

    def add(self, g):
        """g (D,)"""
        self.n += 1
        off = g - self.mean  # (D,)
        self.mean = self.mean + off / self.n
        self.squares += (off @ (g - self.mean)).item()

    @property
    def trace(self):
        return self.squares / (self.n - 1)


def loss_sum(name, logits, teacher_logits, targets, mask):
    """The estimator's loss, summed over response tokens. logits (B,T,V) x 2, targets and mask (B,T) -> scalar"""
    if name in DIRECT:
        return losses.reverse_kl(logits[mask], teacher_logits[mask], k=DIRECT[name]).sum()
    how = ADVANTAGES[name] | {"k": min(ADVANTAGES[name].get("k", 0), logits.size(-1))}
    A = losses.opd_advantages(logits, teacher_logits, targets, mask=mask, **how)  # (B, T)
    return -(A[mask] * losses.token_logprobs(logits[mask], targets[mask])).sum()


def score(student, teacher, out, masked=True):
    """Aligned student logits (B,T-1,V) with their graph, teacher logits, targets (B,T-1), mask (B,T-1) of a Rollout.

    masked: the student sees what it saw in the rollout, so that what is differentiated is the distribution that drew
    the tokens; otherwise it sees everything, and its tokens are off-policy.
    """
    inputs = out.tokens[:, :-1]
    logits = student(inputs, evicted_at=out.evicted_at[..., :-1] if masked else None)
    with torch.no_grad():
        teacher_logits = teacher(inputs)
    return logits, teacher_logits, out.tokens[:, 1:], out.response_mask[:, 1:]


def measure(student, teacher, draw, rounds, max_new_tokens, masked=True, names=(*ADVANTAGES, *DIRECT)):
    """Run `rounds` rollouts draw() -> Rollout through the estimators: {name: Meter}, mean exact KL a token in nats.

    Each Meter holds the mean (D,) over all parameters in float64, the covariance's trace, and the CPU seconds that loss
    and backward took, the two forward passes not counted. Every batch has new prompts, so even the trace of "full" is
    above 0: that much of the noise comes from the states, and no baseline takes it away.
    """
    parameters = list(student.parameters())
    meters = {name: Meter() for name in names}
    kl, tokens = 0.0, 0
    for _ in range(rounds):
        aligned = score(student, teacher, draw(), masked)
        logits, _, _, mask = aligned
        for name, meter in meters.items():
            start = time.process_time()
            loss = loss_sum(name, *aligned) / (len(logits) * max_new_tokens)
            grads = torch.autograd.grad(loss, parameters, retain_graph=True)
            meter.seconds += time.process_time() - start
            meter.add(torch.cat([g.flatten() for g in grads]).double())
        with torch.no_grad():
            kl += loss_sum("full", *aligned).item()
        tokens += int(mask.sum())
    return meters, kl / tokens


@torch.no_grad()
def hot_spots(student, teacher, draw, rounds, edges=(0, 0.03, 0.1, 0.3, 1, 3, 10, float("inf"))):
    """The noise of one token's gradient given its state, in logit space and exact, by the token's own KL in nats.

    The estimator (r_a - b) (onehot_a - pi), a ~ pi, has the covariance trace sum_a pi_a (r_a - b)^2 n_a - |g|^2, with
    n_a = 1 - 2 pi_a + sum_v pi_v^2 and the exact gradient g_v = pi_v (r_v - E r) whatever b. Returns per bin the number
    of tokens and the mean trace under b = 0, the batch mean of r, V, V on the student's top 20, and b*.
    """
    rows = []
    for _ in range(rounds):
        logits, teacher_logits, targets, mask = score(student, teacher, draw())
        s, q = logits[mask].double(), teacher_logits[mask].double()  # (n, V)
        logp = s.log_softmax(-1)
        p, r = logp.exp(), q.log_softmax(-1) - logp  # (n, V)
        kl = -(p * r).sum(-1)  # (n,)
        n = 1 - 2 * p + p.square().sum(-1, keepdim=True)  # (n, V)
        g = p * (r + kl[:, None])  # (n, V)
        sampled = r.gather(-1, targets[mask][:, None]).mean()
        baselines = {"sampled": 0 * kl, "mean": sampled.expand_as(kl), "vopd": -kl}
        baselines["vopd k=20"] = -losses.reverse_kl(s, q, k=20)
        baselines["vopd_optimal"] = (p * n * r).sum(-1) / (p * n).sum(-1).clamp(min=1e-12)
        traces = [(p * (r - b[:, None]).square() * n).sum(-1) - g.square().sum(-1) for b in baselines.values()]
        rows.append(torch.stack([kl, *traces], dim=1))  # (n, 6)
    rows, names = torch.cat(rows), list(baselines)
    bins = []
    for low, high in itertools.pairwise(edges):
        inside = rows[(rows[:, 0] >= low) & (rows[:, 0] < high), 1:]
        if len(inside):
            means = dict(zip(names, inside.mean(0).tolist(), strict=True))
            bins.append({"kl_from": low, "kl_to": min(high, 1e9), "tokens": len(inside)} | means)
    return bins


def drawer(model, config, seed, prompts=PROMPTS, samples=SAMPLES, **cache_options):
    """A function that draws one independent rollout batch of the task's training problems a call."""
    task, rng = load_task(config.task), random.Random(f"variance {seed}")
    generator = torch.Generator().manual_seed(seed)

    def draw():
        batch = [task.tokenizer.encode(task.make_problem(rng, "train").prompt) for _ in range(prompts)]
        eos_ids = [task.tokenizer.eos_id]
        return rollout(
            model, batch, samples, config.max_new_tokens, eos_ids=eos_ids, generator=generator, **cache_options
        )

    return draw


def distil(student, teacher, draw, steps, learning_rate=1e-3):
    """Move the student towards the teacher by exact KL(pi || q) on its own rollouts, in place."""
    optimizer = torch.optim.Adam(student.parameters(), lr=learning_rate)
    for _ in range(steps):
        aligned = score(student, teacher, draw())
        optimizer.zero_grad()
        (loss_sum("full", *aligned) / aligned[-1].sum()).backward()
        optimizer.step()


def effective_sizes(dense_logp, out, n):
    """Over the first n response tokens: sequence ESS, token ESS, share small, share vetoed. dense_logp (B,T-1)

    ESS = (sum w)^2 / sum w^2, as a share of the weights it is taken over: sequences, each with the product of its first
    tokens' ratios, or tokens with their own. small: sequences that weigh less than .01; vetoed: a ratio under 1e-4.
    """
    sampler, mask = out.logp[:, 1:], out.response_mask[:, 1:]  # (B, T-1)
    mask = mask & (mask.cumsum(1) <= n)
    token, stats = losses.importance_weights(dense_logp, sampler, mask, "token")
    sequence, _ = losses.importance_weights(dense_logp, sampler, mask, "sequence")
    _, veto = losses.importance_weights(dense_logp, sampler, mask, "sparse_rl")
    return (
        (stats["seq_sum"] ** 2 / stats["seq_sq_sum"] / stats["rows"]).item(),
        (token.sum() ** 2 / token.square().sum() / mask.sum()).item(),
        (sequence.amax(1) < 0.01).float().mean().item(),
        (veto["vetoed"] / veto["rows"]).item(),
    )
