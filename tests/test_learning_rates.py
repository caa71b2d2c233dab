"""The sweep goes on where it was killed, counts stuck channels, and its tables in the README are the committed ones."""

import functools
import json
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import gauge_optax as go
from examples import learning_rates
from tests.quick import jit

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
TINY = "--batch 2 --length 8 --width 8 --layers 1 --held-out 1 --steps 4 --every 2 --seeds 42 --rates 1e-3 3e-3"


@functools.cache
def _committed() -> dict[str, Any]:
    return json.loads((ROOT / "examples/results/learning_rates.json").read_text())


def _without_time(result: dict[str, Any]) -> dict[str, Any]:
    return {name: {k: v for k, v in cell.items() if k != "seconds"} for name, cell in result["cells"].items()}


def test_killed_and_resumed_is_the_unbroken_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(32, 127)) * 30)
    argv = [*TINY.split(), "--data", str(text), "--ablations", "adamw, no decay"]
    # ddc_adamw, once, is enough to compile.
    monkeypatch.setitem(learning_rates.ARMS, "ddc_adamw, radial_scale=4", learning_rates.adamw(0.5))
    bench = learning_rates.Bench(learning_rates.parse(argv))  # Both sweeps share what it compiled.
    monkeypatch.setattr(learning_rates, "Bench", lambda args: bench)
    whole = learning_rates.main([*argv, "--out", str(tmp_path / "whole")])

    train, calls = learning_rates.train_cell, []

    def killed(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return train(*args)

    monkeypatch.setattr(learning_rates, "train_cell", killed)
    with pytest.raises(KeyboardInterrupt):
        learning_rates.main([*argv, "--out", str(tmp_path / "broken")])
    resumed = learning_rates.main([*argv, "--out", str(tmp_path / "broken")])
    assert len(calls) == 4 + len(whole["cells"]) - 3, "a finished cell was trained again"
    assert _without_time(resumed) == _without_time(whole)
    assert len({cell["validation"] for cell in whole["cells"].values()}) > 3
    assert (tmp_path / "broken" / "learning_rates.png").stat().st_size > 1000
    assert learning_rates.table(whole) in capsys.readouterr().out

    with pytest.raises(ValueError, match="other settings"):
        learning_rates.main([*argv, "--out", str(tmp_path / "whole"), "--steps", "3"])


def test_stuck_is_at_the_floor_for_the_whole_last_quarter() -> None:
    start = np.ones(4)
    down, back = np.array([1, 1e-3, 1e-3, np.nan]), np.array([1, 1e-3, 0.5, np.nan])
    looks = [{"leaf": s} for s in (start, *[start] * 4, down, back, down, down)]
    report = learning_rates.channel_report(looks)
    assert report["at_floor"] == [0, 0, 0, 0, 3, 2, 3, 3] and report["channels"] == 4
    assert report["stuck"] == {"leaf": 3}
    assert learning_rates.channel_report([*looks, *looks[-3:-2] * 2])["stuck"] == {"leaf": 2}


def test_no_step_takes_a_joint_scale_below_its_floor() -> None:
    gauge = go.rescale({"up": "_ channel"}, {"down": "channel _"})
    up, down = jax.random.normal(jax.random.key(0), (2, 3, 4))
    params = {"up": up, "down": down.T}
    tx = go.gauge_retract(gauge)
    state, step = tx.init(params), jit(tx.update)

    def scales() -> np.ndarray:
        return np.linalg.norm(params["up"], axis=0) * np.linalg.norm(params["down"], axis=1)

    floor, before = 1e-2 * scales().mean(), scales()
    for _ in range(12):  # Each asks for all of both sides, and leaves nothing that could be scaled back up.
        updates, state = step(jax.tree.map(lambda x: -0.999 * x, params), state, params)
        params = optax.apply_updates(params, updates)
        now = scales()
        np.testing.assert_allclose(now, np.maximum(0.5 * before, floor), rtol=1e-3)
        before = now
    updates, state = step(params, state, params)
    params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(scales(), 3 * now, rtol=1e-3)


def test_readme_quotes_the_committed_sweep() -> None:
    shown = re.search(r"<!-- learning_rates:begin -->\n```\n(.*?)\n```\n<!-- learning_rates:end -->", README, re.S)
    assert shown is not None
    assert shown[1] == learning_rates.table(_committed())


def test_the_committed_sweep_keeps_its_promise() -> None:
    cells, table = _committed()["cells"], learning_rates.ARMS
    for arm in table:
        for rate in learning_rates.RATES:
            for seed in learning_rates.SEEDS:
                cell = cells[learning_rates.key(arm, rate, seed)]
                assert arm == "adamw" or (cell["finite"] and not cell["stuck"])
    assert learning_rates.best(_committed(), "ddc_adamw")[0] <= 1.01 * learning_rates.best(_committed(), "adamw")[0]
