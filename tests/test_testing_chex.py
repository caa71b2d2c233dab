"""The assertions in chex's test cases: under each of `chex.variants`, under `chex.fake_jit`, and without chex."""

from collections.abc import Iterator
from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax
import pytest
from absl import flags

import gauge_optax as go
from tests.twins import normal

KEY = jax.random.key(0)
PARAMS = normal(1, {"up": (3, 4), "bias": (4,), "down": (4, 2)})
X = normal(4, {"x": (5, 3)})["x"]
GAUGE = go.rescale({"up": "_ channel", "bias": "channel"}, {"down": "channel _"})
WRONG = go.rescale({"up": "_ channel"}, {"down": "channel _"})  # the bias is missing
PROJECTED = optax.chain(optax.scale_by_adam(), go.gauge_project(GAUGE, kind="update"))
ADAMW = optax.adamw(1e-2, weight_decay=0.1)
QUOTIENT = go.quotient(ADAMW, GAUGE)
DDC = go.ddc_adamw(1e-2, GAUGE)


def loss_fn(params: Any) -> jax.Array:
    return jnp.mean(jnp.square(jax.nn.relu(X @ params["up"] + params["bias"]) @ params["down"] - 1.0))


@pytest.fixture(autouse=True)
def _pmap_on_one_device_too() -> Iterator[None]:
    """By default chex skips the pmapped variant where there is one device."""
    flag = flags.FLAGS["chex_skip_pmap_variant_if_single_device"]
    before, flag.value = flag.value, False
    yield
    flag.value = before


@pytest.mark.slow_rows("*_device", "*__with_pmap")
class Variants(chex.TestCase):
    """What a user of chex writes: `self.variant` around a loss or around `tx.update`."""

    @chex.all_variants
    def test_invariant(self) -> None:
        loss = self.variant(loss_fn)
        go.testing.assert_invariant(loss, PARAMS, GAUGE, KEY)
        with pytest.raises(AssertionError, match=r"^rescale\('up', 'down'\) is no symmetry of this loss\n"):
            go.testing.assert_invariant(loss, PARAMS, WRONG, KEY)

    @chex.all_variants
    def test_horizontal(self) -> None:
        grads = jax.grad(loss_fn)(PARAMS)
        projected, plain = (self.variant(tx.update)(grads, tx.init(PARAMS), PARAMS)[0] for tx in (PROJECTED, ADAMW))
        go.testing.assert_horizontal(projected, PARAMS, GAUGE)
        with pytest.raises(AssertionError, match=r"^updates move along rescale\('up', 'bias', 'down'\)\n"):
            go.testing.assert_horizontal(plain, PARAMS, GAUGE)

    @chex.all_variants
    def test_equivariant_step(self) -> None:
        """`update`, `init` and the loss may be variants."""
        whole = optax.GradientTransformation(self.variant(QUOTIENT.init), self.variant(QUOTIENT.update))
        for loss in (loss_fn, self.variant(loss_fn)):
            for tx in (optax.GradientTransformation(DDC.init, self.variant(DDC.update)), whole):
                go.testing.assert_equivariant_step(tx, loss, PARAMS, GAUGE, KEY, steps=3)
            adamw = optax.GradientTransformation(ADAMW.init, self.variant(ADAMW.update))
            with pytest.raises(AssertionError, match=r"^twins came apart at step 1: leaf \w+\n  gauges:   rescale"):
                go.testing.assert_equivariant_step(adamw, loss, PARAMS, GAUGE, KEY, steps=3)

    @chex.variants(without_jit=True, with_device=True, without_device=True)
    def test_a_variant_of_update_gets_arrays(self) -> None:
        """Inside a jitted step it would get tracers, and each variant would be the jitted one."""
        update = Seen()
        tx = optax.GradientTransformation(QUOTIENT.init, self.variant(lambda *x: update(*x)))
        go.testing.assert_equivariant_step(tx, loss_fn, PARAMS, GAUGE, KEY, steps=2)
        assert update.traced == [False] * 4


class Seen:
    """An `update` that notes whether it gets arrays (False) or is being traced (True)."""

    def __init__(self) -> None:
        self.traced = list[bool]()

    def __call__(self, *arguments: Any) -> Any:
        self.traced.append(any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(arguments)))
        return QUOTIENT.update(*arguments)


@pytest.mark.slow
def test_bare_functions_are_compiled_unless_jit_is_faked() -> None:
    """Traced once, to see whether it has complex numbers; the compiled function is that trace."""
    for faked, expected in ((False, [True]), (True, [True, *[False] * 4])):
        update = Seen()
        with chex.fake_jit(faked):
            tx = optax.GradientTransformation(QUOTIENT.init, update)
            go.testing.assert_equivariant_step(tx, loss_fn, PARAMS, GAUGE, KEY, steps=2)
        assert update.traced == expected


@pytest.mark.slow
def test_under_fake_jit_the_assertions_hold_and_fail_alike() -> None:
    with chex.fake_jit():
        go.testing.assert_invariant(loss_fn, PARAMS, GAUGE, KEY)
        go.testing.assert_equivariant_step(DDC, loss_fn, PARAMS, GAUGE, KEY, steps=1)
        with pytest.raises(AssertionError):
            go.testing.assert_invariant(loss_fn, PARAMS, WRONG, KEY)
        with pytest.raises(AssertionError):
            go.testing.assert_horizontal(PARAMS, PARAMS, go.scale_invariant({"up": "_ _"}))
        with pytest.raises(AssertionError):
            go.testing.assert_equivariant_step(ADAMW, loss_fn, PARAMS, GAUGE, KEY, steps=1)


def test_our_message_comes_first_and_chexs_after_it() -> None:
    with pytest.raises(AssertionError) as error:
        go.testing.assert_equivariant_step(ADAMW, loss_fn, PARAMS, GAUGE, KEY, steps=1)
    ours, chexs = str(error.value).split("[Chex] Assertion assert_trees_all_close failed")
    names = [line.split(":")[0].strip() for line in ours.strip().splitlines()[1:]]
    assert names == ["gauges", "found", "expected", "remedy"]
    assert "Mismatched elements" in chexs and "Not equal to tolerance rtol=0.0001" in chexs


def test_rtol_and_atol_are_chexs() -> None:
    """The loss moves by a known amount: |difference| ≤ atol + rtol·|expected|, entry by entry."""
    shift = go.logit_shift({"logits": "vocab"})
    params = {"logits": jnp.array([3.0, 1.0, 2.0])}
    moved = float(shift.sample(jax.random.split(KEY, 2)[0], params)[""]["logits"])

    def close(rtol: float | None, atol: float | None) -> bool:
        try:
            go.testing.assert_invariant(lambda p: p["logits"] + 10.0, params, shift, KEY, rtol=rtol, atol=atol)
        except AssertionError:
            return False
        return True

    assert abs(moved) > 0.1
    assert close(0.0, abs(moved) + 1e-4) and not close(0.0, abs(moved) - 1e-2)
    assert close(abs(moved) / 11.0 + 1e-4, 0.0) and not close(abs(moved) / 11.0 - 1e-3, 0.0)  # the least entry is 11
    assert close(abs(moved) / 22.0, None) and not close(abs(moved) / 26.0, None)  # atol is rtol times 13 then
    assert not close(None, None)


def test_zeros_need_not_be_exact_and_an_outlier_is_seen() -> None:
    """By default `atol` follows the largest entry; a single entry counts, which a norm over the leaf would hide."""
    params = {"up": jnp.ones((1, 1000)), "down": jnp.ones((1000, 1))}
    gauge = go.rescale({"up": "_ channel"}, {"down": "channel _"})

    def out(p: Any, size: float) -> jax.Array:
        products = p["up"][0] * p["down"][:, 0]
        return jnp.where(jnp.arange(1000) == 0, products + size * (p["up"][0] - 1.0), products)

    go.testing.assert_invariant(lambda p: jnp.append(out(p, 0.0), p["up"][0, 0] * 1e-7), params, gauge, KEY)
    with pytest.raises(AssertionError, match="Mismatched elements: 1 / 1000"):
        go.testing.assert_invariant(lambda p: out(p, 1e-4), params, gauge, KEY)
