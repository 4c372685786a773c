"""One GRPO loop: roll out with a compressed KV cache, reward, advantage, loss, step.

    python train.py                                      the default: smd on the recall task, laptop CPU or one GPU
    python train.py --method=naive --out_dir=out-naive   the same run with a learner that sees everything
    python train.py config/x.toml --learning_rate=1e-4   overrides, from left to right
    python train.py --help                               every key with its meaning
    torchrun --nproc_per_node=2 train.py                 the same job on several processes, one GPU or CPU core each

How to read it: `Config`, then `train`, whose loop has seven numbered steps, with `score` (step 4) and `add_gradients`
(step 5) before it; everything else here is reading options and writing files.

Simplifications: no KL to a reference policy, no entropy bonus, no learning-rate schedule; every sampled token is used
for one optimiser step (updates_per_rollout splits the rollout, it does not repeat it).
"""

import contextlib
import dataclasses
import difflib
import functools
import hashlib
import importlib
import inspect
import json
import math
import os
import random
import re
import signal
import sys
import time
import tomllib
import typing
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

import losses
import model as model_file
from data import pretrained
from data.tokenizer import ChatTokenizer
from kv_compress import COLDEST, Rollout, SharedPrompts, check_options, rollout
from model import GPT, GPTConfig


@dataclass
class Config:
    # where and on what
    out_dir: str = "out"  # gets log.jsonl, summary.json, curves.png and ckpt.pt; an older run in it is overwritten
    warm_dir: str = "out/warm"  # warm starts, kept by configuration
    seed: int = 1337  # of the weights, the problems and the sampling
    device: str = "auto"  # auto is cuda where there is one, else cpu
    dtype: str = "float32"  # or bfloat16: autocast over float32 master weights
    compile: bool = False  # torch.compile the learner; on a CPU it takes longer than it brings
    init_from: str = "scratch"  # scratch (warm start), resume (go on from out_dir/ckpt.pt), or a model folder or hub id
    tokenizer: str = ""  # model folder or hub id, for tasks in plain text; init_from sets it where it is one
    # task and model
    task: str = "recall"  # a module in data/, or a dotted path such as examples.sort
    n_layer: int = 2
    n_head: int = 4
    n_kv_head: int = 2  # query heads share kv heads; evictions are decided per kv head
    n_embd: int = 64
    block_size: int = 128  # longest prompt and response together
    # supervised warm start: RL needs a model that sometimes succeeds
    warm_iters: int = 260
    warm_batch_size: int = 64  # worked solutions a step
    warm_learning_rate: float = 2e-3
    # optimiser
    max_iters: int = 200  # rollouts
    learning_rate: float = 2e-4
    weight_decay: float = 0.0
    grad_clip: float = 1.0  # largest norm of the gradient
    # GRPO
    prompts_per_step: int = 32
    group_size: int = 8  # samples per prompt; their mean reward is the baseline
    micro_batch_size: int = 256  # rows per forward; the result does not depend on it
    head_chunk: int = 1024  # response tokens whose logits exist at once; the result does not depend on it
    share_prompts: bool = True  # the learner runs a prompt once for its samples; false: whole rows, through the kernel
    recompute: bool = False  # activation checkpointing: less memory, one forward more
    updates_per_rollout: int = 1  # optimiser steps that share a rollout, each on its own rows
    max_new_tokens: int = 12  # response length, EOS included
    temperature: float = 1.0  # divides the logits of sampler and learner alike
    method: str = "smd"  # dense | naive | bypass | importance | sparse_rl | smd
    importance_mode: str = "token"  # of method=importance: token | token_truncated | sequence
    clip: float = 0.2  # the ratio is clipped to [1 - clip, 1 + clip_high]
    clip_high: float = 0.0  # 0: the same as clip
    adv_scale: str = "std"  # std: GRPO's; none: only the mean is subtracted
    reward_coef: float = 1.0  # weight of the reward's advantage
    shaping_coef: float = (
        0.0  # weight of the task's partial credit, added to the reward in training; accuracy ignores it
    )
    # KV compression
    policy: str = "snapkv"  # snapkv | h2o | rkv | streaming | random, or a fork's
    kv_budget: int = 0  # slots per (layer, row, kv head), prompt and response together; 0: as many as needed
    prompt_budget: int | float = 0.25  # prompt keys kept, a number or a fraction in (0, 1]; 0: all that fit
    sinks: int = 1  # first positions that are never evicted
    recent: int = 5  # newest keys that are never evicted, and the window of snapkv and rkv
    pool: int = 1  # neighbours over which the prompt's window attention is averaged
    interval: int = 4  # tokens between two refreshes of the scores while decoding; newer keys stay until the next
    # shadow mask distillation: Track A is on with method=smd, Track B with smd_lambda > 0
    smd_lambda: float = 0.0  # the paper's value is 0.1; at toy scale it did not help
    smd_track_b: str = "dense_teaches_masked"  # or masked_teaches_dense, what the authors' public code does
    # on-policy distillation from a teacher, under the student's own view (masked with method=smd)
    opd: str = "off"  # off | sampled | mean | vopd | vopd_optimal | full | topk_kl
    opd_coef: float = 1.0  # weight of the distillation's advantage, or of the direct KL of full and topk_kl
    opd_topk: int = 20  # support of vopd's baseline and of topk_kl; 0: the whole vocabulary
    teacher: str = ""  # a checkpoint with the same vocabulary, or a .toml whose warm start is the teacher
    # evaluation: greedy accuracy, with the dense and with the compressed cache
    eval_interval: int = 0  # steps between evaluations; 0: before and after only
    eval_problems: int = 1024
    eval_only: bool = False  # evaluate, print and stop; out_dir is left alone
    save_interval: int = 50  # steps between checkpoints; there is one after the last step too
    max_bad_steps: int = 10  # so many updates in a row without a finite gradient end the run


class Halt(Exception):
    """A run that cannot go on; the message says why, and what to try."""


CHOICES = {
    "device": ("auto", "cpu", "cuda"),
    "dtype": ("float32", "bfloat16"),
    "method": ("dense", "naive", "bypass", "importance", "sparse_rl", "smd"),
    "importance_mode": ("token", "token_truncated", "sequence"),
    "adv_scale": ("std", "none"),
    "smd_track_b": ("dense_teaches_masked", "masked_teaches_dense"),
}
CACHE_KEYS = ("kv_budget", "prompt_budget", "policy", "sinks", "recent", "pool", "interval")
WARM_KEYS = ("warm_iters", "warm_batch_size", "warm_learning_rate")
RANK, WORLD = (int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))  # torchrun's
RESCORED = ("naive", "importance", "sparse_rl")  # their old policy is not the sampler's but the full view's
DIRECT = ("full", "topk_kl")  # opd without sampled advantages: the KL itself is a loss


def opd_advantages(baseline: str, student: Tensor, tutor: Tensor, targets: Tensor, states: Tensor, config: Config):
    """losses.opd_advantages of c tokens, as an entry of OPD."""
    how = {"baseline": baseline, "k": config.opd_topk, "temperature": config.temperature}
    return losses.opd_advantages(student[None], tutor[None], targets[None], **how)[0]  # (c,)


# opd -> what multiplies grad log pi of c sampled tokens, (c,), from the logits (c,V) of student and teacher, the tokens
# (c,) and the student's states (c,C). examples/critic.py adds one. `mean` gets its baseline after the whole rollout.
BASELINES = {"sampled": "none", "mean": "none", "vopd": "value", "vopd_optimal": "optimal"}
OPD = {name: functools.partial(opd_advantages, baseline) for name, baseline in BASELINES.items()}


# ---------------------------------------------------------------------------------------------------------------------
# Options: a dataclass, TOML files, --key=value


def parse_value(key: str, value, where: str):
    """`value` as the type that Config declares for `key`: text from the command line, or a TOML value."""
    kinds = {f.name: f.type for f in dataclasses.fields(Config)}
    if key not in kinds:
        close = difflib.get_close_matches(key, kinds, n=1, cutoff=0)[0]
        raise ValueError(f"{where}: there is no key {key!r}; the closest is {close!r}")
    kind, parsed = kinds[key], None
    allowed = typing.get_args(kind) or (kind,)  # int | float tries int first: 12 is a number of keys, 0.25 a fraction
    if bool in allowed:
        parsed = {"true": True, "false": False}.get(str(value).lower())
    elif type(value) in allowed:
        parsed = value
    elif type(value) in (int, str):
        for number in allowed:
            with contextlib.suppress(ValueError):
                parsed = number(value) if parsed is None else parsed
    if parsed is None:
        raise ValueError(f"{where}: {key}={value!r} must be {getattr(kind, '__name__', kind)}")
    if isinstance(parsed, float) and not math.isfinite(parsed):
        raise ValueError(f"{where}: {key}={value!r} must be a finite number")
    return parsed


def read_toml(path: str) -> dict:
    """Raises ValueError if there is no TOML file at `path`."""
    if not Path(path).is_file():
        raise ValueError(f"{path}: there is no such configuration file")
    try:
        return tomllib.loads(Path(path).read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ValueError(f"{path}: not a TOML file: {e}") from None


def load_config(argv: list[str]) -> Config:
    """Config from arguments: TOML files and --key=value, later ones win. Raises ValueError for what does not fit.

    With init_from=resume the checkpoint's configuration takes the place of the defaults.
    """
    given = {}
    for arg in argv:
        if arg.startswith("--"):
            key, equals, value = arg[2:].partition("=")
            if not equals:
                raise ValueError(f"{arg}: options are written --key=value")
            given[key] = parse_value(key, value, "command line")
        else:
            given |= {key: parse_value(key, value, arg) for key, value in read_toml(arg).items()}
    config = Config(**given)
    if config.init_from != "resume":
        if config.init_from != "scratch":
            config.tokenizer = config.tokenizer or config.init_from
        check_config(config)
        return config
    path = Path(config.out_dir) / "ckpt.pt"
    checkpoint = load_checkpoint(path)
    if missing := {"config", "step", "optimizer"} - checkpoint.keys():
        raise ValueError(f"{path}: has no {sorted(missing)[0]!r}: it is a model alone, not a run to go on with")
    here = {"out_dir": config.out_dir, "init_from": "resume"}  # the folder may have been renamed since
    config = Config(**(checkpoint["config"] | given | here))
    check_config(config)
    task = load_task(config.task, config.tokenizer)
    load_model(path, task)  # raises if the vocabulary is another
    if not config.tokenizer and (shape := dataclasses.asdict(gpt_config(config, task))) != checkpoint["gpt"]:
        other = [key for key in shape if shape[key] != checkpoint["gpt"][key]]
        raise ValueError(f"{other[0]}={shape[other[0]]}: {path} has {checkpoint['gpt'][other[0]]}, so it cannot go on")
    if config.seed != checkpoint["config"]["seed"]:
        raise ValueError(
            f"seed={config.seed}: {path} was begun with {checkpoint['config']['seed']}; a run has one seed"
        )
    if checkpoint["step"] >= config.max_iters and not config.eval_only:
        raise ValueError(f"max_iters={config.max_iters}: {path} has done {checkpoint['step']} steps already; give more")
    changed = {k: (old, getattr(config, k)) for k, old in checkpoint["config"].items() if old != getattr(config, k)}
    for key, (old, new) in changed.items():
        if key not in {*here, "eval_only"}:
            tqdm.write(f"resume: {key}={new!r} from here on, {old!r} before")
    return config


def check_config(config: Config) -> None:
    """Raise ValueError, naming the value and what is allowed, for a configuration that could not run."""
    for key, allowed in (CHOICES | {"opd": ("off", *OPD, *DIRECT)}).items():
        if (value := getattr(config, key)) not in allowed:
            raise ValueError(f"{key}={value!r}: must be one of {', '.join(allowed)}")
    check_options(**{key: getattr(config, key) for key in CACHE_KEYS})
    least = dict.fromkeys(("prompts_per_step", "group_size", "micro_batch_size", "head_chunk"), 1)
    least |= dict.fromkeys(("updates_per_rollout", "max_new_tokens", "max_iters"), 1)
    least |= dict.fromkeys(("warm_batch_size", "eval_problems", "save_interval", "max_bad_steps"), 1)
    least |= dict.fromkeys(("seed", "warm_iters", "eval_interval", "opd_topk", "smd_lambda", "clip_high"), 0)
    least |= dict.fromkeys(("weight_decay", "reward_coef", "shaping_coef", "opd_coef"), 0)
    for key, smallest in least.items():
        if not (value := getattr(config, key)) >= smallest:
            raise ValueError(f"{key}={value}: must be at least {smallest}")
    if config.seed >= 2**63:
        raise ValueError(f"seed={config.seed}: must be below 2**63")
    for key in ("learning_rate", "warm_learning_rate", "grad_clip", "clip"):
        if not (value := getattr(config, key)) > 0:
            raise ValueError(f"{key}={value}: must be above 0")
    if config.clip >= 1:
        raise ValueError(f"clip={config.clip}: must be below 1, or the ratio has no lower bound; clip_high may be more")
    if config.temperature < COLDEST:
        raise ValueError(
            f"temperature={config.temperature}: must be at least {COLDEST} in training (0 is greedy: nothing to learn)"
        )
    if config.group_size == 1 and config.reward_coef > 0:
        raise ValueError(
            f"group_size=1 with reward_coef={config.reward_coef}: a group of one has no advantage; "
            "take group_size of at least 2, or reward_coef=0"
        )
    if config.prompts_per_step % WORLD:
        raise ValueError(f"prompts_per_step={config.prompts_per_step}: must divide by the {WORLD} processes")
    if (rows := config.prompts_per_step // WORLD * config.group_size) % config.updates_per_rollout:
        raise ValueError(f"updates_per_rollout={config.updates_per_rollout}: must divide a rollout's {rows} rows")
    if (config.opd != "off") != bool(config.teacher):
        raise ValueError(f"opd={config.opd!r} with teacher={config.teacher!r}: distillation needs both, or neither")
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device='cuda': this machine has no CUDA device; use cpu or auto")
    for key in ("out_dir", "warm_dir"):
        folder = Path(getattr(config, key))
        if folder.exists() and not (folder.is_dir() and os.access(folder, os.W_OK)):
            raise ValueError(f"{key}={str(folder)!r}: must be a folder that can be written to, or not be there yet")
    task = load_task(config.task, config.tokenizer)
    warm = config.warm_iters and config.init_from in ("scratch", "resume") and not config.tokenizer
    response = max(config.max_new_tokens, task.max_response if warm else 0)
    if task.max_prompt + response > config.block_size:
        raise ValueError(
            f"max_new_tokens={config.max_new_tokens}: prompts of up to {task.max_prompt} tokens and responses (or "
            f"worked solutions) of up to {response} exceed block_size={config.block_size}"
        )
    if config.shaping_coef and not hasattr(task, "shaping"):
        raise ValueError(f"shaping_coef={config.shaping_coef}: task {config.task!r} gives no partial credit")
    if config.opd in ("vopd", "topk_kl") and config.opd_topk > task.tokenizer.vocab_size:
        raise ValueError(f"opd_topk={config.opd_topk}: must be at most the vocabulary's {task.tokenizer.vocab_size}")
    gpt_config(config, task)  # raises for a shape that cannot be
    if config.teacher.endswith(".toml"):
        if "teacher" in read_toml(config.teacher):
            raise ValueError(f"teacher={config.teacher!r}: a teacher is a warm start, so its file can name no teacher")
        teacher = load_config([config.teacher])
        if vocabulary_digest(load_task(teacher.task, teacher.tokenizer).tokenizer) != vocabulary_digest(task.tokenizer):
            raise ValueError(f"teacher={config.teacher!r}: its vocabulary is not that of task {config.task!r}")
        block_size = teacher.block_size
    elif config.teacher:
        block_size = load_model(config.teacher, task).config.block_size
    if config.teacher and task.max_prompt + config.max_new_tokens > block_size:
        raise ValueError(f"teacher={config.teacher!r}: its block_size={block_size} is too short for this run's rows")


def help_text() -> str:
    """Every key of Config with its default and its comment, from the source above: said once, shown twice."""
    lines = []
    for line in inspect.getsource(Config).splitlines()[2:]:
        if m := re.fullmatch(r"    (\w+): .+? = (.+?)(?:  # (.+))?", line):
            lines.append(f"  --{m[1] + '=' + m[2]:<46} {m[3] or ''}".rstrip())
        else:
            lines.append(f"\n{line.strip().lstrip('# ')}")
    return f"{__doc__}\n" + "\n".join(lines)


# ---------------------------------------------------------------------------------------------------------------------
# Task, model, files


def load_task(name: str, tokenizer: str = ""):
    """The module data.NAME, or the one at a dotted path; a task in plain text gets the tokenizer of a model folder.

    Raises ValueError naming the tasks there are, or saying that the task and the tokenizer do not go together.
    """
    path, module = name if "." in name else f"data.{name}", None
    if re.fullmatch(r"\w+(\.\w+)+", path):
        try:
            module = importlib.import_module(path)
        except ModuleNotFoundError as e:
            if not f"{path}.".startswith(f"{e.name}."):
                raise  # the task is there, something that it imports is not
    if not (hasattr(module, "make_problem") and hasattr(module, "reward")):
        tasks = sorted(
            p.stem for p in (Path(__file__).parent / "data").glob("*.py") if "def make_problem(" in p.read_text()
        )
        raise ValueError(f"task={name!r}: must be one of {', '.join(tasks)}, or the dotted path of a module like these")
    if hasattr(module, "tokenizer") == bool(tokenizer):
        own = f"has a vocabulary of its own: without tokenizer={tokenizer!r}, and with init_from=scratch"
        raise ValueError(f"task={name!r}: {own if tokenizer else 'is in plain text: give init_from=MODEL_FOLDER'}")
    if missing := [key for key in ("max_prompt", "max_response") if not tokenizer and not hasattr(module, key)]:
        raise ValueError(f"task={name!r}: a task with a tokenizer of its own also says its {missing[0]}, in tokens")
    if not tokenizer:
        return module
    # Prompts in plain text have no longest one; those that leave no room for the response are drawn again.
    return SimpleNamespace(max_prompt=0, max_response=0, **vars(module), tokenizer=ChatTokenizer(tokenizer))


def draw_problems(task, rng: random.Random, split: str, n: int, most: int) -> list:
    """n problems whose prompts have at most `most` tokens. Raises Halt if 100 in a row are longer."""
    problems, refused = [], 0
    while len(problems) < n:
        problem = task.make_problem(rng, split)
        if len(task.tokenizer.prompt(problem.prompt)) <= most:
            problems.append(problem)
            refused = 0
        elif (refused := refused + 1) == 100:
            raise Halt(f"{task.__name__}: 100 prompts in a row of more than block_size - max_new_tokens = {most}")
    return problems


def gpt_config(config: Config, task) -> GPTConfig:
    if config.init_from not in ("scratch", "resume"):
        return pretrained.read_config(pretrained.find_folder(config.init_from), config.block_size)
    shape = {k: getattr(config, k) for k in ("n_layer", "n_head", "n_kv_head", "n_embd", "block_size")}
    return GPTConfig(vocab_size=task.tokenizer.vocab_size, **shape)


@functools.cache
def vocabulary_digest(tokenizer) -> str:
    """Two models can be compared token by token only if every id means the same text to both."""
    words = "\0".join(tokenizer.decode([id]) for id in range(tokenizer.vocab_size))
    return hashlib.sha256(words.encode()).hexdigest()


def save_checkpoint(path: Path, **state) -> None:
    """Write tensors and plain types; whenever it is interrupted, `path` is whole, the old file or the new one.

    The file before it stays as NAME_prev.pt. Raises OSError if there is no room; both are then as they were.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")  # two runs may write one warm start
    try:
        with temporary.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        if path.is_file():
            previous = path.with_name(f"{path.stem}_prev.pt")
            previous.unlink(missing_ok=True)
            os.link(path, previous)  # a second name, so that `path` itself never goes missing
        os.replace(temporary, path)
    except (OSError, RuntimeError) as e:  # torch's writer raises the latter when a disk is full
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise OSError(f"{path}: could not be written, what was there before still is ({e})") from None


def load_checkpoint(path: str | Path) -> dict:
    """Raises ValueError if there is no whole checkpoint at `path`, naming the one before it if there is one."""
    older = Path(path).with_name(f"{Path(path).stem}_prev.pt")
    hint = f"; the one before it is {older}: rename it to go on from there" if older.is_file() else ""
    if not Path(path).is_file():
        raise ValueError(f"{path}: there is no such checkpoint{hint}")
    try:
        with zipfile.ZipFile(path) as archive:  # torch.load does not look at the checksums
            if broken := archive.testzip():
                raise ValueError(broken)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as e:  # a damaged file can fail anywhere in the reader
        raise ValueError(f"{path}: not a whole checkpoint ({type(e).__name__}){hint}") from None
    if not isinstance(state, dict) or not {"model", "gpt", "vocabulary"} <= state.keys():
        raise ValueError(f"{path}: not a checkpoint of this project")
    return state


def load_model(path: str | Path, task) -> GPT:
    """The model of a checkpoint. Raises ValueError if its vocabulary is not the task's."""
    state = load_checkpoint(path)
    if state["vocabulary"] != vocabulary_digest(task.tokenizer):
        raise ValueError(f"{path}: its vocabulary is not that of task {task.__name__.removeprefix('data.')!r}")
    model = GPT(GPTConfig(**state["gpt"]))
    model.load_state_dict(state["model"])
    return model


def load_teacher(config: Config, task, device: torch.device) -> GPT:
    """The frozen model of a checkpoint, or the warm start that a .toml describes."""
    if config.teacher.endswith(".toml"):
        teacher_config = dataclasses.replace(load_config([config.teacher]), warm_dir=config.warm_dir)
        teacher = first_model(teacher_config, load_task(teacher_config.task, teacher_config.tokenizer), device)
    else:
        teacher = load_model(config.teacher, task).to(device)
    return teacher.requires_grad_(False)


def first_model(config: Config, task, device: torch.device) -> GPT:
    """What a run starts from: a warm start, or the pretrained weights of init_from."""
    if config.init_from == "scratch":
        return warm_start(config, task, device)
    return GPT.from_pretrained(config.init_from, block_size=config.block_size).to(device)


def warm_start(config: Config, task, device: torch.device) -> GPT:
    """A model that has imitated warm_iters batches of worked solutions; kept in warm_dir under all that shaped it."""
    gpt = gpt_config(config, task)
    made_of = {k: v for k, v in vars(config).items() if k == "seed" or k in WARM_KEYS}
    here = Path(model_file.__file__)
    files = [*sorted((here.parent / "data").glob("*.py")), here]  # tasks may import each other
    files += [Path(task.__file__)] if Path(task.__file__) not in files else []
    key = hashlib.sha256(repr([*(f.read_text() for f in files), gpt, made_of]).encode()).hexdigest()[:12]
    path = Path(config.warm_dir) / f"{config.task}-{key}.pt"
    if path.is_file():
        tqdm.write(f"warm start: {path}")
        return load_model(path, task).to(device)

    model = GPT(gpt, torch.Generator().manual_seed(config.seed)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    rng = random.Random(f"warm start {config.seed}")
    for it in tqdm(range(config.warm_iters), desc="warm start", disable=None):
        for group in optimizer.param_groups:
            group["lr"] = config.warm_learning_rate * min(1, (it + 1) / 50)
        tokens, mask = solved_batch(task, rng, config.warm_batch_size)
        tokens, mask = tokens.to(device), mask.to(device)
        logits = model(tokens[:, :-1])  # (b, T-1, V)
        loss = F.cross_entropy(logits[mask[:, 1:]], tokens[:, 1:][mask[:, 1:]])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if it % 100 == 0 or it + 1 == config.warm_iters:
            tqdm.write(f"warm start {it:4d}  loss {loss.item():.3f}")
    save_checkpoint(
        path, model=model.state_dict(), gpt=dataclasses.asdict(gpt), vocabulary=vocabulary_digest(task.tokenizer)
    )
    return model


def solved_batch(task, rng: random.Random, n: int) -> tuple[Tensor, Tensor]:
    """Tokens (n,T) of n problems with their worked solutions and EOS, right-padded, and a mask (n,T) of the latter."""
    tok, rows = task.tokenizer, []
    for problem in (task.make_problem(rng, "train") for _ in range(n)):
        rows.append((tok.prompt(problem.prompt), [*tok.encode(problem.solution), tok.eos_ids[-1]]))
    tokens = torch.zeros(n, max(len(p) + len(s) for p, s in rows), dtype=torch.int64)
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    for i, (prompt, solution) in enumerate(rows):
        end = len(prompt) + len(solution)
        tokens[i, :end] = torch.tensor(prompt + solution)
        mask[i, len(prompt) : end] = True
    return tokens, mask


def rewards_of(task, problems, roll: Rollout, shaping_coef: float = 0.0) -> Tensor:
    """The verifier's reward (B,) of each row, with partial credit where it is not 1; row b answers problem b // G."""
    G = len(roll.tokens) // len(problems)
    starts, ends, rewards = roll.prompt_len.tolist(), roll.length.tolist(), []
    for b, row in enumerate(roll.tokens.tolist()):
        response = task.tokenizer.decode(row[starts[b] : ends[b]])
        reward = task.reward(problems[b // G], response)
        if shaping_coef and reward != 1:
            reward += shaping_coef * task.shaping(problems[b // G], response)
        if not isinstance(reward, int | float) or not math.isfinite(reward):
            raise ValueError(f"{task.__name__}.reward gave {reward!r} for {response!r}: it must be a finite number")
        rewards.append(float(reward))
    return torch.tensor(rewards)


def grade(model: GPT, task, problems, config: Config, **cache_options) -> Tensor:
    """Which of the problems greedy decoding with these cache options gets right: (n,) bool."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(0)  # only policy=random draws from it
    right = []
    for i in range(0, len(problems), 256):
        batch = problems[i : i + 256]
        prompts = [task.tokenizer.prompt(problem.prompt) for problem in batch]
        how = {"eos_ids": task.tokenizer.eos_ids, "temperature": 0, "generator": generator}
        with autocast(config, device):
            roll = rollout(model, prompts, 1, config.max_new_tokens, **how, **cache_options)
        right.append(rewards_of(task, batch, roll) == 1)
    return torch.cat(right)


def evaluate(model: GPT, task, config: Config) -> dict[str, float]:
    """Greedy accuracy on the same eval_problems for every run, decoding with the dense and the compressed cache."""
    rng = random.Random("eval")
    most = config.block_size - config.max_new_tokens
    problems = draw_problems(task, rng, "eval", config.eval_problems, most)
    views = {"dense": {}, "compressed": {key: getattr(config, key) for key in CACHE_KEYS}}
    return {name: grade(model, task, problems, config, **cache).float().mean().item() for name, cache in views.items()}


def adam_variance(optimizer: torch.optim.AdamW) -> float:
    """Sum over parameters of v^ - m^2, Adam's bias-corrected moments: a running estimate of the gradient's variance."""
    total = 0.0
    for group in optimizer.param_groups:
        beta1, beta2 = group["betas"]
        for state in (optimizer.state[p] for p in group["params"] if p in optimizer.state):
            m = state["exp_avg"] / (1 - beta1 ** state["step"])
            v = state["exp_avg_sq"] / (1 - beta2 ** state["step"])
            total = total + (v.sum() - m.square().sum())
    return float(total)


def draw_curves(out_dir: Path) -> None:
    """out_dir/curves.png from out_dir/log.jsonl, if matplotlib is installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return
    rows = [json.loads(line) for line in (out_dir / "log.jsonl").read_text().splitlines()]
    panels = [("reward", "mean reward", "linear"), ("gap_max", "largest |learner - sampler| logp, nats", "log")]
    panels += [("grad_norm", "gradient norm", "linear"), ("completion_len", "response length, tokens", "linear")]
    figure = Figure(figsize=(10, 6), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (key, label, scale) in zip(figure.subplots(2, 2).flat, panels, strict=True):
        axes.plot([row["step"] for row in rows], [row[key] for row in rows], color="black", linewidth=1)
        axes.set(xlabel="step", ylabel=label, yscale=scale)
    figure.savefig(out_dir / "curves.png", dpi=120)


# ---------------------------------------------------------------------------------------------------------------------
# The loop


def over_ranks(values: dict[str, float | Tensor], device: torch.device) -> dict[str, float]:
    """Each value added up over all processes; of those called ..._max the largest. One wait for the device."""
    packed = torch.stack([torch.as_tensor(value, dtype=torch.float64, device=device) for value in values.values()])
    if WORLD > 1:
        most = packed.clone()
        dist.all_reduce(packed)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        largest = torch.tensor([name.endswith("_max") for name in values], device=device)
        packed = torch.where(largest, most, packed)
    return dict(zip(values, packed.tolist(), strict=True))


def collect(total: dict, more: dict) -> None:
    """Add statistics (0-dim tensors, so that nobody waits for the device) to `total`; ..._max keeps the largest."""
    for name, value in more.items():
        if name not in total:
            total[name] = value
        else:
            total[name] = torch.maximum(total[name], value) if name.endswith("_max") else total[name] + value


def autocast(config: Config, device: torch.device):
    return torch.autocast(device.type, torch.bfloat16, enabled=config.dtype == "bfloat16")


def states_of(body: Callable, batch: Rollout, masked: bool, config: Config) -> Tensor:
    """Hidden states (n,C) that predict the n response tokens of a batch, row by row; body: a model's `hidden`.

    The last token is not fed, as in the sampler.
    """
    with autocast(config, batch.tokens.device):
        if config.share_prompts:
            shared = SharedPrompts(batch, masked)
            return body(shared.tokens, cache=shared)
        x = body(batch.tokens[:, :-1], batch.evicted_at[..., :-1] if masked else None)  # (b, T-1, C)
        return x[batch.response_mask[:, 1:]]


def logits_of(net: GPT, states: Tensor, config: Config) -> Tensor:
    with autocast(config, states.device):
        return net.head(states)  # (n, V)


@torch.no_grad()
def score(model: GPT, teacher: GPT | None, roll: Rollout, config: Config) -> tuple[Tensor, Tensor, dict]:
    """What the weights that sampled, under the learner's view, and the teacher say of a rollout.

    Returns the student's logp (B,T-1), the advantages of distillation (B,T-1), 0 without any, and statistics. A state
    is scored with the student that sampled; the teacher sees everything.
    """
    mask = roll.response_mask[:, 1:]  # (B, T-1)
    logp, opd = torch.zeros(2, *mask.shape, device=mask.device)  # (B, T-1) each
    stats = {}
    for rows in torch.arange(len(mask), device=mask.device).split(config.micro_batch_size):
        batch = roll.select(rows)
        m = batch.response_mask[:, 1:]  # (b, t)
        columns = [
            batch.tokens[:, 1:][m],
            states_of(model.hidden, batch, config.method == "smd", config),
        ]  # (n,), (n, C)
        if teacher:
            columns.append(states_of(teacher.hidden, batch, masked=False, config=config))
        new_logp, new_opd = [], []
        for targets, states, *tutor_states in zip(*(c.split(config.head_chunk) for c in columns), strict=True):
            student = logits_of(model, states, config)  # (c, V)
            new_logp.append(losses.token_logprobs(student, targets, config.temperature))
            if teacher:
                tutor = logits_of(teacher, tutor_states[0], config)  # (c, V)
                collect(stats, {"opd_kl": losses.reverse_kl(student, tutor, temperature=config.temperature).sum()})
                if config.opd in OPD:
                    new_opd.append(OPD[config.opd](student, tutor, targets, states, config))
        for x, new in ((logp, new_logp), (opd, new_opd)):
            if new:
                x[rows[0] : rows[-1] + 1, : m.shape[1]][m] = torch.cat(new)
    if config.opd == "mean":
        total = over_ranks({"r": opd.sum(), "tokens": mask.sum()}, mask.device)
        opd = (opd - losses.other_rows_mean(opd, mask, total["r"], total["tokens"])) * mask
    if teacher:
        stats |= {"opd_adv": opd.sum(), "opd_adv_sq": opd.square().sum()}
    return logp, opd, stats


def add_gradients(
    model: GPT, learner: Callable, teacher: GPT | None, batch: Rollout, given: list[Tensor], normalizer, config: Config
) -> dict:
    """Forward and backward of one micro-batch; adds to the gradients of `model`, returns sums of statistics.

    given: old logp, advantage and weight of the batch's n response tokens, (n,) each. learner: model.hidden, perhaps
    compiled. normalizer: the response tokens of the whole optimiser step; all terms of the loss are sums over it.
    """
    masked, tau, direct = config.method == "smd", config.temperature, config.opd in DIRECT
    track_b = masked and config.smd_lambda > 0
    views = [states_of(learner, batch, masked, config)]  # (n, C) each
    if track_b:
        with torch.set_grad_enabled(config.smd_track_b == "masked_teaches_dense"):
            views.append(states_of(learner, batch, masked=False, config=config))
    if direct:
        with torch.no_grad():
            views.append(states_of(teacher.hidden, batch, masked=False, config=config))
    # The loss is a sum over tokens, so a chunk of tokens is a micro-batch of the head: its logits (c, V) are gone
    # before the next chunk's come, and what it owes the body is added up in leaf.grad.
    leaves = [x.detach().requires_grad_(x.requires_grad) for x in views]
    columns = [batch.tokens[:, 1:][batch.response_mask[:, 1:]], *given, *leaves]
    ppo = {"clip": config.clip, "clip_high": config.clip_high or config.clip, "normalizer": normalizer}
    smd = {"lam": config.smd_lambda, "track_b": config.smd_track_b, "temperature": tau}
    total = {}
    for targets, old, advantage, weight, *states in zip(*(c.split(config.head_chunk) for c in columns), strict=True):
        logits = logits_of(model, states[0], config)  # (c, V)
        every = torch.ones_like(targets, dtype=torch.bool)  # no padding is left among the tokens
        if masked:
            dense = logits_of(model, states[1], config) if track_b else None  # (c, V)
            loss, stats = losses.smd_loss(logits, dense, targets, old, advantage, every, **ppo, **smd)
        else:
            logp = losses.token_logprobs(logits, targets, tau)  # (c,)
            loss, stats = losses.grpo_loss(logp, old, advantage, every, weights=weight, **ppo)
        if direct:
            k = config.opd_topk if config.opd == "topk_kl" else 0
            kl = losses.reverse_kl(logits, logits_of(teacher, states[-1], config), temperature=tau, k=k).sum()
            loss = loss + config.opd_coef * kl / normalizer
        loss.backward()
        with torch.no_grad():
            collect(total, stats | {"entropy": losses.entropy(logits, tau).sum(), "loss": loss.detach()})
    for x, leaf in zip(views, leaves, strict=True):
        if x.requires_grad:
            x.backward(leaf.grad)
    return total


def train(config: Config, stop: list | None = None) -> dict:
    """Run a checked `config`; writes out_dir/{log.jsonl, summary.json, curves.png, ckpt.pt}, returns the summary.

    When `stop` is no longer empty, the step in flight is finished and saved, and that is the end. Under torchrun every
    process samples its share of the prompts and the gradients are added up; process 0 evaluates and writes.
    """
    use_cuda = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if use_cuda else torch.device("cpu")
    if WORLD > 1 and not dist.is_initialized():  # the others wait for process 0's evaluations: that is no failure
        dist.init_process_group("nccl" if use_cuda else "gloo", timeout=timedelta(hours=2))
        if use_cuda:
            torch.cuda.set_device(device)
    task, out_dir = load_task(config.task, config.tokenizer), Path(config.out_dir)
    tok = task.tokenizer
    cache_options = {} if config.method == "dense" else {key: getattr(config, key) for key in CACHE_KEYS}
    rng = random.Random(f"problems {config.seed}")
    generator = torch.Generator(device).manual_seed(config.seed + RANK)  # sampling, random eviction, the order of rows
    resumed = load_checkpoint(out_dir / "ckpt.pt") if config.init_from == "resume" else None
    start_time, stop = time.time(), [] if stop is None else stop

    for turn in range(2):  # process 0 first: it may have to make the warm start that the others then read
        if turn == min(RANK, 1):
            model = load_model(out_dir / "ckpt.pt", task).to(device) if resumed else first_model(config, task, device)
            teacher = load_teacher(config, task, device) if config.teacher else None
        if WORLD > 1:
            dist.barrier()
    model.recompute = config.recompute
    learner = torch.compile(model.hidden, dynamic=True) if config.compile else model.hidden
    optimizer = torch.optim.AdamW(
        model.parameters(), config.learning_rate, betas=(0.9, 0.95), weight_decay=config.weight_decay, fused=True
    )
    summary = {"config": vars(config), "seed": config.seed, "parameters": sum(p.numel() for p in model.parameters())}
    summary |= {"gap_max": 0.0, "skipped_steps": 0, "bad_steps_in_a_row": 0, "seconds": 0.0}
    first_step = 0
    if resumed:
        optimizer.load_state_dict(resumed["optimizer"])
        for group in optimizer.param_groups:
            group["lr"], group["weight_decay"] = config.learning_rate, config.weight_decay
        version, internal, gauss = resumed["rng"]
        rng.setstate((version, tuple(internal), gauss))
        first_step, states = resumed["step"], resumed["generators"]  # a row a process
        if states.shape == (WORLD, len(generator.get_state())):
            generator.set_state(states[RANK].clone())  # a view would be read from the first row on
        else:  # the state of another kind of device, or of other ranks, says nothing here
            generator.manual_seed(config.seed + RANK + 1000 * first_step)
            tqdm.write("resume: other devices or another number of them: sampling goes on from a new seed")
        summary |= resumed["summary"] | {"config": vars(config)}
    seconds_before = summary["seconds"]

    def run_eval(when: str) -> dict:
        accuracy = evaluate(model, task, config)
        tqdm.write(f"eval {when}: " + ", ".join(f"{view} {right:.3f}" for view, right in accuracy.items()))
        return accuracy

    def save(step: int) -> None:
        mine = generator.get_state().to(device)  # (bytes,)
        states = [torch.empty_like(mine) for _ in range(WORLD)] if WORLD > 1 else [mine]
        if WORLD > 1:
            dist.all_gather(states, mine)
        if RANK > 0:
            return
        summary["seconds"] = seconds_before + time.time() - start_time
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "rng": rng.getstate()}
        state |= {"generators": torch.stack(states).cpu(), "config": vars(config), "summary": summary}
        state |= {"gpt": dataclasses.asdict(model.config), "vocabulary": vocabulary_digest(tok)}
        save_checkpoint(out_dir / "ckpt.pt", **state)

    if config.eval_only:
        return summary | {"eval": {"only": run_eval("only")}}
    if not resumed:
        summary["eval"] = {"before": run_eval("before")} if RANK == 0 else {}
    log_path = out_dir / "log.jsonl"
    kept_rows = []
    if resumed and log_path.is_file():  # a kill can leave rows after the checkpoint, and half of one
        lines = [line for line in log_path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        kept_rows = [line for line in lines if json.loads(line)["step"] < first_step]

    for step in tqdm(range(first_step, config.max_iters), desc="GRPO", disable=None if RANK == 0 else True):
        clock = [time.perf_counter()]

        # 1. Roll out: G samples of each prompt, with what each query saw on record.
        most = config.block_size - config.max_new_tokens
        problems = draw_problems(task, rng, "train", config.prompts_per_step, most)[RANK::WORLD]
        prompts = [tok.prompt(problem.prompt) for problem in problems]
        how = {"eos_ids": tok.eos_ids, "temperature": config.temperature, "generator": generator}
        with autocast(config, device):
            roll = rollout(model, prompts, config.group_size, config.max_new_tokens, **how, **cache_options)
        B, T = roll.tokens.shape
        mask, sampler_logp = roll.response_mask[:, 1:], roll.logp[:, 1:]  # (B, T-1) aligned with the logits
        clock.append(time.perf_counter())

        # 2. Reward, and 3. advantage: how much better than the other samples of the same prompt.
        rewards = rewards_of(task, problems, roll, config.shaping_coef).to(device)  # (B,)
        advantages = config.reward_coef * losses.group_advantages(rewards, config.group_size, config.adv_scale)
        advantages = advantages[:, None].expand(B, T - 1)  # (B, T-1)

        # What is reported of a step: sums over tokens and rows, and largest values, of all processes together.
        stats = {"tokens": mask.sum(), "rows": B, "reward": rewards.sum(), "finished": roll.finished.sum()}
        stats |= {"kv_bytes": roll.kv_bytes, "kv_bytes_dense": roll.kv_bytes_dense, "policy_bytes": roll.policy_bytes}
        stats |= {"stop": len(stop)}

        # 4. Score the rollout before the weights move: the full view's old policy, the teacher's opinion.
        old_logp, weights = sampler_logp, torch.ones_like(sampler_logp)
        if config.method in RESCORED or teacher:
            student_logp, opd_advantages, more = score(model, teacher, roll, config)
            advantages = advantages + config.opd_coef * opd_advantages
            collect(stats, more)
        if config.method in RESCORED:
            old_logp = student_logp
            gap = (old_logp - sampler_logp).abs()[mask]
            stats |= {"gap_max": gap.max(), "gap_sum": gap.sum()}
        if config.method in ("importance", "sparse_rl"):
            mode = "sparse_rl" if config.method == "sparse_rl" else config.importance_mode
            weights, more = losses.importance_weights(old_logp, sampler_logp, mask, mode)  # (B, T-1)
            del more["rows"]
            collect(stats, more)
        clock.append(time.perf_counter())

        # 5. Loss: micro-batches add up under one normaliser, the response tokens of the optimiser step.
        order = torch.arange(B, device=device)
        if config.updates_per_rollout > 1:
            order = torch.randperm(B, generator=generator, device=device)
        skipped = None  # why an update was, if one was
        for update, update_rows in enumerate(order.chunk(config.updates_per_rollout)):
            live = weights[update_rows] * mask[update_rows]  # (b, T-1)
            share = {"tokens": mask[update_rows].sum(), "live": (live > 0).sum(), "live_sum": live.sum()}
            share = over_ranks(share, device)
            if config.method == "sparse_rl":  # their mean over the unvetoed tokens of the optimiser step becomes 1
                weights[update_rows] *= share["live"] / max(share["live_sum"], 1e-12)
            optimizer.zero_grad(set_to_none=True)
            for rows in update_rows.split(config.micro_batch_size):
                batch = roll.select(rows)
                m = batch.response_mask[:, 1:]  # (b, t)
                given = [x[rows, : m.shape[1]][m] for x in (old_logp, advantages, weights)]  # (n,) each
                more = add_gradients(model, learner, teacher, batch, given, share["tokens"], config)
                if update > 0 or config.method in RESCORED:  # only before the first update is it the sampler's equal
                    del more["gap_max"], more["gap_sum"]
                collect(stats, more)
            if WORLD > 1:
                for p in model.parameters():
                    dist.all_reduce(p.grad)

            exact = config.method in ("dense", "smd") and config.dtype == "float32"
            tolerance = 1e-4 * max(1, 1 / config.temperature)  # logits are divided by it, and their rounding with them
            if step == 0 and update == 0 and exact and stats["gap_max"] > tolerance:
                raise Halt(
                    f"the learner scores the sampler's tokens {stats['gap_max']:.2e} nats off before any update, "
                    f"{tolerance} is allowed: positions, temperature, mask or shift of the two sides differ"
                )

            # 6. Step, unless something is not finite, or every sequence was vetoed (Adam's momentum would still move).
            grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
            collect(stats, {"grad_norm_max": grad_norm})
            finite = math.isfinite(grad_norm)  # the gradients were added up: it is the same on every process
            if finite and (share["live"] > 0 or config.opd in DIRECT):
                optimizer.step()
            else:
                skipped = "every sequence was vetoed" if finite else "the gradient is not finite"
                summary["skipped_steps"] += 1
            summary["bad_steps_in_a_row"] = 0 if finite else summary["bad_steps_in_a_row"] + 1
            if summary["bad_steps_in_a_row"] >= config.max_bad_steps:
                raise Halt(
                    f"step {step}: {config.max_bad_steps} updates in a row had a gradient that is not finite. None of "
                    f"them was taken; {out_dir / 'ckpt.pt'}, if it is there, is from before. Try a lower learning_rate "
                    "or grad_clip, or dtype=float32"
                )

        # 7. One row for the file, one line for the eye.
        stats = over_ranks(stats, device)
        clock.append(time.perf_counter())
        tokens, n = stats["tokens"], stats["rows"]
        row = {"step": step, "reward": stats["reward"] / n, "completion_len": tokens / n}
        row |= {"gap_mean": stats["gap_sum"] / tokens, "gap_max": stats["gap_max"], "ratio_max": stats["ratio_max"]}
        row |= {"grad_norm": stats["grad_norm_max"]}
        row |= {name: int(stats[name]) for name in ("kv_bytes", "kv_bytes_dense", "policy_bytes")}
        if "seq_sum" in stats:
            row |= {"weight_mean": stats["weight_sum"] / max(stats["weight_count"], 1)}
            row |= {"weight_max": stats["weight_max"], "vetoed": stats["vetoed"] / n}
            row["ess"] = stats["seq_sum"] ** 2 / stats["seq_sq_sum"] / n
        if teacher:
            variance = stats["opd_adv_sq"] / tokens - (stats["opd_adv"] / tokens) ** 2
            row |= {"opd_kl": stats["opd_kl"] / tokens, "opd_adv_std": max(variance, 0) ** 0.5}
        row |= {"clip_frac": stats["clipped"] / tokens, "grad_var_adam": adam_variance(optimizer)}
        row |= {"loss": stats["loss"], "kd": stats.get("kd", 0.0) / tokens, "push_down": stats["push_down"] / tokens}
        row |= {"entropy": stats["entropy"] / tokens, "finished": stats["finished"] / n}
        row |= {"skipped": skipped} if skipped else {}
        row |= {"rollout_tok_s": tokens / (clock[1] - clock[0]), "learn_tok_s": tokens / (clock[-1] - clock[1])}
        row["seconds"] = clock[-1] - clock[0]
        summary["gap_max"] = max(summary["gap_max"], row["gap_max"])
        summary["kv_bytes"], summary["kv_bytes_dense"] = row["kv_bytes"], row["kv_bytes_dense"]
        done = step + 1
        last = done == config.max_iters or stats["stop"] > 0
        if RANK == 0:
            if done == config.max_iters or (config.eval_interval and done % config.eval_interval == 0):
                row["eval"] = summary["eval"]["after"] = run_eval(f"after step {done}")
            if step == first_step:  # a whole step has worked: only now does an older run in out_dir give way
                log_path.write_text("".join(kept_rows))
                for name in ("ckpt.pt", "ckpt_prev.pt", "summary.json", "curves.png") if not resumed else ():
                    (out_dir / name).unlink(missing_ok=True)
            with log_path.open("a") as log:
                log.write(json.dumps(row) + "\n")
            tqdm.write(
                f"step {step:4d}  reward {row['reward']:.3f}  len {row['completion_len']:.1f}  "
                f"gap {row['gap_max']:.1e}  ratio {row['ratio_max']:.2f}  clip {row['clip_frac']:.3f}  "
                f"|g| {row['grad_norm']:.2f}  kv {row['kv_bytes'] / row['kv_bytes_dense']:.0%}  "
                f"tok/s {row['rollout_tok_s']:.0f}/{row['learn_tok_s']:.0f}"
                + (f"  skipped: {skipped}" if skipped else "")
            )
        if last or done % config.save_interval == 0:
            save(done)
        if last:
            break

    if RANK == 0:
        summary["seconds"] = seconds_before + time.time() - start_time
        (out_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        draw_curves(out_dir)
    return summary


def main(argv: list[str]) -> None:
    if "--help" in argv or "-h" in argv:
        print(help_text())
        return
    stop = []

    def finish(number: int, _) -> None:
        stop.append(number)
        signal.signal(number, signal.SIG_DFL)
        tqdm.write("stopping after this step; once more stops at once")

    try:
        config = load_config(argv)
        for folder in (config.warm_dir,) if config.eval_only else (config.out_dir, config.warm_dir):
            Path(folder).mkdir(parents=True, exist_ok=True)  # now, not after minutes of work
    except (ValueError, OSError) as e:
        sys.exit(f"error: {e}")
    before = {number: signal.signal(number, finish) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        train(config, stop)
        if WORLD > 1:  # joins gloo's threads: one that outlives the interpreter aborts the process at exit
            dist.destroy_process_group()
    except (Halt, OSError) as e:  # anything else is a fault of the code, whose traceback is wanted
        sys.exit(f"error: {e}")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    main(sys.argv[1:])
