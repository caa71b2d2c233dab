"""The comparison of optimizers: its links do what they say, and its sweeps end where they should."""

import importlib.util
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.track3 import __main__ as track3
from benchmarks.track3 import arms, optimizers, transfer
from examples.studies import harness
from examples.studies.harness import Result, key
from models import lm

CONFIG = lm.llama_config(vocab=7, d_model=8, layers=1, heads=2, kv_heads=2, d_head=4, d_ff=12, max_len=5)
OUT, DOWN = ("blocks", 0, "attn", "out", "kernel"), ("blocks", 0, "mlp", "down", "kernel")


def leaf(tree: Any, path: tuple[Any, ...]) -> jax.Array:
    """One leaf."""
    for name in path:
        tree = tree[name]
    return tree


def ways(arm: str) -> list[Any]:
    """The quick way, and the slow ones."""
    return [
        pytest.param(arm, way, marks=() if way == arms.PLAIN else pytest.mark.slow, id=f"{arm}-{way}")
        for way in arms.ARMS[arm].ways
    ]


@pytest.mark.slow_rows("*[NPRW,]*-plain")
@pytest.mark.parametrize(("arm", "way"), [case for arm in arms.ARMS for case in ways(arm)])
def test_every_arm_lowers_the_loss(arm: str, way: str) -> None:
    """Five steps on one batch, with kernels of zeros among them."""
    # Not `importorskip`: of itself the package imports a module that Optax no longer has, which the arm stands in for.
    if arm == "PSGD Kron" and importlib.util.find_spec("psgd_jax") is None:
        pytest.skip("the extra `peers` is not installed")
    params, loss = lm.params_and_loss(CONFIG, jax.random.key(0))
    params["blocks"][0]["attn"]["out"]["kernel"] *= 0.0
    tokens = jax.random.randint(jax.random.key(1), (4, 6), 0, CONFIG.vocab)
    tx = arms.optimizer(arms.ARMS[arm], way, lambda n: jnp.float32(arms.ARMS[arm].middle / 2), 0.1, lm.gauges(CONFIG))

    @jax.jit
    def train(params: Any) -> tuple[jax.Array, Any]:
        def step(_: int, carry: tuple[Any, Any]) -> tuple[Any, Any]:
            params, state = carry
            updates, state = tx.update(jax.grad(loss)(params, tokens), state, params)
            return jax.tree.map(jnp.add, params, updates), state

        after = jax.lax.fori_loop(0, 5, step, (params, tx.init(params)))[0]
        return loss(after, tokens), after

    before = loss(params, tokens)
    end, after = train(params)
    assert end < before
    assert bool(jnp.any(leaf(after, OUT) != 0))


# Sweeps -------------------------------------------------------------------------------------------------

MUON = track3.Group(64, "lecun", "Muon", "plain")


def curve(cell: track3.Cell) -> float:
    """A loss that is least at a rate of 0.25, a decay of 0.4 and many steps."""
    _, _, arm, _, steps, decay, rate, seed = cell
    noise = 1e-3 * ((seed * 7919) % 11 - 5)
    gain = 0.2 if arm == "Muon" else 0.0
    return 2.0 - gain + 0.1 * math.log(rate / 0.25) ** 2 - 0.1 * decay + noise - 0.5 * math.log(steps / 400)


def filled(chosen: list[track3.Group], ladder: bool = False) -> tuple[Result, int]:
    """A result of which all runs are made up, and their number; the ladder needs the losses of all arms."""
    result: Result = {"cells": {}, "seeds": list(track3.SEEDS), "machine": "none", "settings": {}, "versions": {}}
    for climb in (False, True) if ladder else (False,):
        for group in chosen:
            while cells := track3.missing(result, group, climb):
                result["cells"][key(cells[0])] = {"validation": curve(cells[0]), "seconds": 1.0}
    return result, len(result["cells"])


def test_a_sweep_ends_with_its_best_inside() -> None:
    """Rates of one seed from the middle upwards, two more decays, two more seeds."""
    result, count = filled([MUON])
    rates, missing = track3.swept_rates(result, MUON)
    assert list(rates) == [0.016, 0.04, 0.1, 0.25, 0.62] and not missing
    assert track3.best(result, MUON) == (0.4, 0.25)
    assert count == 5 + 2 + 2
    assert len(track3.at_best(result, MUON) or []) == 3


def test_a_sweep_gives_up_where_rates_never_get_worse(monkeypatch: pytest.MonkeyPatch) -> None:
    """And says so in the table."""
    monkeypatch.setattr(f"{__name__}.curve", lambda cell: 1.0 / cell[6])
    result, _ = filled([MUON])
    assert len(track3.swept_rates(result, MUON)[0]) == 2 + max(track3.NUMBERS)
    assert ", an end" in track3.section(result)


def test_the_ladder_finds_the_fewest_steps() -> None:
    """AdamW's loss in 400 steps takes Muon 400·exp(−0.2/0.5) = 268 steps, and the next rung that is clear of it."""
    plain = [track3.Group(64, "lecun", name, "plain") for name in ("AdamW", "Muon", "NorMuon")]
    result, _ = filled(plain, ladder=True)
    assert track3.fewest(result, MUON) == (283, None)
    assert track3.fewest(result, plain[0]) == (476, None)
    assert "| Muon (plain) | 283 | not run | not run |" in track3.section(result)


# Transfer -----------------------------------------------------------------------------------------------


def made_up(of: transfer.Cell) -> dict[str, Any]:
    """A loss whose best rate is 0.004 for AdamW at d = 64, and halves with every width but under muP."""
    _, _, _, _, size, arm, rate, _ = of
    best = 0.004 * (1.0 if "muP" in arm else 64 / size)
    return {"validation": 2.0 + 0.1 * math.log(rate / best) ** 2, "seconds": 0.0}


def test_transfer_says_how_far_the_best_rate_moves(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under AdamW to an eighth, which costs 0.1·log(8)² to ignore; under muP not at all."""
    monkeypatch.setattr(transfer, "train", made_up)
    args = ["--out", str(tmp_path), "--only", "* | AdamW | *", "* | AdamW, muP | *"]
    result = harness.main(transfer.STUDY, args)
    rows = {(row[0], row[1]): row for row in transfer._rows(result)}
    for setting in transfer.SETTINGS:
        assert rows[setting.text, "AdamW"][-3:] == ["0.12", "0.432", "0.002, 0.192"]
        assert rows[setting.text, "AdamW, muP"][-3:] == ["1", "0.000", "0.004, 0.000"]
    assert (tmp_path / "transfer.png").stat().st_size > 10_000


def test_mup_is_adamw_at_its_width_and_narrower_beyond() -> None:
    """A kernel's step is 64/d of AdamW's, the embedding's is AdamW's."""
    for width, factor in ((64, 1.0), (128, 0.5)):
        params = {"embed": {"embedding": jnp.ones((3, width))}, "lm_head": {"kernel": jnp.ones((width, 3))}}
        gradients = jax.tree.map(lambda x: jnp.linspace(-1.0, 1.0, x.size).reshape(x.shape), params)
        steps = []
        for tx in (optimizers.mup_adamw(lambda n: 0.1, 0.0), optimizers.adamw(lambda n: 0.1, 0.0)):
            steps.append(tx.update(gradients, tx.init(params), params)[0])
        np.testing.assert_allclose(steps[0]["lm_head"]["kernel"], factor * steps[1]["lm_head"]["kernel"], rtol=1e-6)
        np.testing.assert_allclose(steps[0]["embed"]["embedding"], steps[1]["embed"]["embedding"], rtol=1e-6)
        scaled = optimizers.mup_start(params, "lecun")["lm_head"]["kernel"]
        np.testing.assert_allclose(scaled, factor**0.5, rtol=1e-6)
