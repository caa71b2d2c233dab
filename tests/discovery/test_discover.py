"""What `go.discover` finds in nets whose gauges are known: all of them by span, and nothing that fails anew."""

import jax
import numpy as np

import gauge_optax as go
from tests.discovery.nets import CONFIGS, FORMS, every_net, near
from tests.discovery.test_layouts import check


@every_net(("llama", "unrolled"))
def test_every_gauge_of_the_hand_list_by_span(name: str, form: str) -> None:
    net = FORMS[form](CONFIGS[name])
    report = check(net.fn, net.params, net.batches, net.gauges(True))
    with jax.enable_x64(True):
        point = near(net.params, 5)
        tokens = np.random.default_rng(9).integers(0, CONFIGS[name].vocab, (3, 6))
        fn = jax.jit(lambda p: jax.nn.log_softmax(net.fn(p, tokens)))
        product = go.product(report.whole)
        moved = jax.jit(lambda p: product.act(product.sample(jax.random.key(3), p), p))(point)
        before = np.asarray(fn(point))
        assert np.linalg.norm(np.asarray(fn(moved)) - before) <= 1e-9 * np.linalg.norm(before)
    assert eval(report.code(report.whole), {"go": go}) == list(report.whole)
    dear = {"residual_rotation", "bias_absorption", "embedding_shift", "key_bias", "norm_read_shift",
            "norm_write_shift"}
    assert report.gauges == [gauge for gauge in report.whole if gauge.name not in dear]
    assert not report.ungauged and not report.rejected
