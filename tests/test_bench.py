"""The benchmark's own arithmetic: a step's phases add up to the step, and its FLOPs are those PyTorch counts."""

import time

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import train
from experiments import bench

TINY = dict(n_layer=1, n_embd=32, n_head=4, n_kv_head=2)


@pytest.mark.parametrize(
    "options, present, absent",
    [
        (
            {"kv_budget": 16, "prompt_budget": 0},
            [bench.PREFILL, bench.DECODE, bench.EVICTION],
            [bench.OPINION, bench.TRACK_B],
        ),
        ({"smd_lambda": 0.1}, [bench.TRACK_B], [bench.OPINION]),
        ({"method": "naive"}, [bench.OPINION], [bench.TRACK_B]),
    ],
)
def test_phases_add_up_to_the_step_that_the_loop_logs(options, present, absent):
    config = train.Config(warm_iters=0, prompts_per_step=4, group_size=2, **(TINY | options))
    steps = bench.step_times(config, 2, time.perf_counter)
    assert len(steps) == 2
    for step in steps:
        assert bench.whole(step) == pytest.approx(step["logged"], rel=0.05)
        learner = [bench.SAMPLING, bench.REWARD, bench.FORWARD, bench.BACKWARD, bench.OPTIMISER]
        assert all(step[phase] > 0 for phase in [*present, *learner])
        assert not any(phase in step for phase in absent)
        assert 0 < step[bench.REST] < 0.5 * bench.whole(step)
        assert 0 < step["tokens"] <= 8 * config.max_new_tokens


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("share_prompts", [True, False])
@pytest.mark.parametrize("method", ["smd", "dense"])
def test_learner_flops_are_those_that_pytorch_counts(method, share_prompts, group):
    """All but attention's exactly: PyTorch counts all pairs of query and key, the formula those in causal order."""
    run, flops = bench.learner_pass(TINY, 32, group, method, share_prompts)
    counter = FlopCounterMode(display=False)
    with sdpa_kernel(SDPBackend.MATH), counter:
        run()
    counted = {str(op): n for op, n in counter.get_flop_counts()["Global"].items()}
    linear, attention = counted.pop("aten.mm"), counted.pop("aten.bmm")
    assert not counted
    assert attention / 2 < flops - linear < attention


def test_peers_without_trl_says_so_in_one_line(monkeypatch):
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="pip install trl"):
        bench.peers(1)


def test_a_step_in_a_table():
    rows, totals = bench.step_table(train.Config(warm_iters=0, prompts_per_step=2, group_size=2, **TINY), 1)
    assert rows[-1]["phase"] == "whole step"
    assert sum(float(row["seconds"]) for row in rows[:-1]) == pytest.approx(float(rows[-1]["seconds"]), abs=0.002)
    assert totals["threads"] == torch.get_num_threads() and 0 < totals["learner share of matmul"] < 2
