"""Hurt running jobs on purpose, and count what is lost.

    python -m experiments.faults            thirty kills and the rest; about ten minutes; prints a table
    python -m experiments.faults --kills=3  fewer; what the tests run

Every job is `train.py` itself in a process of its own, tiny, with a checkpoint after every step (so that many kills
fall into a save) and policy=random (so that every generator counts). A killed run is resumed until it is through, and
must then be bit for bit the run that nobody touched.
"""

import json
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import train

ROOT = Path(__file__).parent.parent
TINY = {"n_embd": 32, "warm_iters": 3, "warm_batch_size": 8, "prompts_per_step": 4, "group_size": 4}
TINY |= {"eval_problems": 8, "device": "cpu", "policy": "random", "kv_budget": 14, "save_interval": 1}


def start(folder: Path, limits=None, **options) -> subprocess.Popen:
    """train.py in a process of its own, its output in a pipe."""
    options = TINY | {"out_dir": folder / "run", "warm_dir": folder / "warm"} | options
    command = [sys.executable, "train.py", *(f"--{key}={value}" for key, value in options.items())]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=limits
    )


def finish(process: subprocess.Popen) -> str:
    """Wait for it; returns what it wrote. Raises RuntimeError if it failed."""
    output, _ = process.communicate(timeout=300)
    if process.returncode:
        raise RuntimeError(f"exit {process.returncode}: {output[-2000:]}")
    return output


def rows(folder: Path) -> list[dict]:
    """The log without what a clock wrote; half a row at its end is none."""
    lines = (folder / "run" / "log.jsonl").read_text().splitlines(keepends=True)
    clocks = ("seconds", "rollout_tok_s", "learn_tok_s")
    return [{k: v for k, v in json.loads(x).items() if k not in clocks} for x in lines if x.endswith("\n")]


def same(a: Path, b: Path) -> bool:
    """Two finished runs are the same: weights, optimiser, generators and log."""
    one, other = (train.load_checkpoint(folder / "run" / "ckpt.pt") for folder in (a, b))
    for state in (one, other):  # where the run was, and how long it took
        del state["config"], state["summary"]["config"], state["summary"]["seconds"]
    return equal(one, other) and rows(a) == rows(b)


def equal(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return a == b


def kills(folder: Path, n: int, seed: int = 0) -> dict:
    """Kill a run n times at random moments, resuming it each time; then let it finish and compare."""
    whole, hurt, rng, steps = folder / "whole", folder / "hurt", random.Random(seed), 20 * n
    for f in (whole, hurt):
        f.mkdir()
    finish(start(whole, max_iters=steps))
    lost, in_save, checkpoint = [], 0, hurt / "run" / "ckpt.pt"
    for k in range(n):
        process = start(hurt, max_iters=steps, init_from="resume" if checkpoint.is_file() else "scratch")
        first = len(rows(hurt)) if (hurt / "run" / "log.jsonl").is_file() else 0
        log = hurt / "run" / "log.jsonl"
        while process.poll() is None and (not log.is_file() or len(log.read_text().splitlines()) <= first):
            time.sleep(0.01)  # import and warm start write nothing: wait for a step of this life
        time.sleep(rng.uniform(0, 0.25) if k % 5 else 0)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        temporary = list((hurt / "run").glob("*.tmp"))
        in_save += bool(temporary)
        for file in temporary:
            file.unlink()
        if checkpoint.is_file():
            lost.append(len(rows(hurt)) - train.load_checkpoint(checkpoint)["step"])  # raises if it is not whole
    finish(start(hurt, max_iters=steps, init_from="resume"))
    return {"kills": n, "in a save": in_save, "most steps lost": max(lost, default=0), "same": same(whole, hurt)}


def damage(folder: Path) -> dict[str, str]:
    """Truncate, flip a bit of, and empty a checkpoint: what a resume then says, and whether the older one goes on."""
    finish(start(folder, max_iters=3))
    path, older = folder / "run" / "ckpt.pt", folder / "run" / "ckpt_prev.pt"
    good, before, said = path.read_bytes(), older.read_bytes(), {}
    flipped = bytearray(good)
    flipped[len(good) // 2] ^= 1
    for how, data in {"truncated": good[:-1000], "bit flipped": bytes(flipped), "empty": b""}.items():
        path.write_bytes(data)
        process = start(folder, max_iters=4, init_from="resume")
        said[how] = process.communicate()[0].strip()
        if process.returncode != 1 or said[how].count("\n"):
            raise RuntimeError(f"{how}: exit {process.returncode}: {said[how]}")
        older.rename(path)
        finish(start(folder, max_iters=4, init_from="resume"))
        path.write_bytes(good)
        older.write_bytes(before)
    return said


def full_disk(folder: Path) -> str:
    """No file may grow beyond 100 kB, from the start of a resumed run: a save cannot succeed. Returns what it says."""
    finish(start(folder, max_iters=2))
    path = folder / "run" / "ckpt.pt"
    good = path.read_bytes()
    limit = (100_000, 100_000)
    process = start(folder, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit), max_iters=4, init_from="resume")
    said = process.communicate()[0].strip().splitlines()[-1]
    if process.returncode != 1 or path.read_bytes() != good or list(path.parent.glob("*.tmp")):
        raise RuntimeError(f"exit {process.returncode}: {said}")
    finish(start(folder, max_iters=4, init_from="resume"))
    return said


def stops(folder: Path) -> dict:
    """One SIGTERM: the step in flight is saved, exit 0, and the rest gives the untouched run. Two: at once."""
    whole, hurt = folder / "whole", folder / "hurt"
    for f in (whole, hurt):
        f.mkdir()
    finish(start(whole, max_iters=30))
    process = start(hurt, max_iters=30, save_interval=1000)
    log = hurt / "run" / "log.jsonl"
    while process.poll() is None and not log.is_file():
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    finish(process)
    lost = len(rows(hurt)) - train.load_checkpoint(hurt / "run" / "ckpt.pt")["step"]
    finish(start(hurt, max_iters=30, init_from="resume"))
    again = start(folder, max_iters=100_000, save_interval=10**6, prompts_per_step=1024)  # steps of some seconds
    while again.poll() is None and not (folder / "run" / "log.jsonl").is_file():
        time.sleep(0.01)
    again.send_signal(signal.SIGTERM)
    time.sleep(0.3)  # two signals at once could arrive as one
    again.send_signal(signal.SIGTERM)
    again.communicate(timeout=60)
    return {"steps lost": lost, "same": same(whole, hurt), "exit code of two": again.returncode}


def main(argv):
    n = int(argv[0].removeprefix("--kills=")) if argv else 30
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name) / what for what in ("kills", "damage", "disk", "term")]
        for folder in folders:
            folder.mkdir()
        k, said = kills(folders[0], n), damage(folders[1])
        disk, term = full_disk(folders[2]), stops(folders[3])
    print("| injected | times | lost | afterwards |\n|---|---|---|---|")
    print(
        f"| SIGKILL at a random moment, a checkpoint a step | {k['kills']}, {k['in a save']} in a save | "
        f"{k['most steps lost']} steps at most | {'bit for bit the untouched run' if k['same'] else 'DIFFERS'} |"
    )
    same = "bit for bit the untouched run" if term["same"] else "DIFFERS"
    print(f"| SIGTERM | 1 | {term['steps lost']} steps | exit 0, saved, resumed: {same} |")
    for how in said:
        print(
            f"| checkpoint {how} | 1 | what the previous one had not | one line names the older file, which goes on |"
        )
    print("| no room for a checkpoint | 1 | steps since the last one | one line; the last checkpoint is intact |")
    print(f"\n{disk}\n" + "\n".join(said.values()))


if __name__ == "__main__":
    main(sys.argv[1:])
