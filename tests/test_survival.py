"""A run that is stopped, killed, hurt or split over processes: nothing but the step in flight is lost."""

import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_train import TINY, run  # noqa: F401  (a fixture)

import train
from data import recall, spellings
from experiments import faults

ROOT = Path(__file__).parent.parent


# ---- stop and resume -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"policy": "random", "kv_budget": 14}, {"opd": "vopd"}, {"dtype": "bfloat16"}])
def test_ten_steps_are_four_and_six(run, tmp_path, options):  # noqa: F811
    """Weights, optimiser, generators and log, bit for bit, with evaluations on both sides of the cut."""
    if "opd" in options:
        run("teacher", max_iters=1, seed=7)
        options = options | {"teacher": tmp_path / "teacher" / "ckpt.pt"}
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    run("a/run", max_iters=10, eval_interval=3, **options)
    run("b/run", max_iters=4, eval_interval=3, **options)
    run("b/run", max_iters=10, eval_interval=3, init_from="resume", **options)
    for log in (faults.rows(tmp_path / "a"), faults.rows(tmp_path / "b")):
        assert [row["step"] for row in log] == list(range(10))
        assert [row["step"] for row in log if "eval" in row] in ([2, 5, 8, 9], [2, 3, 5, 8, 9])
    one, other = (train.load_checkpoint(tmp_path / name / "run" / "ckpt.pt") for name in "ab")
    assert all(faults.equal(one[key], other[key]) for key in ("model", "optimizer", "step", "rng", "generators"))
    rows = [[{k: v for k, v in row.items() if k != "eval"} for row in faults.rows(tmp_path / n)] for n in "ab"]
    assert rows[0] == rows[1]
    run("c", max_iters=10, seed=2)
    assert not faults.equal(one["model"], train.load_checkpoint(tmp_path / "c" / "ckpt.pt")["model"])


def test_what_changed_is_said(run, capsys):  # noqa: F811
    run("a", max_iters=1)
    capsys.readouterr()
    run("a", max_iters=2, init_from="resume", learning_rate=1e-3, policy="h2o")
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("resume: ")]
    assert said == [
        "resume: max_iters=2 from here on, 1 before",
        "resume: learning_rate=0.001 from here on, 0.0002 before",
        "resume: policy='h2o' from here on, 'snapkv' before",
    ]


def test_generators_of_another_device_give_way_to_a_new_seed(run, tmp_path, capsys):  # noqa: F811
    """What a CUDA run leaves (16 bytes a generator) goes on on a CPU."""
    run("a", max_iters=1)
    path = tmp_path / "a" / "ckpt.pt"
    state = train.load_checkpoint(path)
    train.save_checkpoint(path, **(state | {"generators": torch.zeros(1, 16, dtype=torch.uint8)}))
    capsys.readouterr()
    _, rows, _ = run("a", max_iters=3, init_from="resume")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert "sampling goes on from a new seed" in capsys.readouterr().out


def test_checkpoints_are_plain(run, tmp_path):  # noqa: F811
    """weights_only is torch's promise of tensors and plain types; nothing of the project asks for more."""
    run("a", max_iters=1)
    torch.load(tmp_path / "a" / "ckpt.pt", weights_only=True)
    forbidden = re.compile(
        r"\bpickle\b|(?<![.\w])eval\(|(?<![.\w])exec\(|weights_only=False|trust_remote_code|os\.system"
    )
    for file in (
        *ROOT.glob("*.py"),
        *ROOT.glob("data/*.py"),
        *ROOT.glob("experiments/*.py"),
        *ROOT.glob("examples/*.py"),
    ):
        text = file.read_text()
        assert not forbidden.search(text), file
        assert text.count("torch.load(") == text.count("weights_only=True"), file


# ---- kills and damaged files, in processes of their own --------------------------------------------------------------


@pytest.mark.slow
def test_killed_at_random_moments(tmp_path):
    result = faults.kills(tmp_path, 3)
    assert result["same"] and result["most steps lost"] <= 1


@pytest.mark.slow
def test_damaged_checkpoints_are_named_and_the_older_one_goes_on(tmp_path):
    for how, said in faults.damage(tmp_path).items():
        assert "ckpt.pt: not a whole checkpoint" in said and "ckpt_prev.pt: rename it" in said, how


@pytest.mark.slow
def test_no_room_for_a_checkpoint(tmp_path):
    assert re.fullmatch(
        r"error: .*ckpt.pt: could not be written, what was there before still is .*", faults.full_disk(tmp_path)
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_middle_of_a_step_is_no_error(run, monkeypatch, number):  # noqa: F811
    plain, calls, before = train.rewards_of, [], signal.getsignal(number)

    def interrupted(*args):
        calls.append(1)
        if len(calls) == 4:  # two batches of evaluation, then the second step
            os.kill(os.getpid(), number)
        return plain(*args)

    monkeypatch.setattr(train, "rewards_of", interrupted)
    _, rows, checkpoint = run("a", max_iters=50, save_interval=1000)
    assert len(rows) == checkpoint["step"] == 2
    assert signal.getsignal(number) is before


@pytest.mark.slow
def test_a_signal_finishes_the_step_and_a_second_one_does_not_wait(tmp_path):
    want = {"steps lost": 0, "same": True, "exit code of two": -signal.SIGTERM}
    assert faults.stops(tmp_path) == want


def test_a_failed_save_leaves_both_files_alone(tmp_path, monkeypatch):
    path = tmp_path / "ckpt.pt"
    for step in range(3):
        train.save_checkpoint(path, step=step)
    assert [torch.load(tmp_path / n)["step"] for n in ("ckpt.pt", "ckpt_prev.pt")] == [2, 1]
    for name in ("fsync", "link", "replace"):
        with monkeypatch.context() as m:
            m.setattr(os, name, lambda *args: (_ for _ in ()).throw(OSError(28, "No space left on device")))
            with pytest.raises(OSError, match=r"could not be written, what was there before still is .*No space"):
                train.save_checkpoint(path, step=9)
        assert torch.load(path)["step"] == 2
        assert sorted(p.name for p in tmp_path.iterdir()) in (["ckpt.pt", "ckpt_prev.pt"], ["ckpt.pt"])
        train.save_checkpoint(path, step=2)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write to a read-only folder")
def test_a_read_only_folder_is_refused(tmp_path):
    tmp_path.chmod(0o555)
    with pytest.raises(SystemExit, match="must be a folder that can be written to"):
        train.main([f"--out_dir={tmp_path}"])


# ---- numbers that are none -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_nan_gradient_leaves_everything_as_it_was(run, monkeypatch, dtype):  # noqa: F811
    """Injected at the third of three steps: weights and optimiser are those of two."""
    two = run("two", max_iters=2, dtype=dtype)[2]
    plain, calls = train.losses.smd_loss, []

    def poisoned(*args, **options):
        calls.append(1)
        loss, stats = plain(*args, **options)
        return loss * (math.nan if len(calls) == 3 else 1), stats

    monkeypatch.setattr(train.losses, "smd_loss", poisoned)
    summary, rows, three = run("three", max_iters=3, dtype=dtype)
    assert faults.equal(two["model"], three["model"]) and faults.equal(two["optimizer"], three["optimizer"])
    assert summary["skipped_steps"] == 1 and [row.get("skipped") for row in rows] == [
        None,
        None,
        "the gradient is not finite",
    ]


def test_a_skipped_update_is_in_its_row_though_the_next_one_is_good(run, monkeypatch):  # noqa: F811
    """Two updates a rollout; the first of the second step gets a NaN."""
    plain, calls = train.losses.smd_loss, []

    def poisoned(*args, **options):
        calls.append(1)
        loss, stats = plain(*args, **options)
        return loss * (math.nan if len(calls) == 3 else 1), stats

    monkeypatch.setattr(train.losses, "smd_loss", poisoned)
    summary, rows, _ = run("two updates", max_iters=3, updates_per_rollout=2)
    assert len(calls) == 6 and summary["skipped_steps"] == 1
    assert [row.get("skipped") for row in rows] == [None, "the gradient is not finite", None]


def test_too_many_bad_steps_end_the_run_with_the_last_good_checkpoint(run, tmp_path, monkeypatch):  # noqa: F811
    good = run("a", max_iters=2)[2]
    plain = train.losses.smd_loss
    monkeypatch.setattr(
        train.losses, "smd_loss", lambda *a, **o: tuple(x for x in (plain(*a, **o)[0] * math.nan, plain(*a, **o)[1]))
    )
    with pytest.raises(
        SystemExit, match=r"step 4: 3 updates in a row had a gradient that is not finite.*lower learning"
    ):
        run("a", max_iters=50, init_from="resume", max_bad_steps=3)
    assert faults.equal(good["model"], train.load_checkpoint(tmp_path / "a" / "ckpt.pt")["model"])


# ---- several processes -----------------------------------------------------------------------------------------------


def ranks(tmp_path, case, processes=2, **options):
    """Run tests/ranks.py; returns (exit code, output, log rows, checkpoint or None). A hang is an error after 120 s."""
    out = tmp_path / f"{case}{processes}"
    options = TINY | {"device": "cpu", "out_dir": out, "warm_dir": tmp_path / "warm", "max_iters": 5} | options
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command = [*launch, "tests/ranks.py", case, *(f"--{key}={value}" for key, value in options.items())]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    if done.returncode:
        return done.returncode, done.stdout + done.stderr, [], None
    rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return 0, done.stdout + done.stderr, rows, train.load_checkpoint(out / "ckpt.pt")


def gradients(checkpoint):
    """Adam's running mean of the gradients: linear in them, where the weights are not."""
    return torch.cat([moment["exp_avg"].flatten() for moment in checkpoint["optimizer"]["state"].values()])


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"method": "sparse_rl"}, {"opd": "mean"}])
def test_two_processes_give_the_gradient_of_one(tmp_path, options):
    if "opd" in options:
        train.main(
            [
                f"--{k}={v}"
                for k, v in (
                    TINY | {"max_iters": 1, "seed": 7, "out_dir": tmp_path / "t", "warm_dir": tmp_path}
                ).items()
            ]
        )
        options = options | {"teacher": tmp_path / "t" / "ckpt.pt"}
    (code, said, one, a), (_, _, two, b) = (ranks(tmp_path, "one_batch", n, max_iters=2, **options) for n in (1, 2))
    assert code == 0, said
    g, h = gradients(a), gradients(b)
    assert (g - h).norm() <= 1e-6 * g.norm() and g.norm() > 0
    for x, y in zip(one, two, strict=True):  # what is logged is of the whole batch too
        for key in ("reward", "completion_len", "gap_mean", "entropy", "loss", "grad_norm", "push_down", "finished"):
            assert x[key] == pytest.approx(y[key], rel=1e-4, abs=1e-6), key


@pytest.mark.slow
@pytest.mark.parametrize("case", ["equal_rewards_on_one_rank", "all_truncated_on_one_rank", "nan_on_one_rank"])
def test_two_processes_go_on_whatever_one_of_them_has(tmp_path, case):
    code, said, rows, checkpoint = ranks(tmp_path, case)
    assert code == 0 and len(rows) == 5, said
    assert all(torch.isfinite(w).all() for w in checkpoint["model"].values())
    assert [row["step"] for row in rows if "skipped" in row] == ([2] if case == "nan_on_one_rank" else [])
    assert said.count("eval before") == 1  # by process 0 only


@pytest.mark.slow
def test_two_processes_resume_as_if_they_had_not_stopped(tmp_path):
    code, said, rows, whole = ranks(tmp_path / "a", "as_it_is", policy="random", kv_budget=14)
    assert code == 0, said
    code, said, _, _ = ranks(tmp_path / "b", "as_it_is", policy="random", kv_budget=14, max_iters=2)
    assert code == 0, said
    code, said, again, parts = ranks(tmp_path / "b", "as_it_is", policy="random", kv_budget=14, init_from="resume")
    assert code == 0, said
    assert faults.equal(whole["model"], parts["model"]) and faults.equal(whole["generators"], parts["generators"])
    assert [row["reward"] for row in rows] == [row["reward"] for row in again]


@pytest.mark.slow
def test_a_dead_process_ends_the_job(tmp_path):
    code, said, _, _ = ranks(tmp_path, "one_rank_dies")
    assert code != 0 and "this process was told to die" in said


# ---- fuzz ------------------------------------------------------------------------------------------------------------

KEYS = st.sampled_from([f.name for f in train.dataclasses.fields(train.Config)])
VALUES = st.one_of(
    st.text(max_size=20), st.integers().map(str), st.floats().map(str), st.sampled_from(["true", "smd", "0.25"])
)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(
    st.lists(st.one_of(st.text(max_size=20), st.tuples(KEYS, VALUES).map(lambda kv: f"--{kv[0]}={kv[1]}")), max_size=4)
)
def test_no_command_line_is_more_than_an_error(argv):
    argv = [arg for arg in argv if "\0" not in arg]
    try:
        config = train.load_config(argv)
    except ValueError as e:
        assert str(e) and "\n" not in str(e).strip().splitlines()[0]
    else:
        assert isinstance(config, train.Config)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(st.sampled_from([recall, spellings]), st.data())
def test_tokenizers_and_verifiers_take_any_text(task, data):
    ids = data.draw(st.lists(st.integers(2, task.tokenizer.vocab_size - 1), max_size=20))
    assert task.tokenizer.encode(task.tokenizer.decode(ids)) == ids
    problem = task.make_problem(train.random.Random(data.draw(st.integers(0, 99))), "train")
    text = data.draw(st.text())
    assert task.reward(problem, text) in (0.0, 1.0)
    try:
        task.tokenizer.encode(text)
    except ValueError:
        pass
    else:
        assert task.tokenizer.decode(task.tokenizer.encode(text)) == text
