"""What `go.discover` finds in nets whose gauges are known: all of them by span, and nothing that fails anew."""

import gauge_optax as go
from tests.discovery.nets import CONFIGS, FORMS, every_net
from tests.discovery.nets import near as near  # `tests/test_multipliers.py` takes it from here
from tests.discovery.test_layouts import check


@every_net(("llama", "unrolled"))
def test_every_gauge_of_the_hand_list_by_span(name: str, form: str) -> None:
    net = FORMS[form](CONFIGS[name])
    report = check(net.fn, net.params, net.batches, net.gauges(True))
    assert eval(report.code(report.whole), {"go": go}) == list(report.whole)
    dear = {"residual_rotation", "bias_absorption", "embedding_shift", "key_bias", "norm_read_shift",
            "norm_write_shift"}
    assert report.gauges == [gauge for gauge in report.whole if gauge.name not in dear]
    assert not report.ungauged and not report.rejected
