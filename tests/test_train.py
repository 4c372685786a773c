"""train.py: the options, the loop under every method, what it writes, and that it can stop and go on."""

import dataclasses
import json
import math
import re

import pytest
import torch
from test_sample import folder  # noqa: F401  (a fixture: a tiny model folder)

import train
from data import arithmetic, recall
from train import Config, load_config, main

TINY = dict(n_embd=32, warm_iters=3, warm_batch_size=8, prompts_per_step=4, group_size=4, max_iters=3, eval_problems=8)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Train a tiny model for three steps; returns a function (name, **overrides) -> (summary, log rows, checkpoint)."""
    # Three steps of warm start teach nothing: a reward that random text sometimes earns gives the loop work to do.
    monkeypatch.setattr(recall, "reward", lambda problem, response: float(len(response) % 3))
    monkeypatch.setattr(train, "draw_curves", lambda out_dir: None)

    def run(name, **overrides):
        out = tmp_path / name
        options = {**TINY, "out_dir": str(out), "warm_dir": str(tmp_path / "warm"), "device": "cpu", **overrides}
        main([f"--{key}={value}" for key, value in options.items()])
        rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
        return json.loads((out / "summary.json").read_text()), rows, train.load_checkpoint(out / "ckpt.pt")

    return run


def close(a, b, atol):
    return all(torch.allclose(a[name], b[name], rtol=0, atol=atol) for name in a)


# ---- options ---------------------------------------------------------------------------------------------------------

BAD = [
    ("--metod=naive", "no key 'metod'; the closest is 'method'"),
    ("--seed=x", "seed='x' must be int"),
    ("--max_iters=1.5", "max_iters='1.5' must be int"),
    ("--compile=yes", "compile='yes' must be bool"),
    ("--seed", "--key=value"),
    ("--kv_budget=6", "at least sinks + recent + 1 = 7"),
    ("--prompt_budget=5", "at least sinks + recent + 1 = 7"),
    ("--prompt_budget=1.5", "in (0, 1]"),
    ("--group_size=1", "group_size=1"),
    ("--max_new_tokens=100", "block_size=128"),
    ("--policy=lru", "must be one of snapkv"),
    ("--method=ppo", "must be one of dense"),
    ("--task=chess", "must be one of arithmetic, countdown"),
    ("--temperature=-1", "temperature=-1.0"),
    ("--temperature=0", "temperature=0.0"),
    ("--temperature=nan", "temperature='nan' must be a finite"),
    ("--learning_rate=inf", "must be a finite number"),
    ("--clip=nan", "must be a finite number"),
    ("--clip=3", "clip=3.0: must be below 1"),
    ("--temperature=1e-30", "temperature=1e-30: must be at least 0.001"),
    ("--smd_lambda=nan", "must be a finite number"),
    ("--pool=2", "must be odd"),
    ("--n_head=3", "multiple of n_kv_head"),
    ("--updates_per_rollout=3", "must divide a rollout's 256 rows"),
    ("--opd=vopd", "needs both"),
    ("nowhere.toml", "no such configuration file"),
    ("bad.toml", "no key 'polcy'; the closest is 'policy'"),
    ("type.toml", "group_size=True must be int"),
    ("broken.toml", "not a TOML file"),
    ("--init_from=resume", "out/ckpt.pt: there is no such checkpoint"),
    ("--teacher=nowhere.pt --opd=vopd", "nowhere.pt: there is no such checkpoint"),
    ("--teacher=broken.toml --opd=vopd", "not a TOML file"),
    ("--teacher=broken.pt --opd=vopd", "broken.pt: not a whole checkpoint"),
    ("--teacher=other.toml --opd=vopd", "vocabulary is not that of task 'recall'"),
    ("--teacher=self.toml --opd=vopd", "can name no teacher"),
    ("--block_size=56 --max_new_tokens=2", "block_size=56"),
    ("--n_embd=1088", "at most 256"),
    ("--seed=99999999999999999999", "below 2**63"),
    ("--warm_dir=broken.pt", "warm_dir='broken.pt': must be a folder"),
    ("--out_dir=/proc/x", "/proc/x"),
    ("--out_dir=broken.pt", "out_dir='broken.pt': must be a folder"),
    ("--opd_topk=133 --opd=vopd --teacher=nowhere.pt", "at most the vocabulary's 132"),
]


@pytest.mark.parametrize(("args", "message"), BAD, ids=[args for args, _ in BAD])
def test_bad_input_is_one_line_and_writes_nothing(args, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = {"bad.toml": "polcy = 'h2o'", "type.toml": "group_size = true", "broken.toml": "x = = 1"}
    files |= {"broken.pt": "x", "other.toml": "task = 'spellings'", "self.toml": "teacher = 'self.toml'"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(SystemExit) as stop:
        main(args.split())
    assert message in str(stop.value)
    assert str(stop.value).startswith("error: ") and "\n" not in str(stop.value)
    assert sorted(tmp_path.iterdir()) == before


def test_group_of_one_is_allowed_without_reward():
    assert load_config(["--group_size=1", "--reward_coef=0"]).group_size == 1


def test_later_options_win_and_a_budget_is_a_number_or_a_fraction(tmp_path):
    file = tmp_path / "a.toml"
    file.write_text('method = "naive"\nlearning_rate = 1\nprompt_budget = 0.5\n')
    config = load_config([str(file), "--method=bypass"])
    assert (config.method, config.learning_rate, config.prompt_budget) == ("bypass", 1.0, 0.5)
    assert load_config(["--method=bypass", str(file)]).method == "naive"
    keys = load_config(["--prompt_budget=12"]).prompt_budget
    assert (keys, type(keys)) == (12, int)


def test_help_names_every_key_with_its_default(capsys):
    main(["--help"])
    text = capsys.readouterr().out
    for field in dataclasses.fields(Config):
        assert f"--{field.name}=" in text


# ---- the loop --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", train.CHOICES["method"])
def test_every_method_runs_and_logs(run, method):
    summary, rows, _ = run(method, method=method)
    assert [row["step"] for row in rows] == [0, 1, 2]
    keys = "reward completion_len gap_max gap_mean ratio_max clip_frac grad_norm grad_var_adam kd kv_bytes"
    keys += " kv_bytes_dense rollout_tok_s learn_tok_s seconds"
    for row in rows:
        assert all(math.isfinite(row[key]) for key in keys.split())
    if method in ("importance", "sparse_rl"):
        assert all(0 < row["ess"] <= 1 and row["weight_max"] >= row["weight_mean"] > 0 for row in rows)
    if method in ("dense", "smd"):  # exactly on-policy: the learner scores what the sampler drew with what it saw
        assert summary["gap_max"] <= 1e-4
        assert max(row["ratio_max"] for row in rows) <= 1 + 1e-4
    else:
        assert summary["gap_max"] > 1e-3
    assert set(summary["eval"]["before"]) == set(summary["eval"]["after"]) == {"dense", "compressed"}
    assert (rows[0]["kv_bytes"] == rows[0]["kv_bytes_dense"]) == (method == "dense")


@pytest.mark.parametrize("opd", [*train.OPD, *train.DIRECT])
def test_every_distillation_runs_and_logs(run, tmp_path, opd):
    """A student of its own seed, under the mask: SMD and distillation together; the teacher is another checkpoint."""
    run("teacher", max_iters=1, seed=7)
    options = {"method": "smd", "reward_coef": 0, "teacher": tmp_path / "teacher" / "ckpt.pt", "learning_rate": 1e-3}
    summary, rows, _ = run(opd, opd=opd, opd_topk=5, **options)
    assert summary["gap_max"] <= 1e-4
    assert all(math.isfinite(row[key]) for row in rows for key in ("opd_kl", "opd_adv_std", "entropy", "grad_norm"))
    assert opd != "full" or rows[-1]["opd_kl"] < rows[0]["opd_kl"]  # the only one sure to be nearer after two steps
    assert (rows[0]["opd_adv_std"] == 0) == (opd in ("full", "topk_kl"))


def test_a_teacher_that_is_the_student_teaches_nothing(run, tmp_path):
    run("teacher", max_iters=1, learning_rate=1e-30)
    teacher = tmp_path / "teacher" / "ckpt.pt"
    options = {"method": "dense", "teacher": teacher, "max_iters": 1}
    start = train.load_checkpoint(teacher)["model"]
    for opd in ("vopd", "full"):
        _, rows, checkpoint = run(opd, opd=opd, reward_coef=0, **options)
        assert abs(rows[0]["opd_kl"]) < 1e-6 and rows[0]["opd_adv_std"] < 1e-6 and rows[0]["grad_norm"] < 1e-5
    _, rows, checkpoint = run("self", opd="vopd", **options, reward_coef=1)
    assert not close(start, checkpoint["model"], atol=1e-6)  # the reward still does


def test_when_every_sequence_is_vetoed_nothing_moves(run, monkeypatch):
    monkeypatch.setattr(train.losses, "SPARSE_RL_VETO", math.inf)
    summary, rows, checkpoint = run("vetoed", method="sparse_rl")
    _, _, start = run("start", method="sparse_rl", max_iters=1)
    assert summary["skipped_steps"] == 3 and [row["vetoed"] for row in rows] == [1, 1, 1]
    assert close(checkpoint["model"], start["model"], atol=0)


def test_naive_trusts_its_own_old_policy_and_bypass_the_samplers(run):
    _, naive, _ = run("naive", method="naive")
    _, bypass, _ = run("bypass", method="bypass")
    assert naive[0]["gap_max"] == pytest.approx(bypass[0]["gap_max"], rel=1e-5)  # the same rollout, the same full view
    assert max(row["ratio_max"] for row in naive) <= 1 + 1e-4  # the bias is there, and ignored
    assert 1.1 < bypass[0]["ratio_max"] <= math.exp(bypass[0]["gap_max"]) * 1.001


@pytest.mark.parametrize(
    "options",
    [
        {"method": "smd", "smd_lambda": 0.1},
        {"method": "smd", "smd_lambda": 0.1, "smd_track_b": "masked_teaches_dense"},
        {"method": "sparse_rl"},
        {"method": "naive", "updates_per_rollout": 2},
        {"opd": "mean"},
        {"opd": "vopd", "opd_topk": 5},
        {"opd": "topk_kl", "opd_topk": 5},
    ],
)
def test_the_step_does_not_depend_on_how_the_learner_is_cut(run, tmp_path, options):
    if "opd" in options:
        run("teacher", max_iters=1, seed=7)
        options = options | {"teacher": tmp_path / "teacher" / "ckpt.pt"}

    def gradient(name, **cut):
        """Two gradients, as Adam averages them; the weights would divide rounding by rounding where they are 0."""
        moments = run(name, max_iters=2, **options, **cut)[2]["optimizer"]["state"].values()
        return torch.cat([moment["exp_avg"].flatten() for moment in moments])

    whole, other = gradient("whole"), gradient("other", seed=1)
    parts = gradient("parts", micro_batch_size=3, head_chunk=5, share_prompts=False, recompute=True)
    assert (whole - parts).norm() <= 1e-5 * whole.norm()
    assert (whole - other).norm() >= 0.1 * whole.norm()


@pytest.mark.parametrize(
    "options", [{"policy": "random", "kv_budget": 14}, {"method": "naive", "updates_per_rollout": 2}]
)
def test_stop_and_resume_is_the_run_without_a_stop(run, tmp_path, options):
    _, rows, whole = run("whole", max_iters=4, **options)
    run("parts", max_iters=2, **options)
    summary, resumed_rows, parts = run("parts", max_iters=4, init_from="resume", **options)
    assert all(torch.equal(whole["model"][name], parts["model"][name]) for name in whole["model"])
    timed = {"seconds", "rollout_tok_s", "learn_tok_s", "eval"}
    strip = [[{k: v for k, v in row.items() if k not in timed} for row in log] for log in (rows, resumed_rows)]
    assert strip[0] == strip[1]
    assert summary["eval"]["after"] == rows[-1]["eval"]


def test_what_a_resume_refuses_and_evaluation_alone(run, tmp_path, capsys):
    run("a", max_iters=1)
    files = {p: p.read_bytes() for p in (tmp_path / "a").iterdir()}
    resume = [f"--out_dir={tmp_path / 'a'}", "--init_from=resume"]
    for options, message in (
        ([], "has done 1 steps already"),
        (["--max_iters=3", "--seed=5"], "seed=5: .* begun with 1337"),
        (["--max_iters=3", "--n_embd=64"], "n_embd=64: .* has 32"),
        (["--max_iters=3", "--task=spellings"], "vocabulary"),
    ):
        with pytest.raises(SystemExit, match=message):
            main([*resume, *options])
    capsys.readouterr()
    main([*resume, "--eval_only=true", "--kv_budget=7"])
    assert re.fullmatch(
        r"resume: kv_budget=7 from here on, 0 before\neval only: dense [\d.]+, compressed [\d.]+\n",
        capsys.readouterr().out,
    )
    assert files == {p: p.read_bytes() for p in (tmp_path / "a").iterdir()}


def test_a_renamed_run_goes_on_where_it_is_and_half_a_row_is_dropped(run, tmp_path):
    run("a", max_iters=3, save_interval=2)
    (tmp_path / "a").rename(tmp_path / "b")
    with (tmp_path / "b" / "log.jsonl").open("a") as log:
        log.write('{"step": 3, "rew')  # a kill in the middle of a row
    _, rows, checkpoint = run("b", max_iters=5, init_from="resume")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4] and checkpoint["step"] == 5
    assert not (tmp_path / "a").exists()


def test_a_run_that_fails_at_once_leaves_the_older_run_alone(run, tmp_path, monkeypatch):
    run("a", max_iters=1)
    files = {p: p.read_bytes() for p in (tmp_path / "a").iterdir()}
    monkeypatch.setattr(recall, "reward", lambda problem, response: math.nan)
    with pytest.raises(ValueError, match="finite"):
        run("a", seed=2)
    assert files == {p: p.read_bytes() for p in (tmp_path / "a").iterdir()}


def test_checkpoints_come_at_every_save_interval(run, tmp_path, monkeypatch):
    save, steps = train.save_checkpoint, []
    monkeypatch.setattr(train, "save_checkpoint", lambda path, **s: (steps.append(s.get("step")), save(path, **s)))
    run("a", max_iters=5, save_interval=2)
    assert steps == [None, 2, 4, 5]  # the first is the warm start


def test_bfloat16_keeps_float32_masters(run):
    summary, _, checkpoint = run("half", dtype="bfloat16")
    assert {p.dtype for p in checkpoint["model"].values()} == {torch.float32}
    assert {s[k].dtype for s in checkpoint["optimizer"]["state"].values() for k in ("exp_avg", "exp_avg_sq")} == {
        torch.float32
    }
    assert summary["gap_max"] < 0.2  # rounding to 8 bits, no longer 1e-6, and no method's doing


@pytest.mark.parametrize("reward", [None, math.nan, "1"])
def test_a_reward_that_is_no_number_is_named(run, monkeypatch, reward):
    monkeypatch.setattr(recall, "reward", lambda problem, response: reward)
    with pytest.raises(ValueError, match=rf"data.recall.reward gave '?{reward}'? for .*: it must be a finite number"):
        run("bad")


def test_a_run_leaves_its_four_files(tmp_path):
    out = tmp_path / "out"
    main([f"--{k}={v}" for k, v in (TINY | {"max_iters": 1, "out_dir": out, "warm_dir": out, "device": "cpu"}).items()])
    assert {"log.jsonl", "summary.json", "curves.png", "ckpt.pt"} <= {p.name for p in out.iterdir()}


def test_a_broken_replay_is_caught_at_the_first_step(run, monkeypatch):
    shifted = train.Rollout.select
    monkeypatch.setattr(train.Rollout, "select", lambda roll, rows: dataclasses.replace(
        shifted(roll, rows), evicted_at=shifted(roll, rows).evicted_at.roll(1, dims=-1)))  # fmt: skip
    with pytest.raises(SystemExit, match="before any update"):
        run("broken")


# ---- a model folder as the start, tasks in plain text ----------------------------------------------------------------


def test_a_model_folder_is_a_start_and_resumes(run, folder, monkeypatch):  # noqa: F811
    """On-policy to rounding with its own tokenizer, and the resumed run is the one without a stop."""
    monkeypatch.setattr(arithmetic, "reward", lambda problem, response: float(len(response) % 3))
    options = {"task": "arithmetic", "init_from": folder, "block_size": 128}
    summary, rows, whole = run("whole", max_iters=3, **options)
    assert summary["gap_max"] <= 1e-4 and len(rows) == 3 and any(row["grad_norm"] > 0 for row in rows)
    run("parts", max_iters=2, **options)
    _, _, parts = run("parts", max_iters=3, init_from="resume")
    assert all(torch.equal(whole["model"][name], parts["model"][name]) for name in whole["model"])


def test_a_text_task_can_start_from_scratch(run, folder):  # noqa: F811
    summary, rows, _ = run("a", task="arithmetic", tokenizer=folder, block_size=128, max_iters=1)
    assert summary["gap_max"] <= 1e-4 and len(rows) == 1


def test_partial_credit_counts_in_training_only(run, folder, monkeypatch):  # noqa: F811
    monkeypatch.setattr(arithmetic, "shaping", lambda problem, response: float(len(response) % 2), raising=False)
    options = {"task": "arithmetic", "init_from": folder, "block_size": 128, "max_iters": 1}
    summary, rows, _ = run("with", shaping_coef=0.5, **options)
    assert 0 < rows[0]["reward"] < 0.5 and summary["eval"]["after"] == {"dense": 0, "compressed": 0}
    assert run("without", **options)[1][0]["reward"] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "countdown"}, "is in plain text: give init_from=MODEL_FOLDER"),
        ({"task": "recall", "init_from": "FOLDER"}, "has a vocabulary of its own"),
        ({"shaping_coef": 0.1}, "task 'recall' gives no partial credit"),
        ({"task": "arithmetic", "init_from": "FOLDER", "block_size": 40}, "100 prompts in a row of more than"),
        ({"task": "arithmetic", "init_from": "nowhere/"}, "nowhere"),
    ],
)
def test_task_and_folder_must_fit(run, folder, options, message):  # noqa: F811
    options = {k: str(folder) if v == "FOLDER" else v for k, v in options.items()}
    with pytest.raises(SystemExit, match=message):
        run("a", **options)
