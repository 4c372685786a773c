"""Tables about the attention kernels and the loss, as markdown.

    python -m experiments.bench attention [--json]   time and memory of shadow attention and of its alternatives
    python -m experiments.bench tiles                the share of tiles that lifetime order leaves to visit
    python -m experiments.bench compile              registers, spills and shared memory, no GPU needed
    python -m experiments.bench loss                 memory and time of a step's losses at a vocabulary of 151,936

`tiles` and `compile` also write their table to experiments/results/.
"""

import argparse
import concurrent.futures
import dataclasses
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

import torch
import torch.nn.functional as F

import kernels
import train
from data import Problem, WordTokenizer, recall
from experiments import memory
from kernels import NEVER, shadow_attention, visible, visited_tiles
from kv_compress import POLICIES, rollout
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


def loss_cost(opd: str, head_chunk: int, vocabulary: int = 151_936, prompts: int = 128) -> dict:
    """One step of train.py on 64 tokens a prompt, 8,192 in all, with a body so small that the head is everything.

    The peak is that of the process after the rollout, over what it held then, in MB.
    """
    tokenizer = WordTokenizer("numbers", [str(i) for i in range(vocabulary - 2)])
    task = SimpleNamespace(tokenizer=tokenizer, max_prompt=1, max_response=8, __name__="numbers", __file__=__file__)
    task.make_problem = lambda rng, split: Problem(" 0", " 0", "0")
    task.reward = lambda problem, response: float(len(response) % 2)
    held, plain = [], train.rollout

    def then_reset(*args, **options):
        out = plain(*args, **options)
        Path("/proc/self/clear_refs").write_text("5")  # the peak so far becomes what is held now
        held.append(memory.peak_mb())
        return out

    train.load_task, train.rollout, train.evaluate = lambda *_: task, then_reset, lambda *_: {}
    train.load_teacher = lambda *_: GPT(train.gpt_config(config, task), torch.Generator().manual_seed(2))
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


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("attention").add_argument("--json", action="store_true", help="one JSON row per case")
    commands.add_parser("tiles")
    commands.add_parser("compile")
    commands.add_parser("loss")
    arguments = parser.parse_args()
    if arguments.command == "attention":
        attention(arguments.json)
    elif arguments.command == "tiles":
        tiles()
    elif arguments.command == "loss":
        loss_table()
    else:
        compile_table()


if __name__ == "__main__":
    sys.exit(main())
