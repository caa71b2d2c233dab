"""Numbers that NumPy draws for a compiled program: what they are, and that nothing is left for JAX to draw."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gauge_optax.discovery.draws import _draws, drawn_by_numpy
from gauge_optax.discovery.interpret import equations
from gauge_optax.gauges.gauge import product
from tests.cases import FLAT_CASES, GAUGE_CASES, GaugeCase


def test_the_numbers_are_those_that_jax_would_draw_but_for_their_source() -> None:
    def draw(key: jax.Array) -> jax.Array:
        return jax.random.normal(key, (2,))

    def fn(key: jax.Array, x: jax.Array) -> list[jax.Array]:
        normal, uniform, order, several, loop = jax.random.split(key, 5)
        z = jax.random.normal(normal, (4000,))
        return [z, x * z + 1.0, jax.random.uniform(uniform, (4000,), minval=-x, maxval=3.0 * x),
                jax.random.permutation(order, 9), jax.vmap(draw)(jax.random.split(several)),
                jax.lax.map(draw, jax.random.split(loop))]

    x = jnp.float32(2.0)
    one, again, other = (drawn_by_numpy(fn, x)(seed, x) for seed in (3, 3, 4))
    z, line, uniform, order, several, loop = map(np.asarray, one)
    assert all((a == b).all() for a, b in zip(one, again, strict=True)) and not (one[0] == other[0]).any()
    assert abs(z.mean()) < 0.06 and abs(z.std() - 1.0) < 0.04 and np.allclose(line, 2.0 * z + 1.0)
    assert -2.0 <= uniform.min() < -1.98 and 5.98 < uniform.max() <= 6.0 and sorted(order) == list(range(9))
    assert len(np.unique(several)) == len(np.unique(loop)) == 4


@pytest.mark.parametrize("case", (*GAUGE_CASES, *FLAT_CASES), ids=lambda case: case.name)
def test_no_gauge_leaves_its_numbers_to_jax(case: GaugeCase) -> None:
    gauge, params = product(case.gauges()), case.params(jax.random.key(0))
    closed = jax.make_jaxpr(lambda key: gauge.sample(key, params))(jax.random.key(1))
    bits = [eqn for eqn in equations(closed.jaxpr) if eqn.primitive.name == "random_bits"]
    assert len(bits) == len(list(_draws(closed.jaxpr))) > 0
