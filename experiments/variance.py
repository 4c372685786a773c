"""How noisy is each estimator of the distillation gradient, and how fast do importance weights die? Two tables.

    python -m experiments.variance        covariance of the on-policy distillation estimators (vOPD, arXiv 2605.07865)
    python -m experiments.variance ess    effective sample size of importance weights under a compressed cache

The first freezes a student, draws R independent rollout batches and gives every estimator the same rollouts. Gradients
are divided by the constant B * max_new_tokens: a count of the sampled tokens would itself be random, and biased.
Estimators are streamed, so that memory is two gradients for each, whatever R.

Warm starts are train.py's, kept in out/warm. Every student is measured with the full view of its prompt.
"""

import random
import sys
import time

import torch

import losses
from kv_compress import rollout
from train import CACHE_KEYS, Config, load_task, warm_start

ADVANTAGES = {  # estimators -sum A_t log pi(y_t): settings of losses.opd_advantages
    "sampled": {},
    "mean": {"baseline": "mean"},
    "vopd": {"baseline": "value"},
    "vopd k=1": {"baseline": "value", "k": 1},
    "vopd k=5": {"baseline": "value", "k": 5},
    "vopd k=20": {"baseline": "value", "k": 20},
    "vopd_optimal": {"baseline": "optimal"},
    "return-to-go": {"gamma": 1.0},
}
DIRECT = {"topk_kl k=20": 20, "full": None}  # losses in closed form: k of losses.reverse_kl

TEACHERS = {
    "recall": Config(task="recall", warm_iters=600),
    "spellings": Config(task="spellings_teacher", warm_iters=300),
}
STUDENTS = {  # configuration of its warm start, steps of exact distillation after it
    "far": [(Config(task="recall", warm_iters=50), 0), (Config(task="spellings", warm_iters=600), 0)],
    "near": [(Config(task="recall", warm_iters=200), 0), (Config(task="spellings", warm_iters=600), 30)],
}
PROMPTS, SAMPLES, ROUNDS = 16, 4, 64


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
    A = losses.opd_advantages(logits, teacher_logits, targets, mask=mask, **ADVANTAGES[name])  # (B, T)
    return -(A[mask] * losses.token_logprobs(logits[mask], targets[mask])).sum()


def score(student, teacher, out):
    """Aligned student logits (B,T-1,V) with their graph, teacher logits, targets (B,T-1), mask (B,T-1) of a Rollout.

    The student sees what it saw in the rollout: what is differentiated is the distribution that drew the tokens.
    """
    inputs = out.tokens[:, :-1]
    logits = student(inputs, evicted_at=out.evicted_at[..., :-1])
    with torch.no_grad():
        teacher_logits = teacher(inputs)
    return logits, teacher_logits, out.tokens[:, 1:], out.response_mask[:, 1:]


def measure(student, teacher, draw, rounds, max_new_tokens):
    """Run `rounds` rollouts draw() -> Rollout through every estimator: {name: Meter}, mean exact KL a token in nats.

    Each Meter holds the mean (D,) over all parameters in float64, the covariance's trace, and the CPU seconds that loss
    and backward took, the two forward passes not counted. Every batch has new prompts, so even the trace of "full" is
    above 0: that much of the noise comes from the states, and no baseline takes it away.
    """
    parameters = list(student.parameters())
    meters = {name: Meter() for name in (*ADVANTAGES, *DIRECT)}
    kl, tokens = 0.0, 0
    for _ in range(rounds):
        aligned = score(student, teacher, draw())
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


def covariance_table(distance, config, steps, rounds=ROUNDS):
    """Print the table of all estimators for one student: its warm start, moved `steps` steps towards its teacher."""
    teacher_config = TEACHERS[config.task]
    student, teacher = (warm_start(c, load_task(c.task), torch.device("cpu")) for c in (config, teacher_config))
    distil(student, teacher, drawer(student, config, seed=1), steps)
    meters, kl = measure(student, teacher, drawer(student, config, seed=2), rounds, config.max_new_tokens)
    vanilla, exact = meters["sampled"].trace, meters["full"].mean
    batches = f"R = {rounds} batches of {PROMPTS} x {SAMPLES}"
    print(f"\n{config.task}, {distance} student: KL {kl:.2f} nats a token, {batches}")
    print("| estimator | trace of covariance | sampled / this | cosine to exact | CPU ms a batch |")
    print("|---|---|---|---|---|")
    for name, m in meters.items():
        cosine = torch.cosine_similarity(m.mean, exact, dim=0).item()
        print(f"| {name} | {m.trace:.3g} | {vanilla / m.trace:.2f} | {cosine:.3f} | {1e3 * m.seconds / m.n:.0f} |")


def ess_table(config, rows=1024):
    """Print effective sample sizes against response length, for a warm-started student at 50% and 25% of the keys.

    ESS = (sum w)^2 / sum w^2, as a share of the n weights it is taken over: sequences, each with the product of its
    first tokens' ratios, or tokens with their own. small: sequences below .01; vetoed: those with a ratio under 1e-4.
    """
    model = warm_start(config, load_task(config.task), torch.device("cpu"))
    print("| keys kept | tokens | sequence ESS | token ESS | small | vetoed |\n|---|---|---|---|---|---|")
    for keep in (0.5, 0.25):
        options = {key: getattr(config, key) for key in CACHE_KEYS} | {"prompt_budget": keep}
        out = drawer(model, config, seed=3, prompts=rows, samples=1, **options)()
        with torch.no_grad():
            dense = losses.token_logprobs(model(out.tokens[:, :-1]), out.tokens[:, 1:])  # (B, T-1)
        for n in range(1, config.max_new_tokens + 1):
            print(f"| {keep:.0%} | {n} | " + " | ".join(f"{x:.2f}" for x in effective_sizes(dense, out, n)) + " |")


def effective_sizes(dense_logp, out, n):
    """Over the first n response tokens: sequence ESS, token ESS, share small, share vetoed. dense_logp (B,T-1)"""
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


def main(argv):
    torch.set_num_threads(1)
    if argv == ["ess"]:
        ess_table(Config(task="recall"))
    elif not argv:
        for distance, students in STUDENTS.items():
            for config, steps in students:
                covariance_table(distance, config, steps)
    else:
        raise SystemExit(f"{' '.join(argv)!r}: the only argument is ess; nothing at all prints the covariance tables")


if __name__ == "__main__":
    main(sys.argv[1:])
