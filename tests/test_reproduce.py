"""experiments/reproduce.py: every claim runs end to end, what it compares is right, and a second run says the same."""

import json
import math

import pytest

from experiments import memory, reproduce


def strip(x):
    """Without what a clock or the process's memory said."""
    if isinstance(x, dict):
        return {
            k: strip(v) for k, v in x.items() if k not in ("seconds", "step_seconds", "measured_once", "cell_seconds")
        }
    return [strip(v) for v in x] if isinstance(x, list) else x


@pytest.mark.slow
@pytest.mark.parametrize("name", list(reproduce.CLAIMS))
def test_a_smoke_run_of_every_claim(name, tmp_path, monkeypatch):
    """Its JSON and figure are there, no arm failed, and for two claims a second run from nothing says the same."""
    records = []
    for turn in "ab" if name in ("collapse", "weights") else "a":
        monkeypatch.setattr(reproduce, "CELLS", tmp_path / turn)
        monkeypatch.setitem(reproduce.BASE, "warm_dir", str(tmp_path / "warm"))
        verdict = reproduce.reproduce(name, quick=True)
        folder = tmp_path / turn / "quick"
        records.append(json.loads((folder / f"{name}.json").read_text()))
        assert records[-1]["verdict"] == verdict and (folder / f"{name}.png").stat().st_size > 10_000
        assert '"failed": "' not in json.dumps(records[-1]["data"])
    assert strip(records[0]) == strip(records[-1])


def test_paired_difference_by_hand():
    """Eight problems; only ours right: 3, only theirs: 1. (3 - 1) / 8, variance of a difference (4/8 - 1/16)."""
    difference, error = reproduce.paired(0b11110000, 0b10001000, 8)
    assert difference == pytest.approx(2 / 8)
    assert error == pytest.approx(math.sqrt((4 / 8 - 1 / 16) / 8))
    mean, half = reproduce.interval([0.1, 0.2, 0.3])
    assert (mean, half) == (pytest.approx(0.2), pytest.approx(4.303 * 0.1 / math.sqrt(3)))


def test_what_a_cell_failed_with_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(reproduce, "CELLS", tmp_path)
    bench = reproduce.Bench(seeds=1, quick=True)
    cell = {("bad",): (reproduce.rl, bench.config(task="nothing", warm_dir=str(tmp_path / "warm")))}
    assert "failed" in bench.run(cell)["bad",]


def test_evicting_caches_attend_to_the_same_keys():
    """Slicing, masking and overwriting are one policy; growing without eviction is not."""
    sums = {way: memory.generate(way, 40, 80)["output_sum"] for way in memory.WAYS}
    assert sums["slice"] == pytest.approx(sums["overwrite"], rel=1e-5)
    assert sums["slice"] == pytest.approx(sums["mask"], rel=1e-5)
    assert abs(sums["grow"] - sums["mask"]) > 1e-3


def test_kv_bytes_by_hand():
    """Llama-3.1-8B: 2 x 32 layers x 8 heads x 128 x 2 bytes = 128 KiB a token."""
    assert memory.gigabytes("Llama-3.1-8B", rows=1, length=1) == 131072 / 1e9


@pytest.mark.parametrize("argv", [["nothing"], ["memory", "--seeds=0"], ["memory", "--quick=1"], ["memory", "weights"]])
def test_a_bad_command_is_one_line(argv):
    with pytest.raises(SystemExit, match=r"^error: .*give one of collapse, weights"):
        reproduce.main(argv)
