"""LayerNorms of queries and keys with scales leave one direction per layer dead that has no gauge; others do not."""

import dataclasses
from typing import Any

import numpy as np
import pytest

import gauge_optax as go
from benchmarks import fuzz
from gauge_optax.discovery.scaled_products import KIND, along_the_curve

SPEC = dataclasses.replace(
    fuzz.drawn(68), layers=1, width=6, heads=2, kv_heads=1, hidden=5, mlp="gelu", bias="none", scanned=False)


@pytest.mark.parametrize("size", [3, 4, 7])
def test_scales_move_along_a_curve_on_which_their_matrix_turns(size: int) -> None:
    before = np.random.default_rng(size).uniform(0.3, 1.5, size) * np.where(np.arange(size) == 1, -1.0, 1.0)
    after, turn = along_the_curve(before)
    centred = np.eye(size) - 1 / size
    np.testing.assert_allclose(turn.T @ turn, np.eye(size), atol=1e-13)
    np.testing.assert_allclose(turn @ np.ones(size), np.ones(size), atol=1e-13)
    np.testing.assert_allclose(centred @ (turn.T * after @ turn) @ centred, centred * before @ centred, atol=1e-13)
    assert np.abs(after - before).max() > 0.02


def named(**switches: Any) -> bool:
    net = fuzz.built(dataclasses.replace(SPEC, **switches))
    return KIND in go.discover(net.fn, net.params, net.batches, "logits", progress=False).ungauged


def test_they_are_named_and_nothing_else_is_unexplained() -> None:
    net = fuzz.built(dataclasses.replace(SPEC, position="learned"))
    report = go.discover(net.fn, net.params, net.batches, "logits", progress=False)
    assert report.ungauged[KIND] == ("layers/0/k + layers/0/k_norm/scale + layers/0/q + layers/0/q_norm/scale",)
    assert report.certificate.unexplained == len(report.ungauged) == 1


@pytest.mark.slow
def test_scales_that_are_stored_less_one_are_read_as_such() -> None:
    assert named(scale="one_plus") and named(scale="one_plus", layers=2, scanned=True)


@pytest.mark.parametrize("switches", [{"qk_norm": "rms"}, {"position": "half"}], ids=str)
def test_norms_that_do_not_centre_and_rotary_heads_have_none(switches: dict[str, Any]) -> None:
    assert not named(**switches)
