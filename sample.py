"""Look at what a model says, and at what it has forgotten meanwhile.

    python sample.py out                             a run of train.py: a problem of its task (--seed: another one)
    python sample.py MODEL_FOLDER                    a pretrained model or hub id: each line of input is a new chat
    python sample.py MODEL_FOLDER --prompt="Why is the sky blue?" --prompt_budget=0.25 --policy=h2o --show
    python sample.py out --png=mask.png --layer=1 --head=0                 the shadow mask as a picture

A run samples with the cache options it was trained with (--prompt_budget=0: dense), a pretrained model with a dense
cache. --show prints the tokens once more: those whose keys most heads have evicted are dimmed, or [-marked so-] where
the output is not a terminal. --png draws the shadow mask of one layer and kv head, how long each of its keys lived, and
the keys that are held at each position, of all layers and heads, in bytes.
"""

import argparse
import importlib.util
import inspect
import itertools
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from data.tokenizer import ChatTokenizer
from kernels import visible
from kv_compress import POLICIES, KVCache, Rollout, rollout
from model import GPT
from train import CACHE_KEYS, load_checkpoint, load_model, load_task


def load(name: str):
    """The model, its tokenizer, its task (None: a pretrained model) and the run's configuration ({}: none), of a run's
    folder, a checkpoint, a model folder or a hub id. Raises ValueError for what is none of these."""
    path = Path(name) / "ckpt.pt" if (Path(name) / "ckpt.pt").is_file() else Path(name)
    if not path.is_file():
        return GPT.from_pretrained(name), ChatTokenizer(name), None, {}
    run = load_checkpoint(path).get("config")
    if run is None:
        raise ValueError(f"{path}: a warm start, which does not say what its task is; give a run's folder")
    task = load_task(run["task"], run.get("tokenizer", ""))
    return load_model(path, task), task.tokenizer, task, run


def marked(tokenizer, roll: Rollout, terminal: bool) -> str:
    """The text of the first row, in which what more than half of all kv heads have evicted is dim, or in [- -]."""
    n = int(roll.length[0])
    gone = ((roll.evicted_at[:, 0, :, :n] < n).float().mean((0, 1)) > 0.5).tolist()  # (n,)
    before, after = ("\033[2m", "\033[0m") if terminal else ("[-", "-]")
    text = ""
    for dim, pairs in itertools.groupby(zip(gone, roll.tokens[0, :n].tolist(), strict=True), key=lambda pair: pair[0]):
        piece = tokenizer.decode([token for _, token in pairs])
        text += f"{before}{piece}{after}" if dim and piece else piece
    return text


def draw(figure, roll: Rollout, layer: int, head: int, bytes_of_a_key: int) -> None:
    """The picture of --png, of the first row; bytes_of_a_key: K and V of one position, in one layer and kv head."""
    T, P = int(roll.length[0]) - 1, int(roll.prompt_len[0])  # the last token is never fed: it is no query and no key
    lives = roll.evicted_at[:, :1, :, :T].cpu()  # (L, 1, nkv, T)
    mask, bars, memory = figure.subplots(1, 3)
    shade = torch.where(torch.ones(T, T).triu(1) > 0, 1.0, 0.8).masked_fill(visible(lives[layer])[0, head], 0)  # (T, T)
    mask.imshow(shade.numpy(), cmap="gray", vmin=0, vmax=1, interpolation="none")
    mask.axhline(P - 0.5, color="black", linewidth=0.8)
    mask.annotate("prompt\nends", (T - 0.5, P - 0.5), (4, 0), textcoords="offset points", va="center")
    ends = lives[layer, 0, head].clamp(max=T)  # (T,)
    bars.hlines(range(T), range(T), ends, color="black", linewidth=1)
    alive = (ends == T).nonzero().squeeze(1)
    bars.plot(ends[alive], alive, "k>", markersize=3)
    held = sum(visible(one)[0].sum((0, 2)) for one in lives) * bytes_of_a_key  # (T,) all layers and heads
    dense = torch.arange(1, T + 1) * lives.shape[0] * lives.shape[2] * bytes_of_a_key  # (T,)
    unit, size = ("MiB", 2**20) if dense[-1] > 2**20 else ("KiB", 2**10)
    for values, style, name, va in ((dense / size, "--", "dense", "bottom"), (held / size, "-", "seen", "top")):
        memory.plot(values, style, color="black")
        memory.annotate(name, (T - 1, float(values[-1])), (4, 0), textcoords="offset points", va=va)
    query, key, which = "query position", "key position", f"layer {layer}, kv head {head}"
    for axis, title, x, y, bottom, top in (
        (mask, f"{which}\nblack seen, grey evicted, white future", key, query, T - 0.5, -0.5),
        (bars, "a line: the life of a key\nan arrow: it survives", query, key, T, -1),
        (memory, "K and V that a query sees,\nall layers and heads", query, f"{unit} a row", 0, None),
    ):
        axis.set(title=title, xlabel=x, ylabel=y, ylim=(bottom, top))


def answer(model: GPT, tokenizer, prompt: str, args: argparse.Namespace, generator: torch.Generator) -> None:
    """Print the response while it is sampled; then what the cache took and, with --show and --png, what it lost."""
    ids, shown = [], ""

    def stream(token: torch.Tensor) -> None:
        nonlocal shown
        ids.append(int(token[0]))
        text = tokenizer.decode(ids).rstrip("\ufffd")  # half a character waits for its other half
        print(text[len(shown) :], end="", flush=True)
        shown = text

    options = {key: getattr(args, key) for key in CACHE_KEYS}
    how = {"temperature": args.temperature, "generator": generator, "on_token": stream}
    prompts = [tokenizer.prompt(prompt)]
    most = min(args.max_new_tokens, max(1, model.config.block_size - len(prompts[0])))
    roll = rollout(model, prompts, 1, most, eos_ids=tokenizer.eos_ids, **how, **options)
    print(tokenizer.decode(ids)[len(shown) :])
    share = roll.kv_bytes / roll.kv_bytes_dense
    print(f"[{len(prompts[0])} + {len(ids)} tokens; K and V: {share:.0%} of the dense cache]")
    if args.show:
        print(marked(tokenizer, roll, sys.stdout.isatty()))
    if args.png:
        import matplotlib.figure  # not pyplot: no display is needed

        with matplotlib.rc_context({"font.size": 11, "axes.titlesize": 12}):  # to be read at half its width
            figure = matplotlib.figure.Figure(figsize=(11, 4), layout="constrained")
            draw(figure, roll, args.layer, args.head, 2 * model.config.head_dim * 4)  # float32
            figure.savefig(args.png, dpi=120)


def lines() -> Iterator[str]:
    """Lines of input until its end; empty ones are skipped."""
    while True:
        print("> ", end="", flush=True)
        if not (line := sys.stdin.readline()):
            return print()
        if line.strip():
            yield line.strip()


def number(text: str) -> int | float:
    return int(text) if text.lstrip("-").isdigit() else float(text)


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        sys.exit(f"error: {message}")


def main(argv: list[str]) -> None:
    parser = Parser("sample.py", description=__doc__, formatter_class=argparse.RawTextHelpFormatter, allow_abbrev=False)
    parser.add_argument("model", help="a run's out_dir, a checkpoint, a model folder or a hub id")
    parser.add_argument("--prompt", help="what to ask, once; otherwise a problem of the run's task, or lines of input")
    parser.add_argument("--max_new_tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.0, help="0, the default, is greedy")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", action="store_true", help="print the tokens again, dimmed where they were evicted")
    parser.add_argument("--png", help="draw what each query saw into this file, FILE.png")
    parser.add_argument("--layer", type=int, default=0, help="which layer --png draws")
    parser.add_argument("--head", type=int, default=0, help="which kv head of it")
    defaults = {key: inspect.signature(KVCache).parameters[key].default for key in CACHE_KEYS}
    for key, default in defaults.items():
        kind = number if key == "prompt_budget" else type(default)
        parser.add_argument(f"--{key}", type=kind, help=", ".join(POLICIES) if key == "policy" else None)
    args = parser.parse_args(argv)
    try:
        if not 0 <= args.seed < 2**63:
            raise ValueError(f"--seed={args.seed}: must be in 0..2**63 - 1")
        if args.png and importlib.util.find_spec("matplotlib") is None:
            raise ValueError("--png needs matplotlib: pip install matplotlib")
        if args.png is not None and not (args.png.endswith(".png") and Path(args.png).parent.is_dir()):
            raise ValueError(f"--png={args.png}: must be the name of a .png file, in a folder that is there")
        model, tokenizer, task, run = load(args.model)
        for key, default in defaults.items():
            if getattr(args, key) is None:
                setattr(args, key, run.get(key, default))
        for key, value, n in (("layer", args.layer, model.config.n_layer), ("head", args.head, model.config.n_kv_head)):
            if not 0 <= value < n:
                raise ValueError(f"--{key}={value}: must be in 0..{n - 1} for this model")
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model.to(device)
        generator = torch.Generator(device).manual_seed(args.seed)
        if args.prompt is not None:
            prompts = [args.prompt]
        elif task is not None:
            problem = task.make_problem(random.Random(args.seed), "eval")
            print(f"{problem.prompt}\n")
            prompts = [problem.prompt]
        else:
            prompts = lines()
        for prompt in prompts:
            answer(model, tokenizer, prompt, args, generator)
    except (ValueError, OSError) as e:
        sys.exit(f"error: {e}")
    except KeyboardInterrupt:
        print()


if __name__ == "__main__":
    main(sys.argv[1:])
