"""The two papers' claims, measured: one command a claim.

    python -m experiments.reproduce                     the claims and what would confirm or refute each
    python -m experiments.reproduce collapse            three seeds; writes experiments/results/collapse.json,
                                                        assets/collapse.png, and prints a verdict
    python -m experiments.reproduce collapse --quick    every arm for a few steps, into out/reproduce/quick

A claim is a function of `Bench` that asks for cells (a function and its arguments: one arm and one seed), and returns
what goes into the JSON. Two cells run side by side, one thread each. A finished cell is kept in out/reproduce under its
arguments, so a claim that was stopped goes on where it was, and claims share what they have in common; delete the
folder after a change of the code. Configurations stand below, the same for every arm, fixed before the final runs.
"""

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import multiprocessing
import random
import shutil
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

import losses
import train
from experiments import memory, variance
from kv_compress import POLICIES
from train import CACHE_KEYS, Config, load_task

ROOT = Path(__file__).parent.parent
CELLS = Path("out/reproduce")
BLOCK = 20  # steps that a point of a stored curve averages
CPU = torch.device("cpu")


# ---- cells: what one process measures --------------------------------------------------------------------------------


def short(x):
    """Numbers to five digits, all the way down."""
    if isinstance(x, dict):
        return {str(k): short(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [short(v) for v in x]
    return float(f"{x:.5g}") if isinstance(x, float) else x


def rl(decode=(), problems=2048, **options):
    """Train with Config(**options), then decode the eval problems under each prompt_budget of `decode` (0: dense).

    Returns curves (means over BLOCK steps, but the maximum for gap_max), evals during training, `final` with the
    accuracy of each decoding, `right` with the problems it got right as a hexadecimal number (to compare arms problem
    by problem), and times.
    """
    config = Config(**options)
    Path(config.warm_dir).mkdir(parents=True, exist_ok=True)
    summary = train.train(config)
    rows = [json.loads(line) for line in (Path(config.out_dir) / "log.jsonl").read_text().splitlines()]
    blocks = [rows[i : i + BLOCK] for i in range(0, len(rows), BLOCK)]
    names = ("reward", "gap_mean", "gap_max", "grad_norm", "grad_var_adam", "entropy", "push_down", "ess", "opd_kl")
    curves = {
        name: [(max if name == "gap_max" else statistics.fmean)([row[name] for row in block]) for block in blocks]
        for name in names
        if name in rows[0]
    }
    evals = [{"step": 0} | summary["eval"]["before"]]
    evals += [{"step": row["step"] + 1} | row["eval"] for row in rows if "eval" in row]
    task, rng = load_task(config.task), random.Random("eval")
    model = train.load_model(Path(config.out_dir) / "ckpt.pt", task)
    tests = [task.make_problem(rng, "eval") for _ in range(problems)]
    final, right = {}, {}
    for budget in dict.fromkeys((0, config.prompt_budget, *decode)):
        cache = {key: getattr(config, key) for key in CACHE_KEYS} | {"prompt_budget": budget} if budget else {}
        marks = train.grade(model, task, tests, config, **cache)
        final[str(budget)] = marks.float().mean().item()
        right[str(budget)] = f"{int(''.join('01'[int(mark)] for mark in marks), 2):x}"
    last = [row["reward"] for row in rows[-2 * BLOCK :]]
    result = {"curves": curves, "evals": evals, "final": final, "right": right, "last_reward": statistics.fmean(last)}
    result["skipped_steps"] = summary["skipped_steps"]
    return result | {"seconds": {"step": statistics.median(row["seconds"] for row in rows)}}


# ---- the bench -------------------------------------------------------------------------------------------------------


def work(function, arguments, path):
    """In a worker: run a cell with its output in a log, and keep what it returns, or how it failed."""
    torch.set_num_threads(1)
    path.parent.mkdir(parents=True, exist_ok=True)
    start, folder = time.time(), path.with_suffix("")
    with path.with_suffix(".log").open("w") as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        try:
            if function is rl:
                folder.mkdir(exist_ok=True)
                arguments = arguments | {"out_dir": str(folder)}
            result = function(**arguments)
        except Exception as e:  # a failed arm is a result, and is shown
            traceback.print_exc()
            result = {"failed": f"{type(e).__name__}: {e}"}
    shutil.rmtree(folder, ignore_errors=True)
    times = result.pop("seconds", {}) | {"cell": time.time() - start, "process_peak_mb": memory.peak_mb()}
    path.write_text(json.dumps(short(result) | {"seconds": short(times)}))


@dataclass
class Bench:
    """What a claim gets: the seeds to run, whether this is a smoke run, and `run`."""

    seeds: int
    quick: bool
    cell_seconds: float = 0.0

    def run(self, cells: dict[tuple, tuple[Callable, dict]]) -> dict[tuple, dict]:
        """Results by the same keys. Cells that are known already are read; the others run, two at a time."""
        paths = {}
        for key, (function, arguments) in cells.items():
            digest = hashlib.sha256(repr(sorted(arguments.items())).encode()).hexdigest()[:12]
            paths[key] = CELLS / ("quick" if self.quick else "") / f"{function.__name__}-{digest}.json"
        todo = {paths[key]: cells[key] for key in cells if not paths[key].is_file()}
        if self.quick:  # a process a cell would cost more than the cell
            for path, cell in tqdm(todo.items(), desc="cells", unit="cell", disable=None):
                work(*cell, path)
            todo = {}
        spawn = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(2, spawn, max_tasks_per_child=1) as pool:
            futures = [pool.submit(work, *cell, path) for path, cell in todo.items()]
            done = concurrent.futures.as_completed(futures)
            for future in tqdm(done, total=len(futures), desc="cells", unit="cell", disable=not futures):
                future.result()
        results = {key: json.loads(path.read_text()) for key, path in paths.items()}
        self.cell_seconds += sum(result["seconds"]["cell"] for result in results.values())
        return results

    def config(self, **options):
        """Options of one RL cell: BASE and these; a smoke run gets few steps of few rows."""
        if self.quick:
            options |= {"max_iters": 3, "warm_iters": 5, "eval_problems": 16, "eval_interval": 2, "problems": 32}
            options |= {"prompts_per_step": 2, "warm_batch_size": 8}
        return BASE | options


BASE = {
    "prompts_per_step": 16,
    "max_iters": 400,
    "eval_interval": 100,
    "eval_problems": 512,
    "save_interval": 10**6,
    "warm_dir": "out/warm",
}
CLAIMS = {}


@dataclass
class Claim:
    says: str  # the paper's sentence, in our words
    confirms: str
    refutes: str
    measure: Callable  # Bench -> (data, verdict)
    draw: Callable  # (data, matplotlib figure) -> None


def median(xs):
    return statistics.median(xs) if xs else None


def spread(xs):
    """median [least, largest], for a table or a verdict"""
    return f"{statistics.median(xs):.3f} [{min(xs):.3f}, {max(xs):.3f}]"


def without_marks(run):
    """A run without its problem-by-problem marks, which only `parity` needs."""
    return {k: v for k, v in run.items() if k != "right"}


def whole(results):
    """The runs that did not fail."""
    return [r for r in results if "failed" not in r]


# ---- figures: black and grey, told apart by dash and label -----------------------------------------------------------

DASHES = ["-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)), (0, (8, 2)), (0, (3, 1, 1, 1)), (0, (2, 2)), "-"]


def curve(axes, x, runs, label, index, band=True):
    """Median over runs (equal length), the range as a grey band if that is wanted, labelled at its right end."""
    runs = [run for run in runs if len(run) == len(x)]
    if not runs:
        return
    middle = [statistics.median(column) for column in zip(*runs, strict=True)]
    low, high = ([f(column) for column in zip(*runs, strict=True)] for f in (min, max))
    if band:
        axes.fill_between(x, low, high, color="0.88", linewidth=0)
    axes.plot(x, middle, color="black" if index % 2 == 0 else "0.45", linestyle=DASHES[index], linewidth=1.6)
    axes.spread_labels = [*getattr(axes, "spread_labels", []), (x[-1], middle[-1], label)]


def place_labels(axes, gap=0.075):
    """Write the labels of `curve` beside the curves' ends, moved apart where they would overlap."""
    ends = sorted(getattr(axes, "spread_labels", []), key=lambda end: end[1])
    to_axes = axes.transData + axes.transAxes.inverted()
    heights = [min(max(to_axes.transform((x, y))[1], 0), 1) for x, y, _ in ends]
    for i in range(1, len(heights)):
        heights[i] = max(heights[i], heights[i - 1] + gap)
    overflow = max(0, (heights[-1] if heights else 0) - 1)
    for (_, _, label), height in zip(ends, heights, strict=True):
        axes.text(1.02, height - overflow, label, transform=axes.transAxes, va="center", fontsize=10)


def dots(axes, groups, xlabel):
    """One line a label: every run as a dot, the median as a bar. groups {label: [numbers]}, first on top."""
    for i, (_, values) in enumerate(groups.items()):
        axes.plot(values, [-i] * len(values), "o", color="0.45", markersize=6, markerfacecolor="none")
        if values:
            axes.plot([statistics.median(values)] * 2, [-i - 0.3, -i + 0.3], color="black", linewidth=3)
    axes.set_yticks([-i for i in range(len(groups))], list(groups))
    axes.set_xlabel(xlabel)
    axes.grid(axis="x", color="0.9")


# ---- collapse --------------------------------------------------------------------------------------------------------

ARMS = {
    "dense": {"method": "dense"},
    "naive": {"method": "naive"},
    "bypass": {"method": "bypass"},
    "token": {"method": "importance", "importance_mode": "token"},
    "token_truncated": {"method": "importance", "importance_mode": "token_truncated"},
    "sequence": {"method": "importance", "importance_mode": "sequence"},
    "sparse_rl": {"method": "sparse_rl"},
    "smd A": {"method": "smd"},
    "smd A+B": {"method": "smd", "smd_lambda": 0.1},
    "smd A+B'": {"method": "smd", "smd_lambda": 0.1, "smd_track_b": "masked_teaches_dense"},
}
RATES = (1e-4, 2e-4, 4e-4)
SMALL = {"prompts_per_step": 4, "updates_per_rollout": 4}


def collapse(bench):
    seeds = range(1, bench.seeds + 1)
    rates = RATES[:1] if bench.quick else RATES
    grid = bench.run(
        {(a, lr): (rl, bench.config(seed=1, learning_rate=lr, **arm)) for a, arm in ARMS.items() for lr in rates}
    )
    best = {a: max(rates, key=lambda lr: grid[a, lr].get("last_reward", -1.0)) for a in ARMS}
    small = {"small batch, smd A": ARMS["smd A"], "small batch, naive": ARMS["naive"]}
    cells = {(a, s): (rl, bench.config(seed=s, learning_rate=best[a], **arm)) for a, arm in ARMS.items() for s in seeds}
    cells |= {(a, s): (rl, bench.config(seed=s, **(SMALL | arm))) for a, arm in small.items() for s in seeds}
    runs = bench.run(cells)
    data = {"learning_rate": best, "grid": {}, "runs": {}, "table": {}}
    for a in ARMS:
        data["grid"][a] = {lr: {k: grid[a, lr].get(k) for k in ("last_reward", "final", "failed")} for lr in rates}
    for a in [*ARMS, *small]:
        data["runs"][a] = {s: without_marks(runs[a, s]) for s in seeds}
        good = whole(data["runs"][a].values())
        data["table"][a] = {
            "compressed": [r["final"]["0.25"] for r in good],
            "dense": [r["final"]["0"] for r in good],
            "start": [r["evals"][0]["dense" if a == "dense" else "compressed"] for r in good],
            "peak_less_final_reward": [max(r["curves"]["reward"]) - r["curves"]["reward"][-1] for r in good],
            "gap_mean": [max(r["curves"]["gap_mean"]) for r in good],
            "grad_norm_last": [r["curves"]["grad_norm"][-1] for r in good],
            "push_down": [statistics.fmean(r["curves"]["push_down"]) for r in good],
            "ess_least": [min(r["curves"]["ess"]) for r in good if "ess" in r["curves"]],
            "failed": bench.seeds - len(good),
        }
    table = data["table"]
    middle = {a: median(t["dense" if a == "dense" else "compressed"]) or 0.0 for a, t in table.items()}
    rivals = [a for a in ARMS if not a.startswith("smd") and a != "dense"]
    rival = max(rivals, key=middle.get)
    fell = [a for a in ARMS if table[a]["failed"] or (median(table[a]["peak_less_final_reward"]) or 0) > 0.1]
    below = [a for a in ARMS if middle[a] < (median(table[a]["start"]) or 0)]
    leads = all(x > y for x, y in zip(table["smd A"]["compressed"], table[rival]["compressed"], strict=False))
    parts = [
        f"smd A ends at {spread(table['smd A']['compressed'])}, the best correction ({rival}) at "
        f"{spread(table[rival]['compressed'])}, naive at {spread(table['naive']['compressed'])}, dense RL at "
        f"{spread(table['dense']['dense'])} (start {spread(table['smd A']['start'])})",
        f"arms that lost more than .1 of their peak reward: {', '.join(fell) or 'none'}; "
        f"arms that ended below their start: {', '.join(below) or 'none'}",
        f"small noisy batches: smd A {middle['small batch, smd A']:.3f}, naive {middle['small batch, naive']:.3f}",
    ]
    fallen = sorted({*fell, *below} & {*rivals} - {"bypass"})
    word = "smd A leads in every seed" if leads else "smd A does not lead in every seed"
    word += f", and {', '.join(fallen)} fall" if fallen else ", but neither naive nor a reweighted arm falls"
    word = f"{'holds' if leads and fallen else 'holds in part' if leads or fallen else 'does not hold'}: {word}"
    return data, f"{word}. " + "; ".join(parts) + "."


def draw_collapse(data, figure):
    (top, bottom), table = figure.subplots(2, 2), data["table"]
    for i, a in enumerate(ARMS):
        good = whole(data["runs"][a].values())
        for axes, name in ((top[0], "reward"), (top[1], "grad_norm")):
            runs = [r["curves"][name] for r in good]
            if runs:
                steps = [BLOCK * (j + 1) for j in range(len(runs[0]))]
                curve(
                    axes, steps, runs, a, i, band=a in ("naive", "bypass", "smd A")
                )  # ten bands would hide each other
    top[0].set(xlabel="step", ylabel="mean reward of the rollouts")
    top[1].set(xlabel="step", ylabel="gradient norm", yscale="log")
    for axes in top:
        axes.figure.canvas.draw()
        place_labels(axes)
    dots(bottom[0], {a: t["compressed"] for a, t in table.items()}, "accuracy, 25% of the keys")
    dots(bottom[1], {a: t["dense"] for a, t in table.items()}, "accuracy, full cache")


CLAIMS["collapse"] = Claim(
    says="Rollouts from a compressed cache make a full-view learner off-policy: naive training collapses, importance "
    "reweighting fails, shadow masks keep it stable (SMD).",
    confirms="smd A ends above every correction in every seed, each at its own best learning rate; naive or the "
    "reweighted arms lose more than .1 of their peak reward or end below their start.",
    refutes="a correction ends as high as smd A, or nothing falls.",
    measure=collapse,
    draw=draw_collapse,
)


# ---- weights ---------------------------------------------------------------------------------------------------------


def weigh(keep, rows, **options):
    """Importance weights of one compressed rollout batch of a warm start, by response length. No training."""
    config = Config(**options)
    Path(config.warm_dir).mkdir(parents=True, exist_ok=True)
    model = train.warm_start(config, load_task(config.task), CPU)
    cache = {key: getattr(config, key) for key in CACHE_KEYS} | {"prompt_budget": keep}
    out = variance.drawer(model, config, config.seed, prompts=rows, samples=1, **cache)()
    with torch.no_grad():
        dense = losses.token_logprobs(model(out.tokens[:, :-1]), out.tokens[:, 1:])  # (B, T-1)
    columns = zip(*(variance.effective_sizes(dense, out, n + 1) for n in range(config.max_new_tokens)), strict=True)
    return dict(zip(("sequence_ess", "token_ess", "small", "vetoed"), map(list, columns), strict=True))


KEEPS = (0.5, 0.25)


def weights(bench):
    seeds = range(1, bench.seeds + 1)
    warm = {"warm_dir": BASE["warm_dir"]} | ({"warm_iters": 5, "warm_batch_size": 8} if bench.quick else {})
    rows = 32 if bench.quick else 2048
    runs = bench.run(
        {(keep, s): (weigh, {"keep": keep, "rows": rows, "seed": s} | warm) for keep in KEEPS for s in seeds}
    )
    data = {keep: {s: runs[keep, s] for s in seeds} for keep in KEEPS}
    last = {
        keep: {k: [run[k][-1] for run in data[keep].values()] for k in ("sequence_ess", "small", "vetoed")}
        for keep in KEEPS
    }
    text = [
        f"{keep:.0%} of the keys: sequence ESS {spread(v['sequence_ess'])} of the batch after 12 tokens, "
        f"{spread(v['small'])} of the sequences below .01, {spread(v['vetoed'])} vetoed"
        for keep, v in last.items()
    ]
    word = "holds" if median(last[0.25]["sequence_ess"]) < 0.2 else "does not show"
    return data, f"{word}. " + "; ".join(text) + "."


def draw_weights(data, figure):
    for axes, (name, label) in zip(
        figure.subplots(1, 2),
        (("sequence_ess", "effective sample size / sequences"), ("vetoed", "share of sequences vetoed")),
        strict=True,
    ):
        for i, (keep, runs) in enumerate(data.items()):
            length = len(next(iter(runs.values()))[name])
            curve(axes, range(1, length + 1), [run[name] for run in runs.values()], f"{float(keep):.0%} of keys", i)
        axes.set(xlabel="response tokens", ylabel=label, ylim=(0, 1.02))
        axes.figure.canvas.draw()
        place_labels(axes)


CLAIMS["weights"] = Claim(
    says="Importance reweighting between the compressed sampler and the full-view learner fails badly (SMD).",
    confirms="at 25% of the keys the effective sample size of sequence weights is below a fifth of the batch.",
    refutes="it stays above.",
    measure=weights,
    draw=draw_weights,
)


# ---- parity ----------------------------------------------------------------------------------------------------------


def correct(run, budget):
    """The set bits of a run's `right`: which eval problems it got right, as an integer."""
    return int(run["right"][str(budget)], 16)


def paired(ours, theirs, problems):
    """Difference in accuracy over the same problems, and its standard error from the problems where they disagree."""
    only_ours, only_theirs = (ours & ~theirs).bit_count(), (theirs & ~ours).bit_count()
    difference = (only_ours - only_theirs) / problems
    return difference, ((only_ours + only_theirs) / problems - difference**2) ** 0.5 / problems**0.5


T_975 = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776}  # Student's t, by degrees of freedom


def interval(differences):
    """Mean over seeds and the half width of its 95% interval (Student's t)."""
    n = len(differences)
    half = T_975.get(n - 1, 2.0) * statistics.stdev(differences) / n**0.5 if n > 1 else float("nan")
    return statistics.fmean(differences), half


PARITY = {"max_iters": 200, "learning_rate": 4e-4, "eval_interval": 0}  # half the steps at twice the default rate


def parity(bench):
    most, problems = (1, 32) if bench.quick else (max(5, bench.seeds), 4096)
    few, many = range(1, bench.seeds + 1), range(1, most + 1)

    def cell(seed, method, budget, policy="snapkv"):
        options = PARITY | {"seed": seed, "method": method, "prompt_budget": budget, "policy": policy}
        return rl, bench.config(**options, problems=problems)

    cells = {("dense", 0.5, "snapkv", s): cell(s, "dense", 0.5) for s in many}
    for budget in (0.5, 0.75, 0.25):
        for method in ("smd", "naive"):
            for s in many if budget == 0.5 else few:
                cells[method, budget, "snapkv", s] = cell(s, method, budget)
    for policy in POLICIES:
        for s in few:
            cells["smd", 0.5, policy, s] = cell(s, "smd", 0.5, policy)
    runs = bench.run(cells)
    data = {"problems": problems, "accuracy": {}, "start": {}, "against_dense": {}}
    for method, budget, policy in dict.fromkeys(key[:3] for key in cells):
        of = [key for key in cells if key[:3] == (method, budget, policy)]
        shown = 0 if method == "dense" else budget
        name = "dense, 100%" if method == "dense" else f"{method}, {policy}, {budget:.0%}"
        data["accuracy"][name] = {key[3]: runs[key]["final"][str(shown)] for key in of}
        data["start"][name] = {key[3]: runs[key]["evals"][0]["compressed" if shown else "dense"] for key in of}
        if method != "dense":
            pairs = [
                paired(correct(runs[key], shown), correct(runs["dense", 0.5, "snapkv", key[3]], 0), problems)
                for key in of
            ]
            mean, half = interval([difference for difference, _ in pairs])
            data["against_dense"][name] = {"difference": mean, "half_width_95": half, "by_seed": pairs}
    ours, base = data["against_dense"]["smd, snapkv, 50%"], list(data["accuracy"]["dense, 100%"].values())
    share = 1 + ours["difference"] / statistics.fmean(base) if any(base) else float("nan")
    plain = data["against_dense"]["naive, snapkv, 50%"]
    text = (
        f"smd at 50% of the keys reaches {share:.1%} of dense training (paper: 98.8%): difference "
        f"{ours['difference']:+.3f} +- {ours['half_width_95']:.3f} over {most} seeds and {problems} paired problems; "
        f"naive {plain['difference']:+.3f} +- {plain['half_width_95']:.3f}"
    )
    at = {b: data["against_dense"][f"smd, snapkv, {b:.0%}"]["difference"] for b in (0.75, 0.25)}
    text += "; smd at 75% " + f"{at[0.75]:+.3f}, at 25% {at[0.25]:+.3f}."
    word = "holds" if share >= 0.95 else "does not hold at this scale"
    return data, f"{word}. {text}"


def draw_parity(data, figure):
    dots(figure.subplots(), {k: list(v.values()) for k, v in data["accuracy"].items()}, "accuracy, decoded as trained")


CLAIMS["parity"] = Claim(
    says="With half of the KV cache SMD reaches the accuracy of uncompressed training: 73.6 against 74.5, 98.8% (SMD).",
    confirms="smd at 50% of the prompt's keys reaches at least 95% of dense training's accuracy.",
    refutes="it stays below 95%.",
    measure=parity,
    draw=draw_parity,
)


# ---- myopia ----------------------------------------------------------------------------------------------------------

BUDGETS = (0.1, 0.25, 0.5, 0.75, 0)  # of the prompt's keys at decoding; 0: all


def myopia(bench):
    seeds = range(1, bench.seeds + 1)
    arms = {"A only": {}}
    for letter, track in (("B", "dense_teaches_masked"), ("B'", "masked_teaches_dense")):
        arms |= {f"A + {lam} {letter}": {"smd_lambda": lam, "smd_track_b": track} for lam in (0.01, 0.1, 1.0)}
    arms["dense"] = {"method": "dense"}
    cells = {
        (a, s): (rl, bench.config(seed=s, decode=BUDGETS, **(PARITY | arm))) for a, arm in arms.items() for s in seeds
    }
    runs = bench.run(cells)
    data = {a: {s: runs[a, s].get("final", {}) for s in seeds} for a in arms}
    data["start"] = {s: runs["A only", s].get("evals", [{}])[0] for s in seeds}
    full = {a: [f["0"] for f in data[a].values() if f] for a in arms}
    blind = {a: [f["0.25"] for f in data[a].values() if f] for a in arms}
    start = [e["dense"] for e in data["start"].values()]
    lost = median(start) - median(full["A only"])
    best = max((a for a in arms if " B" in a), key=lambda a: median(full[a]) or 0)
    text = (
        f"full view before training {spread(start)}, after A only {spread(full['A only'])}, after dense RL "
        f"{spread(full['dense'])}; best Track B for the full view: {best} with {spread(full[best])}, at 25% of "
        f"the keys {spread(blind[best])} against A only's {spread(blind['A only'])}"
    )
    word = "the student loses the full view" if lost > 0.02 else "the student does not lose the full view"
    repaired = median(full[best]) > max(full["A only"])
    return data, f"{word}, Track B {'repairs it' if repaired else 'does not repair it'} at this scale. {text}."


def draw_myopia(data, figure):
    axes = figure.subplots()
    shown = [a for a in data if a != "start"]
    for i, a in enumerate(shown):
        runs = [[f[str(b)] for b in BUDGETS] for f in data[a].values() if f]
        curve(axes, range(len(BUDGETS)), runs, a, i)
    axes.set_xticks(range(len(BUDGETS)), [f"{b:.0%}" if b else "100%" for b in BUDGETS])
    axes.set(xlabel="prompt keys kept at decoding (trained at 25%)", ylabel="accuracy")
    figure.canvas.draw()
    place_labels(axes, gap=0.045)


CLAIMS["myopia"] = Claim(
    says="A student trained blindfolded only may become myopic; a full-view tutor (Track B) repairs that (SMD).",
    confirms="after A only, decoding with all keys is worse than before training, and some Track B is better there in "
    "its median than every seed of A only.",
    refutes="the full view is kept without Track B, or Track B does not bring it back.",
    measure=myopia,
    draw=draw_myopia,
)


# ---- variance --------------------------------------------------------------------------------------------------------

TEACHERS = {
    "recall": {"task": "recall", "warm_iters": 600},
    "spellings": {"task": "spellings_teacher", "warm_iters": 300},
}
STUDENTS = {  # task, warm start of the student, steps of exact distillation after it
    "recall, far": ("recall", 50, 0),
    "recall, near": ("recall", 200, 0),
    "spellings, far": ("spellings", 600, 0),
    "spellings, middle": ("spellings", 600, 15),
    "spellings, near": ("spellings", 600, 30),
}


def pair(task, warm_iters, seed, steps=0, **options):
    """A student, its configuration, and its teacher; the student has moved `steps` steps towards it."""
    config = Config(task=task, warm_iters=warm_iters, seed=seed, warm_dir=BASE["warm_dir"], **options)
    theirs = dataclasses.replace(config, seed=1337, **(TEACHERS[task] | ({"warm_iters": 5} if warm_iters < 10 else {})))
    Path(config.warm_dir).mkdir(parents=True, exist_ok=True)
    student, teacher = (train.warm_start(c, load_task(c.task), CPU) for c in (config, theirs))
    variance.distil(student, teacher, variance.drawer(student, config, seed), steps)
    return student, config, teacher


def noise(task, warm_iters, steps, seed, rounds):
    """Covariance of every estimator for one student, relative to `sampled`, and its hot spots."""
    student, config, teacher = pair(task, warm_iters, seed, steps)
    draw = variance.drawer(student, config, seed + 1000)
    meters, kl = variance.measure(student, teacher, draw, rounds, config.max_new_tokens)
    vanilla, exact = meters["sampled"], meters["full"].mean
    rows = {}
    for name, meter in meters.items():
        cosine = torch.cosine_similarity(meter.mean, exact, dim=0).item()
        rows[name] = {"sampled_over_this": vanilla.trace / meter.trace, "trace": meter.trace, "cosine_to_exact": cosine}
    spots = variance.hot_spots(student, teacher, draw, max(1, rounds // 8))
    seconds = {name: meter.seconds / meter.n for name, meter in meters.items()}
    return {"kl": kl, "estimators": rows, "hot_spots": spots, "seconds": seconds}


def variance_claim(bench):
    rounds = 2 if bench.quick else 64
    seeds = range(1, bench.seeds + 1)
    cells = {}
    for name, (task, warm, steps) in STUDENTS.items():
        for s in seeds:
            how = {"task": task, "warm_iters": 5 if bench.quick else warm, "steps": steps, "seed": s, "rounds": rounds}
            cells[name, s] = (noise, how)
    runs = bench.run(cells)
    data = {name: {s: runs[name, s] for s in seeds} for name in STUDENTS}
    data["batches"] = f"{rounds} of {variance.PROMPTS} prompts x {variance.SAMPLES}"
    calmer = {
        name: {
            e: median([runs[name, s]["estimators"][e]["sampled_over_this"] for s in seeds])
            for e in ("vopd", "vopd k=20", "mean", "vopd_optimal", "full")
        }
        for name in STUDENTS
    }
    data["median_sampled_over_this"] = calmer
    text = "; ".join(
        f"{name} (KL {median([runs[name, s]['kl'] for s in seeds]):.1f}) vopd {c['vopd']:.1f}, "
        f"k=20 {c['vopd k=20']:.1f}, "
        f"batch mean {c['mean']:.1f}, b* {c['vopd_optimal']:.1f}, full {c['full']:.1f}"
        for name, c in calmer.items()
    )
    most = max(c["vopd"] for c in calmer.values())
    least = min(c["vopd"] for c in calmer.values())
    word = "holds" if most >= 10 else "V is calmer, but by less than the paper says" if least > 1 else "does not hold"
    return data, f"{word}. Variance of sampled over that of: {text}."


def draw_variance(data, figure):
    left, right = figure.subplots(1, 2)
    names = [e for e in data["spellings, far"]["1"]["estimators"] if e != "sampled"]
    groups = {}
    for e in names:
        groups[e] = [median([r["estimators"][e]["sampled_over_this"] for r in data[s].values()]) for s in STUDENTS]
    dots(left, groups, "variance of sampled / variance (a dot a student)")
    left.set_xscale("log")
    left.axvline(1, color="black", linewidth=0.8)
    spots = data["spellings, near"]["1"]["hot_spots"]
    for i, e in enumerate(("sampled", "mean", "vopd k=20", "vopd", "vopd_optimal")):
        curve(right, [max(b["kl_from"], 0.01) for b in spots], [[b[e] for b in spots]], e, i)
    right.set(xlabel="KL of the token from, nats", ylabel="variance of a token's gradient", xscale="log", yscale="log")
    figure.canvas.draw()
    place_labels(right)


CLAIMS["variance"] = Claim(
    says="Subtracting the closed-form value makes the distillation gradient 10 to 100 times calmer, for a top-k "
    "support too (vOPD).",
    confirms="the covariance trace of sampled is at least 10 times that of vopd for some student.",
    refutes="it is never 10 times as large.",
    measure=variance_claim,
    draw=draw_variance,
)


# ---- distil ----------------------------------------------------------------------------------------------------------

DISTIL = {
    "task": "spellings",
    "teacher": "config/teacher.toml",
    "method": "dense",
    "reward_coef": 0.0,
    "warm_iters": 600,
    "group_size": 1,
    "prompts_per_step": 256,
    "max_iters": 100,
    "learning_rate": 1e-3,
    "grad_clip": 1000.0,
    "eval_interval": 20,
}
SETTINGS = [*train.OPD, *train.DIRECT]


def step_times(repeats, **options):
    """Median seconds of a step of every OPD setting, in turns, so that the machine's moods reach all alike."""
    times = {opd: [] for opd in SETTINGS}
    folder = CELLS / "times"
    for _ in range(repeats):
        for opd in SETTINGS:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            train.train(Config(**(options | {"opd": opd, "out_dir": str(folder)})))
            rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
            times[opd] += [row["seconds"] for row in rows[2:]]
    return {"seconds": {opd: statistics.median(t) for opd, t in times.items()}}


def distil(bench):
    seeds = range(1, bench.seeds + 1)
    smoke = {"prompts_per_step": 8} if bench.quick else {}
    cells = {
        (opd, s): (rl, bench.config(seed=s, opd=opd, prompt_budget=0, **DISTIL) | smoke)
        for opd in SETTINGS
        for s in seeds
    }
    runs = bench.run(cells)
    clock = BASE | DISTIL | {"seed": 1, "prompt_budget": 0, "repeats": 5, "max_iters": 8, "eval_problems": 1}
    clock |= {"eval_interval": 0} | ({"repeats": 1, "max_iters": 3, "warm_iters": 5} | smoke if bench.quick else {})
    seconds = bench.run({("cost",): (step_times, clock)})["cost",]["seconds"]
    data = {opd: {s: without_marks(runs[opd, s]) for s in seeds} for opd in SETTINGS}
    data["step_seconds"] = {opd: seconds[opd] for opd in SETTINGS if opd in seconds}
    last = {opd: [r["curves"]["opd_kl"][-1] for r in whole(data[opd].values())] for opd in SETTINGS}
    ratio = seconds["vopd"] / seconds["sampled"]
    text = "; ".join(f"{opd} {spread(kl)}" for opd, kl in last.items() if kl)
    text = f"exact KL over the last {BLOCK} steps, nats a token: {text}; a vopd step costs {ratio:.2f} of a sampled one"
    word = (
        "holds"
        if median(last["vopd"]) <= 1.1 * median(last["full"])
        else "vopd is faster than sampled, full is faster still"
    )
    if median(last["vopd"]) >= median(last["sampled"]):
        word = "does not hold"
    return data, f"{word}. {text}."


def draw_distil(data, figure):
    panels = (
        ("opd_kl", "exact KL, nats a token", "log"),
        ("grad_var_adam", "gradient variance, Adam's moments", "log"),
    )
    for axes, (name, label, scale) in zip(figure.subplots(1, 2), panels, strict=True):
        for i, opd in enumerate(SETTINGS):
            runs = [r["curves"][name] for r in whole(data[opd].values())]
            if runs:
                curve(axes, [BLOCK * (j + 1) for j in range(len(runs[0]))], runs, opd, i)
        axes.set(xlabel="step", ylabel=label, yscale=scale)
        figure.canvas.draw()
        place_labels(axes)


CLAIMS["distil"] = Claim(
    says="vOPD learns faster than the sampled estimator and as well as the full-vocabulary KL, at the cost of "
    "sampled (vOPD).",
    confirms="after equal rollouts vopd's KL to the teacher is within 10% of full's, and below sampled's.",
    refutes="it is above sampled's, or far above full's.",
    measure=distil,
    draw=draw_distil,
)


# ---- memory ----------------------------------------------------------------------------------------------------------


def memory_claim(bench):
    size = {"tokens": 128, "budget": 96} if bench.quick else {"tokens": 2048, "budget": 512}
    runs = bench.run({(way,): (memory.generate, {"way": way} | size) for way in memory.WAYS})
    data = {"ways": {way: runs[way,] for way in memory.WAYS}, "table_gb": {}}
    for model in memory.MODELS:
        data["table_gb"][model] = {
            f"{rows} x {length}": memory.gigabytes(model, rows, length)
            for rows in (64, 512)
            for length in (4096, 32768)
        }
    kv = {way: max(run["kv_mb"]) for way, run in data["ways"].items()}
    peak = {way: max(run["measured_once"]["peak_mb"]) for way, run in data["ways"].items()}
    same = max(
        abs(data["ways"][way]["output_sum"] - data["ways"]["mask"]["output_sum"]) for way in ("slice", "overwrite")
    )
    holds = peak["slice"] > kv["slice"] + 0.5 * kv["slice"] / memory.LAYERS and peak["overwrite"] < peak["slice"]
    text = "; ".join(
        f"{way}: KV {kv[way]:.0f} MB, process peak {peak[way]:.0f} MB over its start" for way in memory.WAYS
    )
    word = "holds" if holds else "does not show"
    return data, f"{word}. {text}. The three that evict give the same outputs (sums differ by {same:.1e})."


def draw_memory(data, figure):
    for axes, name in zip(figure.subplots(1, 2), ("kv", "peak"), strict=True):
        for i, (way, run) in enumerate(data["ways"].items()):
            values = run["kv_mb"] if name == "kv" else run["measured_once"]["peak_mb"]
            curve(axes, run["step"], [values], way, i)
        axes.set(xlabel="tokens generated", ylabel="K and V, MB" if name == "kv" else "peak of the process, MB")
        figure.canvas.draw()
        place_labels(axes)


CLAIMS["memory"] = Claim(
    says="Slicing a cache to evict raises peak memory, because the old and the new tensor live together (SMD).",
    confirms="slicing peaks above its own cache by half a layer or more, and overwriting peaks lower.",
    refutes="slicing peaks no higher than overwriting.",
    measure=memory_claim,
    draw=draw_memory,
)


# ---- bridge ----------------------------------------------------------------------------------------------------------

VIEWS = {"dense rollout": "dense", "compressed, masked learner": "smd", "compressed, dense learner": "naive"}
HALF = {"prompt_budget": 0.5}


def bias(method, seed, rounds, warm_iters):
    """How far the mean of `sampled` and `vopd` lies from the exact gradient at the same states, relative to its length.

    `noise` is what the mean of `rounds` batches would show of an unbiased estimator: its standard error. The student
    has moved half of the way to its teacher.
    """
    student, config, teacher = pair("spellings", warm_iters, seed, steps=15, **HALF)
    cache = {} if method == "dense" else {key: getattr(config, key) for key in CACHE_KEYS}
    draw = variance.drawer(student, config, seed + 1000, **cache)
    names = ("sampled", "vopd", "full")
    meters, kl = variance.measure(student, teacher, draw, rounds, config.max_new_tokens, method != "naive", names)
    exact = meters["full"].mean
    out = {"kl": kl}
    for name in names[:2]:
        off = (meters[name].mean - exact).norm() / exact.norm()
        out[name] = {"off": off.item(), "noise": (meters[name].trace / rounds) ** 0.5 / exact.norm().item()}
    return out


def bridge(bench):
    seeds, opds = range(1, bench.seeds + 1), ("sampled", "vopd")
    smoke = {"prompts_per_step": 8} if bench.quick else {}
    cells = {}
    for view, method in VIEWS.items():
        for s in seeds:
            for opd in opds:
                cells[view, opd, s] = (
                    rl,
                    bench.config(seed=s, opd=opd, **(DISTIL | {"method": method} | HALF)) | smoke,
                )
            how = {"rounds": 2, "warm_iters": 5} if bench.quick else {"rounds": 128, "warm_iters": 600}
            cells[view, "bias", s] = (bias, {"method": method, "seed": s} | how)
    runs = bench.run(cells)
    kinds = (*opds, "bias")
    data = {view: {opd: {s: without_marks(runs[view, opd, s]) for s in seeds} for opd in kinds} for view in VIEWS}
    text = []
    for view, method in VIEWS.items():
        shown = "0" if method == "dense" else "0.5"
        for opd in opds:
            good = whole(data[view][opd].values())
            b = [data[view]["bias"][s][opd] for s in seeds]
            text.append(
                f"{view}, {opd}: KL {spread([r['curves']['opd_kl'][-1] for r in good])}, accuracy "
                f"{spread([r['final'][shown] for r in good])}, mean off by {median([x['off'] for x in b]):.2f} "
                f"(noise {median([x['noise'] for x in b]):.2f})"
            )
    off = {
        v: median([data[v]["bias"][s]["vopd"]["off"] / data[v]["bias"][s]["vopd"]["noise"] for s in seeds])
        for v in VIEWS
    }
    masked, dense = off["compressed, masked learner"], off["compressed, dense learner"]
    word = "holds" if masked < 2 < dense else "not decided by the bias alone"
    return data, f"{word}. " + "; ".join(text) + "."


def draw_bridge(data, figure):
    left, right = figure.subplots(1, 2)
    bars = {}
    for i, view in enumerate(VIEWS):
        for j, opd in enumerate(("sampled", "vopd")):
            runs = [r["curves"]["opd_kl"] for r in whole(data[view][opd].values())]
            curve(left, [BLOCK * (n + 1) for n in range(len(runs[0]))], runs, f"{view}, {opd}", 2 * i + j)
            bars[f"{view},\n{opd}"] = [b[opd]["off"] for b in data[view]["bias"].values()]
    left.set(xlabel="step", ylabel="exact KL of the learner's view, nats", yscale="log")
    figure.canvas.draw()
    place_labels(left)
    dots(right, bars, "|mean gradient - exact| / |exact|")


CLAIMS["bridge"] = Claim(
    says="Neither paper's: distillation inside compressed rollouts is exact for the masked learner and biased for the "
    "dense one, with and without V.",
    confirms="the masked learner's mean gradient is within twice the noise of the exact, the dense learner's is not.",
    refutes="both are, or neither is.",
    measure=bridge,
    draw=draw_bridge,
)


# ---- the command -----------------------------------------------------------------------------------------------------


def reproduce(name, seeds=3, quick=False):
    """Measure a claim; write its JSON and its figure, return the verdict."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    claim, bench = CLAIMS[name], Bench(1 if quick else seeds, quick)
    data, verdict = claim.measure(bench)
    command = f"python -m experiments.reproduce {name}" + (f" --seeds={seeds}" if seeds != 3 else "")
    record = {"claim": claim.says, "confirms": claim.confirms, "refutes": claim.refutes, "verdict": verdict}
    record |= {"command": command, "base": BASE, "cell_seconds": round(bench.cell_seconds), "data": short(data)}
    results, assets = (CELLS / "quick",) * 2 if quick else (ROOT / "experiments" / "results", ROOT / "assets")
    assets.mkdir(exist_ok=True)
    (results / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    figure = Figure(figsize=(11, 8), layout="constrained")
    FigureCanvasAgg(figure)
    claim.draw(json.loads(json.dumps(short(data))), figure)
    figure.savefig(assets / f"{name}.png", dpi=80)
    return verdict


def main(argv):
    names = [arg for arg in argv if not arg.startswith("--")]
    options = dict(arg[2:].partition("=")[::2] for arg in argv if arg.startswith("--"))
    if not names and not options:
        for name, claim in CLAIMS.items():
            print(f"{name}\n  claim     {claim.says}\n  confirmed {claim.confirms}\n  refuted   {claim.refutes}\n")
        return
    unknown = [name for name in names if name not in CLAIMS] + [o for o in options if o not in ("seeds", "quick")]
    seeds = options.get("seeds", "3")
    if unknown or len(names) != 1 or not seeds.isdigit() or seeds == "0" or options.get("quick"):
        sys.exit(f"error: {' '.join(argv)!r}: give one of {', '.join(CLAIMS)}, and --seeds=N of at least 1 or --quick")
    print(reproduce(names[0], int(seeds), "quick" in options))


if __name__ == "__main__":
    main(sys.argv[1:])
