"""Tables about the attention kernels, the loss, and where time goes, as markdown.

    python -m experiments.bench attention [--json]   time and memory of shadow attention and of its alternatives
    python -m experiments.bench tiles                the share of tiles that lifetime order leaves to visit
    python -m experiments.bench compile              registers, spills and shared memory, no GPU needed
    python -m experiments.bench loss                 memory and time of a step's losses at a vocabulary of 151,936
    python -m experiments.bench step [--key=value]   where a step of train.py spends its time; --sweep: by T and size
    python -m experiments.bench goals                what should be fast, as measured, and the limit
    python -m experiments.bench peers                this loop and TRL's GRPOTrainer, same weights (pip install trl)

`tiles` and `compile` also write their table to experiments/results/.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import importlib.util
import io
import itertools
import json
import multiprocessing
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.nn.functional as F

import kernels
import kv_compress
import train
from data import Problem, WordTokenizer, recall
from experiments import memory
from kernels import NEVER, shadow_attention, visible, visited_tiles
from kv_compress import POLICIES, KVCache, Rollout, SharedPrompts, rollout
from model import GPT, GPTConfig

RESULTS = Path(__file__).parent / "results"


def markdown(rows):
    """A table of dictionaries with the same keys."""
    lines = ["| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
    lines += ["| " + " | ".join("-" if v is None else str(v) for v in row.values()) + " |" for row in rows]
    return "\n".join(lines)


def report(rows, name, title):
    """Print a table, and keep it as experiments/results/NAME.md."""
    text = f"{title}\n\n{markdown(rows)}\n"
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.md").write_text(f"`python -m experiments.bench {name}`: {text}")
    print(text)


def decode_lifetimes(T, policy, kv_budget, device="cpu", heads=2):
    """Evictions of a real policy over a long decode by a random model -> evicted_at (heads, T) int32.

    The prompt fills the cache, so that every token after it evicts one. Of the budget, 4 keys are sinks and a quarter,
    at most 64, recent; scores are refreshed every 16 tokens.
    """
    shape = dict(n_layer=1, n_head=2 * heads, n_kv_head=heads, n_embd=32, head_dim=16)
    model = GPT(GPTConfig(block_size=T + 1, vocab_size=256, **shape), torch.Generator().manual_seed(0)).to(device)
    prompt = torch.randint(256, (kv_budget,), generator=torch.Generator().manual_seed(1)).tolist()
    options = dict(policy=policy, kv_budget=kv_budget, sinks=4, recent=min(64, kv_budget // 4), interval=16)
    generator = torch.Generator(device).manual_seed(2)
    rolled = rollout(model, [prompt], 1, T + 1 - kv_budget, eos_ids=[], generator=generator, **options)
    return rolled.evicted_at[0, 0, :, :T].contiguous()


def prompt_lifetimes(T, keep, device="cpu", heads=2):
    """The papers' setting, half of T a prompt of which SnapKV keeps a share, nothing else evicted; here by lot."""
    P = T // 2
    lot = torch.rand(heads, P, generator=torch.Generator().manual_seed(0))
    evicted_at = torch.full((heads, T), NEVER, dtype=torch.int32)
    evicted_at[:, :P][lot > keep] = P
    return evicted_at.to(device)


# ---------------------------------------------------------------------------------------------------------------------
# attention


def median_ms(run, device):
    """Median time of run() in milliseconds: 2 calls to warm up, then 5 to 20, for about half a second."""
    times = []
    for i in range(22):
        if device == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            torch.cuda.synchronize()
            ms = start.elapsed_time(end)
        else:
            begin = time.perf_counter()
            run()
            ms = (time.perf_counter() - begin) * 1e3
        if i >= 2:
            times.append(ms)
        if len(times) >= 5 and sum(times) > 500:
            break
    return statistics.median(times)


def flex_attention_with(evicted_at, heads):
    """FlexAttention under the same rule. Compiled once per T: later masks are written into the same tensor."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    B, nkv, T = evicted_at.shape
    group = heads // nkv

    def rule(b, h, i, j):
        return (j <= i) & (i < evicted_at[b, h // group, j])

    torch.compiler.reset()  # or the sizes before would count towards the limit of recompilations
    make_mask = torch.compile(create_block_mask, dynamic=False)
    attention = torch.compile(flex_attention, dynamic=False)

    def run(q, k, v):
        mask = make_mask(rule, B, heads, T, T, device=q.device)
        return attention(q, k, v, block_mask=mask, enable_gqa=group > 1)

    return run


def measure(run, tensors, dout, device):
    """Times of forward and of forward + backward in ms, peak memory of the latter in MB (CUDA), and what came out."""

    def forward_backward():
        out = run(*tensors)
        return out, *torch.autograd.grad(out, tensors, dout)

    try:
        with torch.no_grad():
            forward = median_ms(lambda: run(*tensors), device)
        both = median_ms(forward_backward, device)
        memory = None
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            forward_backward()
            memory = round((torch.cuda.max_memory_allocated() - before) / 1e6)
        return dict(forward_ms=round(forward, 3), both_ms=round(both, 3), peak_MB=memory), forward_backward()
    except torch.OutOfMemoryError:
        return dict(forward_ms=None, both_ms=None, peak_MB=None), None


def attention_rows():
    """Yield one row per (T, mask, implementation). Every time includes making the mask from evicted_at."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    B, H, hs, lengths, dtype = 4, 16, 128, (1024, 4096, 16384), torch.bfloat16
    if device == "cpu":
        torch.set_num_threads(1)  # times that other work on the machine disturbs least
        B, H, hs, lengths, dtype = 1, 4, 64, (256, 1024), torch.float32
    for T in lengths:
        masks = {
            "all survive": lambda T=T: torch.full((2, T), NEVER, dtype=torch.int32),
            "prompt only, 25%": lambda T=T: prompt_lifetimes(T, 0.25),
            **{
                f"{policy} {share:.0%}": lambda T=T, p=policy, s=share: decode_lifetimes(T, p, int(s * T), device)
                for policy, share in (("snapkv", 0.5), ("snapkv", 0.25), ("random", 0.25))
            },
        }
        if T > 2048:
            masks["snapkv, 512 keys"] = lambda T=T: decode_lifetimes(T, "snapkv", 512, device)
        tensors = [torch.randn(B, H, T, hs, device=device, dtype=dtype, requires_grad=True) for _ in "qkv"]
        dout = torch.randn(B, H, T, hs, device=device, dtype=dtype)
        evicted_at = torch.empty(B, H, T, device=device, dtype=torch.int32)
        size = dict(T=T, B=B, H=H, hs=hs, dtype=str(dtype).removeprefix("torch."), device=device)

        dense = {"SDPA, causal": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)}
        if device == "cuda" and kernels.flash_attn_func is not None:
            dense["flash-attn, causal"] = lambda q, k, v: kernels.dense_attention(q, k, v)
        masked = {
            "shadow_attention": lambda q, k, v, e=evicted_at: shadow_attention(q, k, v, e),
            "SDPA, bool mask": lambda q, k, v, e=evicted_at: F.scaled_dot_product_attention(q, k, v, visible(e)),
        }
        if device == "cuda":  # FlexAttention has no backward pass on a CPU
            masked["FlexAttention"] = flex_attention_with(evicted_at, H)

        dense_ms = None
        for name, run in dense.items():
            cost, _ = measure(run, tensors, dout, device)
            dense_ms = dense_ms or cost["both_ms"]
            speedup = round(dense_ms / cost["both_ms"], 2)
            yield size | dict(mask="none", tiles=1.0, attention=name) | cost | dict(speedup=speedup, difference=None)
        for mask, make in masks.items():
            lifetimes = make().to(device)
            evicted_at.copy_(lifetimes.repeat(H // len(lifetimes), 1))
            n = -(-T // 64)
            tiles = visited_tiles(evicted_at[:1]).sum().item() / (H * n * (n + 1) / 2)
            shadow = None
            for name, run in masked.items():
                cost, result = measure(run, tensors, dout, device)
                shadow = result if name == "shadow_attention" else shadow
                speedup = cost["both_ms"] and round(dense_ms / cost["both_ms"], 2)
                difference = result and max((a - b).abs().max().item() for a, b in zip(result, shadow, strict=True))
                row = dict(mask=mask, tiles=round(tiles, 3), attention=name) | cost
                yield size | row | dict(speedup=speedup, difference=result and float(f"{difference:.1e}"))
                del result


def attention(as_json):
    """speedup: causal SDPA's time for forward + backward over this one's. difference: the largest between this
    implementation's output and gradients and shadow_attention's. tiles: the share of dense causal tiles visited."""
    rows = []
    for row in attention_rows():
        rows.append(row)
        print(json.dumps(row) if as_json else f"{row['T']} {row['mask']} {row['attention']}", flush=True)
    if not as_json:
        print(f"\n{attention.__doc__}\n\n{markdown(rows)}")


# ---------------------------------------------------------------------------------------------------------------------
# tiles


def tiles_row(source, policy, budget, evicted_at, block=64):
    """evicted_at (heads, T) -> shares of dense causal tiles; ideal: what is seen, could it be packed without gaps."""
    heads, T = evicted_at.shape
    n = -(-T // block)
    dense = heads * n * (n + 1) / 2
    birth = torch.arange(T)
    seen = (evicted_at.clamp(max=T) - birth).clamp(min=0).sum().item() / block**2
    natural, lifetime = (visited_tiles(evicted_at[None], lifetimes, block).sum().item() for lifetimes in (False, True))
    shares = dict(natural=natural, lifetime=lifetime, ideal=seen)
    return dict(lives=source, policy=policy, budget=budget, T=T, tile=block) | {
        name: f"{count / dense:.3f}" for name, count in shares.items()
    }


def recall_lifetimes(policy, **budgets):
    """Evictions in rollouts of the default task by a random model of the default shape -> (rows * heads, T) int32."""
    rng = random.Random(0)
    prompts = [recall.tokenizer.encode(recall.make_problem(rng, "train").prompt) for _ in range(8)]
    shape = dict(n_layer=2, n_head=4, n_kv_head=2, n_embd=64, block_size=128)
    model = GPT(GPTConfig(vocab_size=recall.tokenizer.vocab_size, **shape), torch.Generator().manual_seed(0))
    options = dict(policy=policy, sinks=1, recent=5, pool=1) | budgets
    generator = torch.Generator().manual_seed(0)
    rolled = rollout(model, prompts, 2, recall.max_response, eos_ids=[], generator=generator, **options)
    return rolled.evicted_at.flatten(0, 2)  # (L * B * nkv, T)


def tiles():
    torch.set_num_threads(1)
    rows = [
        tiles_row(
            "default task", "snapkv", "25% of the prompt", recall_lifetimes("snapkv", prompt_budget=0.25), block=block
        )
        for block in (64, 32, 16)
    ]
    for T in (4096, 16384):
        for policy in POLICIES:
            rows.append(tiles_row("long decode", policy, 512, decode_lifetimes(T, policy, 512)))
            print(rows[-1], flush=True)
    title = (
        "tiles that the kernels visit with keys in natural order and in lifetime order, as shares of what dense causal "
        "attention visits. Ideal is the number of (query, key) pairs that are seen over the pairs in a tile. The lives "
        "are those of real policies on random models: in rollouts of the default task (only its prompt is compressed, "
        "and a whole row has few tiles), and in long decodes with 512 slots, 4 sinks and 64 recent keys."
    )
    report(rows, "tiles", title)


# ---------------------------------------------------------------------------------------------------------------------
# compile


KERNELS = (kernels._forward_kernel, kernels._backward_q_kernel, kernels._backward_kv_kernel)
POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}


def compile_kernel(kernel, arch, hs, dtype, T=None):
    """Compile for compute capability `arch`, without a GPU -> a row of what the kernel needs.

    T=1 is a case of its own, because Triton makes it a constant. Raises RuntimeError under TRITON_INTERPRET=1.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if kernels.INTERPRET:
        raise RuntimeError("TRITON_INTERPRET=1 is set: unset it to compile kernels")
    block = kernels.tile_size(dtype, hs)
    constants = dict(HEAD=hs, PADDED=max(16, triton.next_power_of_2(hs)), BLOCK=block) | ({"T": 1} if T == 1 else {})
    types = dict.fromkeys(("BIRTH", "DEATH", "KEY_TILES", "QUERY_TILES", "STARTS"), "*i32")
    types |= dict(LSE="*fp32", DELTA="*fp32", scale="fp32", T="i32", group="i32") | dict.fromkeys(
        constants, "constexpr"
    )
    signature = {name: types.get(name, POINTERS[dtype]) for name in kernel.arg_names}
    aligned = [i for i, name in enumerate(kernel.arg_names) if signature[name].startswith("*")]
    source = ASTSource(kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i in aligned})
    options = dict(num_warps=kernels.warps(kernel, hs), num_stages=2)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as ptx:
        ptx.write(compiled.asm["ptx"])
        ptx.flush()
        target = re.search(r"\.target (\w+)", compiled.asm["ptx"])[1]
        assembler = [triton.knobs.nvidia.ptxas.path, "-v", f"--gpu-name={target}", ptx.name, "-o", "/dev/null"]
        log = subprocess.run(assembler, capture_output=True, text=True, check=True).stderr
    return dict(
        arch=f"sm_{arch}",
        hs=hs,
        dtype=str(dtype).removeprefix("torch."),
        kernel=kernel.__name__.strip("_").removesuffix("_kernel"),
        tile=block,
        warps=options["num_warps"],
        registers=int(re.search(r"Used (\d+) registers", log)[1]),
        spill_bytes=int(re.search(r"(\d+) bytes spill stores", log)[1]),
        shared_bytes=compiled.metadata.shared,
    )


def compile_table():
    cases = itertools.product((90, 80), (64, 128, 256), (torch.bfloat16, torch.float32), KERNELS)
    rows = [compile_kernel(kernel, arch, hs, dtype) for arch, hs, dtype, kernel in cases]
    import triton

    title = (
        f"what the kernels need, compiled by triton {triton.__version__} without a GPU: registers per thread, bytes "
        "spilled per thread, bytes of shared memory per program (one tile of queries, or of keys; 32 threads a warp)."
    )
    report(rows, "compile", title)


# ---- the loss at a large vocabulary ----------------------------------------------------------------------------------


def number_task(vocabulary: int):
    """A task of any vocabulary: a prompt of one token, a response of up to 8, a reward that varies."""
    tokenizer = WordTokenizer("numbers", [str(i) for i in range(vocabulary - 2)])
    task = SimpleNamespace(tokenizer=tokenizer, max_prompt=1, max_response=8, __name__="numbers", __file__=__file__)
    task.make_problem = lambda rng, split: Problem(" 0", " 0", "0")
    task.reward = lambda problem, response: float(len(response) % 2)
    return task


def loss_cost(opd: str, head_chunk: int, vocabulary: int = 151_936, prompts: int = 128) -> dict:
    """One step of train.py on 64 tokens a prompt, 8,192 in all, with a body so small that the head is everything.

    The peak is that of the process after the rollout, over what it held then, in MB.
    """
    task = number_task(vocabulary)
    held, plain = [], train.rollout

    def then_reset(*args, **options):
        out = plain(*args, **options)
        Path("/proc/self/clear_refs").write_text("5")  # the peak so far becomes what is held now
        held.append(memory.peak_mb())
        return out

    train.load_task, train.rollout, train.evaluate = lambda *_: task, then_reset, lambda *_: {}
    train.load_teacher = lambda *_: random_teacher(config, task)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        config = train.Config(out_dir=folder, warm_dir=folder, warm_iters=0, max_iters=1, n_layer=1, opd=opd)
        config = dataclasses.replace(config, prompts_per_step=prompts, max_new_tokens=8, method="dense", teacher="x")
        config = dataclasses.replace(config, head_chunk=head_chunk, eval_problems=1, device="cpu")
        train.train(config)
        row = json.loads((Path(folder) / "log.jsonl").read_text())
    seconds = row["seconds"] - row["completion_len"] * prompts * config.group_size / row["rollout_tok_s"]
    return {
        "opd": opd,
        "head_chunk": head_chunk,
        "peak MB": round(memory.peak_mb() - held[0]),
        "seconds": round(seconds),
    }


def loss_table():
    """Print the cost of the losses for three estimators, and for the dearest in smaller chunks; a process each."""
    rows = []
    for case in (("sampled", 1024), ("vopd", 1024), ("full", 1024), ("full", 256)):
        with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            rows.append(pool.submit(loss_cost, *case).result())
    print(markdown(rows))


# ---- where a training step's time goes -------------------------------------------------------------------------------

PREFILL, DECODE, EVICTION, SAMPLING = "prefill", "decode", "scoring for eviction", "head and sampling"
REWARD, OPINION, FORWARD, BACKWARD = "problems and reward", "scoring pass", "learner forward", "learner backward"
TRACK_B, OPTIMISER, REST = "Track B forward", "optimiser", "rest"
PHASES = (PREFILL, DECODE, EVICTION, SAMPLING, REWARD, OPINION, FORWARD, TRACK_B, BACKWARD, OPTIMISER, REST)


def a_clock():
    """Seconds. With one thread those of the process alone, which other work on the machine disturbs less."""
    return time.process_time if torch.get_num_threads() == 1 else time.perf_counter


class Phases:
    """Seconds by phase. Entering a phase stops the one around it, so a step's phases add up to the step."""

    def __init__(self, clock):
        self.clock, self.open, self.seconds, self.last = clock, [REST], collections.Counter(), clock()

    def settle(self):
        now = self.clock()
        self.seconds[self.open[-1]] += now - self.last
        self.last = now

    def timed(self, function, name):
        """`function`, in the phase `name`, or in the one that name(the phase around, arguments) gives."""

        @functools.wraps(function)
        def run(*args, **kwargs):
            inner = name(self.open[-1], (*args, *kwargs.values())) if callable(name) else name
            self.settle()
            self.open.append(inner)
            try:
                return function(*args, **kwargs)
            finally:
                self.settle()
                self.open.pop()

        return run


def learner_flops(config: GPTConfig, prompts: tuple[int, int], responses: tuple[int, int]) -> int:
    """Floating-point operations of the learner's forward and backward: 6 n M + 12 L C A + 6 V C (B R + B).

    N prompts of P tokens run once, B responses of R fed tokens attend to them: M = N P + B R tokens, n parameters of
    the blocks' matrices (2 operations each forward, 4 backward); A = N P (P + 1) / 2 + B R (P + (R + 1) / 2) pairs of
    a query and a key at or before it, C = heads * head size wide; a head of V rows for R + 1 states a response. Padding
    counts, since it is computed; pairs that only a shadow mask hides do too, since on a CPU they are.
    """
    (N, P), (B, R), c = prompts, responses, config
    width, kv = c.n_head * c.head_dim, c.n_kv_head * c.head_dim
    weights = c.n_layer * c.n_embd * (2 * width + 2 * kv + 3 * c.ffn_dim)
    pairs = N * P * (P + 1) / 2 + B * R * (P + (R + 1) / 2)
    head = 6 * c.vocab_size * c.n_embd * B * (R + 1)
    return int(6 * weights * (N * P + B * R) + 12 * c.n_layer * width * pairs + head)


def batch_flops(config: GPTConfig, batch, share_prompts: bool) -> int:
    if share_prompts:
        shared = SharedPrompts(batch, masked=False)
        return learner_flops(config, shared.prompts, shared.responses)
    B, T = batch.tokens.shape
    return learner_flops(config, (B, T - 1), (0, 0)) + 6 * config.vocab_size * config.n_embd * batch.response_mask.sum()


def matmul_peak(clock, repeat=7) -> float:
    """FLOP/s of float32 matrix products of 1024 x 1024, the best of `repeat`."""
    a, times = torch.randn(1024, 1024), []
    for _ in range(repeat):
        begin = clock()
        a @ a
        times.append(clock() - begin)
    return 2 * 1024**3 / min(times)


def step_times(config: train.Config, steps: int, clock=None) -> list[dict]:
    """Run `steps` steps of train.train -> for each the seconds of its phases, and `flops`, `tokens` and `logged`.

    flops: of the learner's forward and backward. tokens: sampled ones. logged: the loop's own figure of the step's
    seconds, by the clock on the wall. Evaluations, checkpoints and curves are no part of a step.
    """
    phases, done = Phases(clock or a_clock()), []

    def in_model(around, args):  # args: model, tokens, evicted_at, cache
        return (PREFILL if args[-1].step == -2 else DECODE) if around == SAMPLING else around

    def in_eviction(around, _):
        return EVICTION if around == DECODE else around

    def in_learner(_, args):
        phases.seconds["flops"] += batch_flops(args[0].config, args[3], config.share_prompts)
        return FORWARD

    def in_view(around, args):  # args: body, batch, masked, config
        track_b = around == FORWARD and config.method == "smd" and config.smd_lambda > 0 and not args[2]
        return TRACK_B if track_b else around

    def begin(*args):
        phases.settle()
        phases.seconds.clear()
        done.append({})
        return draw(*args)

    def end(*args):  # the last call in a step overwrites those before
        out = add_up(*args)
        phases.settle()
        done[-1] = dict(phases.seconds)
        return out

    draw, add_up = phases.timed(train.draw_problems, REWARD), train.over_ranks
    wrapped = [(train, "rewards_of", REWARD), (train, "rollout", SAMPLING), (GPT, "hidden", in_model)]
    wrapped += [(KVCache, name, in_eviction) for name in ("_window_attn", "_protect")]
    wrapped += [(kv_compress, "attention_received", in_eviction)]
    wrapped += [(train, "score", OPINION), (train, "states_of", in_view), (train, "add_gradients", in_learner)]
    wrapped += [(torch.Tensor, "backward", BACKWARD), (torch.nn.utils, "clip_grad_norm_", OPTIMISER)]
    wrapped += [(torch.optim.AdamW, "step", OPTIMISER)]
    with contextlib.ExitStack() as stack:
        patch, folder = mock.patch.object, stack.enter_context(tempfile.TemporaryDirectory())
        for owner, name, phase in wrapped:
            stack.enter_context(patch(owner, name, phases.timed(getattr(owner, name), phase)))
        policies = {name: phases.timed(score, in_eviction) for name, score in POLICIES.items()}
        stack.enter_context(mock.patch.dict(POLICIES, policies))
        for name, replacement in (("draw_problems", begin), ("over_ranks", end), ("evaluate", lambda *_: {})):
            stack.enter_context(patch(train, name, replacement))
        stack.enter_context(patch(train, "draw_curves", lambda _: None))
        teacher = lambda config, task, device: random_teacher(config, task).to(device)  # noqa: E731
        stack.enter_context(patch(train, "load_teacher", teacher))
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        train.train(dataclasses.replace(config, max_iters=steps, out_dir=folder, warm_dir=folder, device="cpu"))
        logged = [json.loads(line) for line in (Path(folder) / "log.jsonl").read_text().splitlines()]
    rows = config.prompts_per_step * config.group_size
    for step, row in zip(done, logged, strict=True):
        step |= {"tokens": round(row["completion_len"] * rows), "logged": row["seconds"]}
    return done


def random_teacher(config, task):
    """Random weights: what a teacher costs does not depend on what it knows."""
    return GPT(train.gpt_config(config, task), torch.Generator().manual_seed(2)).requires_grad_(False)


def whole(step: dict) -> float:
    """Seconds of a step."""
    return sum(step.get(phase, 0) for phase in PHASES)


def step_table(config: train.Config, steps: int) -> tuple[list[dict], dict]:
    """Rows by phase: seconds a step, median; its share of the step; sampled tokens per second of it. And the totals."""
    clock = a_clock()
    peak = matmul_peak(clock)
    kept = step_times(config, steps + 2, clock)[2:]
    peak = (peak + matmul_peak(clock)) / 2
    seconds = {p: statistics.median(step.get(p, 0) for step in kept) for p in PHASES}
    seconds = {p: s for p, s in seconds.items() if s > 0} | {"whole step": statistics.median(map(whole, kept))}
    tokens = statistics.median(step["tokens"] for step in kept)
    rows = [
        {"phase": p, "seconds": f"{s:.4f}", "share": f"{s / seconds['whole step']:.1%}", "tok/s": round(tokens / s)}
        for p, s in seconds.items()
    ]
    attained = statistics.median(step["flops"] / (step[FORWARD] + step[BACKWARD]) for step in kept)
    totals = {"sampled tokens": tokens, "learner GFLOP/s": round(attained / 1e9, 1)}
    totals |= {"matmul GFLOP/s": round(peak / 1e9, 1), "learner share of matmul": round(attained / peak, 3)}
    return rows, totals | {"peak MB": round(memory.peak_mb()), "threads": torch.get_num_threads()}


def step_command(options: list[str], steps: int, sweep: bool, as_json: bool):
    """Print where a step of train.py's loop spends its time. Weights are random unless warm_iters is given."""
    rows, totals = sweep_rows() if sweep else step_table(train.load_config(["--warm_iters=0", *options]), steps)
    print(json.dumps({"rows": rows} | totals) if as_json else f"{markdown(rows)}\n\n{markdown([totals])}")


# ---- decode and learner alone ----------------------------------------------------------------------------------------

SMALL, LARGE = dict(n_layer=2, n_embd=64, n_head=4, n_kv_head=2), dict(n_layer=8, n_embd=512, n_head=8, n_kv_head=4)


def alternate(cases: dict, rounds: int) -> dict[str, float]:
    """Call every case in turn, `rounds` times and once before to warm up -> median of what each returns."""
    seen = {name: [] for name in cases}
    for turn in range(rounds + 1):
        for name, run in cases.items():
            value = run()
            if turn:
                seen[name].append(value)
    return {name: statistics.median(values) for name, values in seen.items()}


def timed(run, clock):
    def seconds():
        begin = clock()
        run()
        return clock() - begin

    return seconds


def random_model(shape: dict, block_size: int) -> GPT:
    return GPT(GPTConfig(vocab_size=256, block_size=block_size, **shape), torch.Generator().manual_seed(0))


def decoder(model: GPT, prompt: int, rows: int, tokens: int, block=16, **options):
    """Prefill one prompt of `prompt` tokens for `rows` samples -> a function that feeds `block` tokens a row."""
    generator = torch.Generator().manual_seed(0)
    cache = KVCache(model.config, [prompt], rows, tokens + 1, generator=generator, **options)
    fed = torch.randint(model.config.vocab_size, (rows, 1), generator=generator)

    @torch.no_grad()
    def run(n=block):
        for _ in range(n):
            model(fed, cache=cache)

    with torch.no_grad():
        model(torch.randint(model.config.vocab_size, (1, prompt), generator=generator), cache=cache)
    return run


def decode_times(shape: dict, rows: int, cases: dict, rounds=4, block=16) -> dict[str, float]:
    """cases: name -> (position, cache options). Median seconds a token, of all rows together, around that position."""
    clock, tokens = a_clock(), block * (rounds + 1)
    model = random_model(shape, max(position for position, _ in cases.values()) + tokens)
    runs = {n: decoder(model, p - tokens // 2, rows, tokens, block, **how) for n, (p, how) in cases.items()}
    return {n: s / block for n, s in alternate({n: timed(run, clock) for n, run in runs.items()}, rounds).items()}


def learner_pass(shape: dict, T: int, group: int, method: str, share_prompts=True):
    """A learner's forward and backward, half of each row a prompt of which a quarter survives -> (function, FLOPs)."""
    model, P = random_model(shape, T), T // 2
    tokens = torch.randint(256, (group, T), generator=torch.Generator().manual_seed(1))
    tokens[1:, :P] = tokens[0, :P]
    lives = prompt_lifetimes(T, 0.25, heads=shape["n_kv_head"]).expand(shape["n_layer"], group, -1, -1)
    zero = torch.zeros(group, dtype=torch.int64)
    mask = (torch.arange(T) >= P).expand(group, T)
    batch = Rollout(zero, tokens, zero + P, zero + T, mask, zero > 0, torch.zeros(group, T), lives, 0, 0, 0)
    n = group * (T - P)
    given = [torch.full((n,), -5.5), torch.randn(n), torch.ones(n)]  # old logp, advantage, weight
    config = train.Config(method=method, share_prompts=share_prompts)

    def run():
        model.zero_grad(set_to_none=True)
        train.add_gradients(model, model.hidden, None, batch, given, n, config)

    return run, batch_flops(model.config, batch, share_prompts)


def learner_share(shape: dict, T: int, group: int, method: str, rounds=3) -> float:
    """The share of the matmul peak that a learner's pass attains, both measured in turn."""
    clock = a_clock()
    run, flops = learner_pass(shape, T, group, method)
    measured = alternate({"learner": timed(run, clock), "peak": lambda: matmul_peak(clock)}, rounds)
    return flops / measured["learner"] / measured["peak"]


def sweep_rows():
    """Decode time a token of 8 rows and the learner's share of the matmul peak, by model size, T and slots."""
    table = []
    for size, shape in (("2x64", SMALL), ("8x512", LARGE)):
        for T in (128, 512, 1024, 4096):
            budgets = [b for b in (64, 512) if b < T]
            cases = {"dense": (T, {})} | {str(b): (T, dict(kv_budget=b)) for b in budgets}
            seconds = decode_times(shape, 8 if shape is SMALL else 2, cases, rounds=2)
            share = learner_share(shape, T, max(1, 1024 // T), "smd", rounds=1)
            row = {"size": size, "T": T} | {f"{b} slots": None for b in (64, 512)}
            row |= {"dense" if b == "dense" else f"{b} slots": f"{s * 1e3:.2f} ms" for b, s in seconds.items()}
            table.append(row | {"learner share": f"{share:.0%}"})
            print(table[-1], file=sys.stderr, flush=True)
    return table, {"threads": torch.get_num_threads(), "peak MB": round(memory.peak_mb())}


# ---- goals -----------------------------------------------------------------------------------------------------------


def step_ratios(configs: dict, rounds=4, steps=3) -> dict[str, float]:
    """Median seconds of a step for each configuration, run in turn, `steps` at a time without the first."""
    clock = a_clock()
    runs = {
        name: lambda config=config: statistics.median(whole(s) for s in step_times(config, steps, clock)[1:])
        for name, config in configs.items()
    }
    return alternate(runs, rounds)


def goals():
    """Print what the project wants to be fast at, as measured, and the limit it has set itself."""
    table = []

    def goal(what, measured, limit=None):
        table.append({"goal": what, "measured": measured, "limit": limit})
        print(table[-1], file=sys.stderr, flush=True)

    for nkv, method in ((8, "smd"), (4, "smd"), (4, "dense")):
        share = learner_share(LARGE | {"n_kv_head": nkv}, 512, 2, method)
        goal(f"learner, 8x512, {nkv} kv heads, T=512, {method}: share of matmul peak", f"{share:.0%}", ">= 40%")

    default = train.Config(warm_iters=0)
    slots = {key: getattr(default, key) for key in ("sinks", "recent", "pool", "interval")} | {"kv_budget": 512}
    for size, shape, rows in (("2x64", SMALL, 32), ("8x512", LARGE, 8)):
        cases = {"dense": (4096, {})}
        for p, at in itertools.product(("snapkv", "streaming"), (4096, 1024)):
            cases[p, at] = (at, slots | {"policy": p})
        s = decode_times(shape, rows, cases)
        for p in ("snapkv", "streaming"):
            what = f"decode, {size}, {rows} rows, {p}, 512 slots at 4,096"
            goal(f"{what}: dense takes", f"{s['dense'] / s[p, 4096]:.2f}x", ">= 2x")
            goal(f"{what}: of that at 1,024", f"{s[p, 4096] / s[p, 1024]:.2f}x", "<= 1.1x")

    for size, shape, rows in (("2x64", SMALL, 32), ("8x512", LARGE, 8)):
        intervals = sorted({1, default.interval, 16})
        cases = {(p, n): (1024, slots | {"policy": p, "interval": n}) for p in POLICIES for n in intervals}
        s = decode_times(shape, rows, cases, rounds=3)
        for p, n in cases:
            if p != "streaming":
                what = f"decode, {size}, {rows} rows, {p}, 512 slots, interval {n}: of streaming's time"
                goal(what, f"{s[p, n] / s['streaming', n]:.2f}x", "<= 1.3x" if n == default.interval else None)

    cases = {"dense": dataclasses.replace(default, method="dense"), "smd": default}
    s = step_ratios(cases | {"smd_lambda=0.1": dataclasses.replace(default, smd_lambda=0.1)})
    for name, limit in (("smd", "<= 1.15x"), ("smd_lambda=0.1", "<= 1.6x")):
        goal(f"default configuration, a step of {name}: of dense's", f"{s[name] / s['dense']:.2f}x", limit)

    base = train.load_config(["config/vopd.toml", "--warm_iters=0"])
    large = dataclasses.replace(base, prompts_per_step=32, max_new_tokens=8, n_layer=1)
    for V, config, rounds in ((243, base, 4), (50_257, large, 2)):
        variants = {"sampled": {"opd": "sampled"}, "vopd, k = 20": {}, "vopd, k = 0": {"opd_topk": 0}}
        cases = {name: dataclasses.replace(config, **v) for name, v in (variants | {"full": {"opd": "full"}}).items()}
        with mock.patch.object(train, "load_task", (lambda *_: number_task(50_257)) if V > 243 else train.load_task):
            s = step_ratios(cases, rounds)
        for name, limit in (("vopd, k = 20", "<= 1.05x"), ("vopd, k = 0", None), ("full", None)):
            goal(f"V = {V:,}, a step of {name}: of sampled's", f"{s[name] / s['sampled']:.2f}x", limit)
    print(markdown(table))


# ---- peers -----------------------------------------------------------------------------------------------------------


def peer_task(prompts: list[str], vocabulary: int):
    """Prompts in their order, over and over; rewards 0, 1, 0, 1, ... so that no group's advantages are 0.

    No row ends before max_new_tokens: the id of EOS is one that the model has no logit for.
    """
    task, text, parity = number_task(vocabulary), itertools.cycle(prompts), itertools.cycle((0.0, 1.0))
    task.make_problem = lambda rng, split: Problem(next(text), " 0", "0")
    task.reward = lambda problem, response: next(parity)
    task.tokenizer.eos_ids = [vocabulary]
    return task


def trl_trainer(folder, prompts: list[str], config: train.Config, steps: int, callback):
    """TRL's GRPOTrainer on a model folder, set to do what train.py with method=dense does."""
    import datasets
    import trl
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, utils

    utils.logging.set_verbosity_error()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    V = model.config.vocab_size
    ids = {"<|pad|>": 0, "<|unused|>": 1, **{str(i): i + 2 for i in range(V - 2)}, "<|eos|>": V}
    words = Tokenizer(models.WordLevel(ids, unk_token="<|unused|>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<|pad|>", eos_token="<|eos|>")
    rows = config.prompts_per_step * config.group_size
    settings = trl.GRPOConfig(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=1,
        shuffle_dataset=False,
        max_steps=steps,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=1,
        num_generations=config.group_size,
        max_completion_length=config.max_new_tokens,
        num_iterations=1,
        temperature=config.temperature,
        top_p=1.0,
        top_k=0,
        beta=0.0,
        epsilon=config.clip,
        loss_type="dapo",  # a sum over the tokens of the step, divided by their number
        learning_rate=config.learning_rate,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        adam_beta2=0.95,
        optim="adamw_torch_fused",
        max_grad_norm=config.grad_clip,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
    )
    return trl.GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [float(i % 2) for i in range(len(completions))],
        args=settings,
        train_dataset=datasets.Dataset.from_list([{"prompt": p} for p in prompts]),
        processing_class=tokenizer,
        callbacks=[callback],
    )


def gradient_norm(model: GPT, inputs: dict, config: train.Config) -> float:
    """The norm of this project's gradient on a rollout of TRL's: each row a prompt (left-padded) and its completion."""
    prompts = [row[kept.bool()] for row, kept in zip(inputs["prompt_ids"], inputs["prompt_mask"], strict=True)]
    B, R = inputs["completion_ids"].shape
    P = torch.tensor([len(p) for p in prompts])
    rows = [torch.cat(pair) for pair in zip(prompts, inputs["completion_ids"], strict=True)]
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)  # (B, T)
    at = torch.arange(tokens.shape[1])
    mask = (at >= P[:, None]) & (at < P[:, None] + R)
    lives = torch.full((model.config.n_layer, B, model.config.n_kv_head, tokens.shape[1]), NEVER, dtype=torch.int32)
    batch = Rollout(torch.arange(B), tokens, P, P + R, mask, P < 0, torch.zeros(tokens.shape), lives, 0, 0, 0)
    old = train.score(model, None, batch, config)[0][mask[:, 1:]]
    given = [old, inputs["advantages"].repeat_interleave(R), torch.ones(B * R)]
    train.add_gradients(model, model.hidden, None, batch, given, B * R, config)
    return torch.nn.utils.get_total_norm(p.grad for p in model.parameters()).item()


def peers_of_size(shape: dict, new_tokens: int, steps: int) -> tuple[list[dict], dict]:
    """Steps of TRL's trainer and of train.py in turn -> rows of medians, and how far apart their results are."""
    from transformers import TrainerCallback

    clock, rng, V = a_clock(), random.Random(0), 300
    lengths = [rng.randint(28, 32) for _ in range(4 * (steps + 2))]
    prompts = ["".join(f" {rng.randrange(V - 2)}" for _ in range(n)) for n in lengths]
    model = GPT(GPTConfig(vocab_size=V, block_size=32 + new_tokens, **shape), torch.Generator().manual_seed(0))
    base = train.Config(method="dense", warm_iters=0, prompts_per_step=4, group_size=4, micro_batch_size=16)
    base = dataclasses.replace(base, max_new_tokens=new_tokens, block_size=32 + new_tokens, **shape)
    ours = {"dense": base, "smd, a quarter of the prompt": dataclasses.replace(base, method="smd")}
    seen = {name: [] for name in ("TRL", *ours)}
    inside, batches, norms = collections.Counter(), [], []

    class Turns(TrainerCallback):
        """After each of TRL's steps, one of ours each way."""

        def on_step_begin(self, *_, **__):
            inside.clear()
            inside["begin"] = clock()

        def on_step_end(self, *_, **__):
            step = clock() - inside["begin"]
            seen["TRL"].append((step, inside["rollout"], step - inside["inputs"]))
            for name, config in ours.items():
                one = step_times(config, 1, clock)[0]
                rollout_seconds = sum(one.get(p, 0) for p in (PREFILL, DECODE, EVICTION, SAMPLING))
                learner = sum(one.get(p, 0) for p in (FORWARD, BACKWARD, OPTIMISER))
                seen[name].append((whole(one), rollout_seconds, learner))

        def on_log(self, *_, logs, **__):
            norms.append(logs.get("grad_norm"))

    def timed_as(part, function):
        @functools.wraps(function)
        def run(*args, **kwargs):
            begin = clock()
            out = function(*args, **kwargs)
            inside[part] += clock() - begin
            if part == "inputs":
                batches.append(out)
            return out

        return run

    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        model.save_pretrained(folder / "model")
        trainer = trl_trainer(folder / "model", prompts, base, steps + 1, Turns())
        idx = torch.randint(V, (2, 32), generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            apart = {"logits, largest difference": f"{(model(idx) - trainer.model(idx).logits).abs().max():.1e}"}
        trainer._prepare_inputs = timed_as("inputs", trainer._prepare_inputs)
        trainer._generate = timed_as("rollout", trainer._generate)
        torch.set_num_threads(threads)
        start = lambda config, task, device: GPT.from_pretrained(folder / "model", config.block_size)  # noqa: E731
        task, patch, quiet = peer_task(prompts, V), mock.patch.object, contextlib.redirect_stdout(io.StringIO())
        with patch(train, "load_task", lambda *_: task), patch(train, "first_model", start), quiet:
            trainer.train()
    apart |= {"TRL's gradient norm": round(norms[0], 5)}
    apart |= {"ours on the same rollout": round(gradient_norm(model, batches[0], base), 5)}
    median = {name: [statistics.median(column) for column in zip(*s[1:], strict=True)] for name, s in seen.items()}
    table = []
    for name, values in median.items():
        row = {"loop": name}
        for part, value, trl_value in zip(("step", "rollout", "learner"), values, median["TRL"], strict=True):
            row |= {f"{part}, s": f"{value:.3f}", f"TRL's {part} over it": f"{trl_value / value:.2f}x"}
        table.append(row)
    return table, apart


def peers(steps: int):
    """Print medians of TRL's GRPOTrainer and this loop, in turn on the same weights and prompts, EOS impossible."""
    if importlib.util.find_spec("trl") is None:
        sys.exit("error: peers needs TRL: pip install trl")
    for size, shape, new_tokens, n in (("2x64", SMALL, 64, steps), ("8x512", LARGE, 128, max(2, steps // 3))):
        table, apart = peers_of_size(shape, new_tokens, n)
        print(f"\n{size}, 16 rows of {new_tokens} tokens, {torch.get_num_threads()} threads, {n} steps", flush=True)
        print(f"\n{markdown(table)}\n\n{markdown([apart])}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("attention").add_argument("--json", action="store_true", help="one JSON row per case")
    commands.add_parser("tiles")
    commands.add_parser("compile")
    commands.add_parser("loss")
    step = commands.add_parser("step", allow_abbrev=False, help="options of train.py go with it")
    step.add_argument("--steps", type=int, default=8, help="steps that count, after two that do not")
    step.add_argument("--sweep", action="store_true", help="decode and learner alone, by model size, T and slots")
    step.add_argument("--json", action="store_true")
    compare = commands.add_parser("peers")
    compare.add_argument("--steps", type=int, default=9, help="at the small size, a third of it at the large")
    for command in (step, commands.add_parser("goals"), compare):
        command.add_argument("--threads", type=int, default=1)
    arguments, others = parser.parse_known_args()
    if others and arguments.command != "step":
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    if "threads" in arguments:
        torch.set_num_threads(arguments.threads)
    match arguments.command:
        case "attention":
            attention(arguments.json)
        case "tiles":
            tiles()
        case "compile":
            compile_table()
        case "loss":
            loss_table()
        case "step":
            step_command(others, arguments.steps, arguments.sweep, arguments.json)
        case "goals":
            goals()
        case "peers":
            peers(arguments.steps)


if __name__ == "__main__":
    sys.exit(main())
