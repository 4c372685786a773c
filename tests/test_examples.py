"""The forks in examples/: each registers itself, trains for three steps, and does what it claims."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from util import NEVER, rng, tiny

import train
from kv_compress import POLICIES, rollout

ROOT = Path(__file__).parent.parent
SMALL = ["--warm_iters=5", "--warm_batch_size=4", "--prompts_per_step=4", "--eval_problems=8", "--max_iters=3"]


@pytest.fixture(autouse=True)
def as_before():
    """What an example registers is gone after its test."""
    before = [(registry, dict(registry)) for registry in (POLICIES, train.OPD)]
    yield
    for registry, entries in before:
        registry.clear()
        registry.update(entries)


def run(tmp_path, *command):
    folders = [f"--out_dir={tmp_path / 'out'}", f"--warm_dir={tmp_path / 'warm'}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command, *SMALL, *folders], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    return rows, json.loads((tmp_path / "out" / "summary.json").read_text())["config"]


@pytest.mark.slow
def test_the_policy_trains_and_evicts_for_all_heads_alike(tmp_path):
    rows, config = run(tmp_path, "-m", "examples.tova", "--kv_budget=20")
    assert len(rows) == 3 and config["policy"] == "tova" and all(row["gap_max"] < 1e-4 for row in rows)

    from examples import tova

    assert POLICIES["tova"] is tova.tova
    options = {"policy": "tova", "kv_budget": 8, "sinks": 0, "recent": 1, "pool": 1}
    r = rollout(tiny(3), [[1, 5, 2, 9, 11, 4, 8, 8, 3, 6]], 2, 8, eos_ids=[], generator=rng(0), **options)
    assert (r.evicted_at != NEVER).any() and (r.evicted_at == r.evicted_at[:, :, :1]).all()


@pytest.mark.slow
def test_the_task_trains(tmp_path):
    rows, config = run(tmp_path, "train.py", "--task=examples.sort", "--share_prompts=false")
    assert len(rows) == 3 and config["task"] == "examples.sort"
    from examples import sort

    problem = sort.make_problem(random.Random(0), "train")
    assert sort.reward(problem, problem.solution) == 1 and sort.reward(problem, problem.solution[2:]) == 0
    assert max(map(len, map(sort.tokenizer.encode, (problem.prompt, problem.solution)))) == sort.max_prompt


@pytest.mark.parametrize("name", ["examples.nothing", "losses.nothing", "os.path", ".recall", "../recall", ""])
def test_a_task_that_is_not_there_is_named(name):
    with pytest.raises(ValueError, match=f"task='{name}'.*dotted path"):
        train.load_task(name)


def test_a_task_that_does_not_say_how_long_it_gets_is_refused(monkeypatch):
    from examples import sort

    monkeypatch.delattr(sort, "max_response")
    with pytest.raises(ValueError, match=r"task='examples\.sort': .* its max_response, in tokens"):
        train.load_task("examples.sort")


@pytest.mark.slow
def test_the_critic_trains_and_learns_what_a_linear_function_can(tmp_path):
    (tmp_path / "teacher.toml").write_text('task = "spellings_teacher"\nwarm_iters = 5\nwarm_batch_size = 4\n')
    rows, config = run(tmp_path, "-m", "examples.critic", "config/vopd.toml", f"--teacher={tmp_path / 'teacher.toml'}")
    assert len(rows) == 3 and config["opd"] == "critic"  # whatever the file says
    assert all(row["opd_adv_std"] > 0 for row in rows)

    from examples import critic

    g = rng(0)
    student, direction, config = torch.zeros(400, 2), torch.randn(6, generator=g), train.Config()
    left = []
    for _ in range(6):  # r is linear in the state and a noise of .1; tokens 0 alone
        states = torch.randn(400, 6, generator=g)
        wanted = states @ direction - 9 + 0.1 * torch.randn(400, generator=g)
        tutor = torch.stack((wanted, torch.zeros(400)), dim=1)  # log q(0) is wanted - log(1 + e^wanted): near wanted
        left.append(critic.critic(student, tutor, torch.zeros(400, dtype=torch.int64), states, config).abs().mean())
    assert left[0] > 5 and left[-1] < 0.1  # the first chunk is judged by a critic that knows nothing
