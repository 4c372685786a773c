"""What the README shows, names, counts and tells to type is so."""

import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_picture_is_what_its_code_prints(capsys):
    code = re.search(r"```python\n(.+?)```", README, re.DOTALL)[1]
    exec(compile(code, "README.md", "exec"), {})
    shown = re.search(r"```\n(# \..+?)```", README, re.DOTALL)[1]
    assert capsys.readouterr().out.splitlines() == [re.match(r"[#. ]+[#.]", line)[0] for line in shown.splitlines()]


def test_every_function_of_the_table_of_pictures_is_there():
    table = README.split("| picture |")[1].split("\n\n")[0]
    names = re.findall(r"\| `(\w+)\.(\w+)` \|$", table, re.MULTILINE)
    assert len(names) == table.count("\n") - 1 >= 9  # a name a row, less the head and the rule
    for module, name in names:
        assert hasattr(importlib.import_module(module), name)


def test_the_map_counts_lines():
    counted = re.findall(r"\| `([\w./]+)` \| (\d+) \|", README)
    assert {"model.py", "kv_compress.py", "losses.py", "kernels.py", "train.py"} <= {name for name, _ in counted}
    for name, lines in counted:
        assert len((ROOT / name).read_text().splitlines()) == int(lines), name


def test_links_lead_to_files():
    for text, folder in ((README, ROOT), ((ROOT / "experiments" / "README.md").read_text(), ROOT / "experiments")):
        for link in re.findall(r"\]\(([^)#]+)\)", text):
            assert link.startswith("https://arxiv.org/") or (folder / link).exists(), link


def commands():
    """Lines of the README's blocks that can be typed, without the explanation behind them."""
    blocks = re.findall(r"^```\n(.+?)^```", README, re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines() if re.match(r"pip |python |torchrun ", line)]
    lines += re.findall(r"`((?:python|torchrun) [^`]+)`", README)
    return list(dict.fromkeys(re.split(r"   +", line)[0].strip() for line in lines))


SMALL = ["--warm_iters=5", "--warm_batch_size=4", "--prompts_per_step=4", "--eval_problems=8", "--max_iters=2"]
ELSEWHERE = (
    "pip ",
    "python -m pytest",
    "python -m experiments.",
)  # CI types the first two; tests of their own the last


@pytest.mark.slow
def test_every_command_of_the_readme_runs(tmp_path):
    """In a fresh copy, from top to bottom; training is made short by options behind what is written."""
    subprocess.run(["git", "clone", "-q", str(ROOT), str(tmp_path / "copy")], check=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    ran = [command for command in commands() if not command.startswith(ELSEWHERE)]
    assert len(ran) > 8
    for i, command in enumerate(["python train.py", *ran]):  # the first stands in the block with pip
        words = shlex.split(command)
        if words[0] == "torchrun" or "train.py" in words or words[2].startswith("examples."):
            words += [] if "--help" in words else [*SMALL[:-1], f"--max_iters={i + 2}"]
        done = subprocess.run(words, cwd=tmp_path / "copy", env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
