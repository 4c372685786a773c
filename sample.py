"""Look at what a model says, and at what it has forgotten meanwhile.

    python sample.py out                             a run of train.py: a problem of its task (--seed: another one)
    python sample.py MODEL_FOLDER                    a pretrained model or hub id: each line of input is a new chat
    python sample.py MODEL_FOLDER --prompt="Why is the sky blue?" --prompt_budget=0.25 --policy=h2o --show

Without a budget the cache is dense. --show prints the tokens once more: those whose keys most heads have evicted are
dimmed, or [-marked so-] where the output is not a terminal.
"""

import argparse
import inspect
import itertools
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from data.tokenizer import ChatTokenizer
from kv_compress import POLICIES, KVCache, Rollout, rollout
from model import GPT
from train import load_checkpoint, load_model, load_task

CACHE_OPTIONS = ("kv_budget", "prompt_budget", "policy", "sinks", "recent", "pool", "interval")


def load(name: str):
    """The model, its tokenizer and its task (None: a pretrained model) of a run's folder, a checkpoint, a model folder
    or a hub id. Raises ValueError for what is none of these."""
    path = Path(name) / "ckpt.pt" if (Path(name) / "ckpt.pt").is_file() else Path(name)
    if not path.is_file():
        return GPT.from_pretrained(name), ChatTokenizer(name), None
    run = load_checkpoint(path).get("config")
    if run is None:
        raise ValueError(f"{path}: a warm start, which does not say what its task is; give a run's folder")
    task = load_task(run["task"], run.get("tokenizer", ""))
    return load_model(path, task), task.tokenizer, task


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


def answer(model: GPT, tokenizer, prompt: str, args: argparse.Namespace, generator: torch.Generator) -> None:
    """Print the response while it is sampled; then what the cache took and, with --show, what it lost."""
    ids, shown = [], ""

    def stream(token: torch.Tensor) -> None:
        nonlocal shown
        ids.append(int(token[0]))
        text = tokenizer.decode(ids).rstrip("\ufffd")  # half a character waits for its other half
        print(text[len(shown) :], end="", flush=True)
        shown = text

    options = {key: getattr(args, key) for key in CACHE_OPTIONS}
    how = {"temperature": args.temperature, "generator": generator, "on_token": stream}
    prompts = [tokenizer.prompt(prompt)]
    most = min(args.max_new_tokens, max(1, model.config.block_size - len(prompts[0])))
    roll = rollout(model, prompts, 1, most, eos_ids=tokenizer.eos_ids, **how, **options)
    print(tokenizer.decode(ids)[len(shown) :])
    share = roll.kv_bytes / roll.kv_bytes_dense
    print(f"[{len(prompts[0])} + {len(ids)} tokens; K and V: {share:.0%} of the dense cache]")
    if args.show:
        print(marked(tokenizer, roll, sys.stdout.isatty()))


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
    for key in CACHE_OPTIONS:  # the cache's own defaults: dense
        default = inspect.signature(KVCache).parameters[key].default
        kind = number if key == "prompt_budget" else type(default)
        parser.add_argument(
            f"--{key}", type=kind, default=default, help=", ".join(POLICIES) if key == "policy" else None
        )
    args = parser.parse_args(argv)
    try:
        model, tokenizer, task = load(args.model)
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
    except ValueError as e:
        sys.exit(f"error: {e}")
    except KeyboardInterrupt:
        print()


if __name__ == "__main__":
    main(sys.argv[1:])
