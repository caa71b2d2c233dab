"""That the benchmarks run and say what they measured; their figures are not tested."""

import json
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import pytest

from benchmarks import accelerator, compare, counts, peers, sizes, timing
from examples.studies import harness
from models import lm

SMALL = ["--layers", "1", "--width", "16", "--repeats", "2", "--depths", "1 2"]


@pytest.mark.slow
def test_a_comparison_is_printed_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A later run of other sections adds to the file and leaves the rest."""
    out = [*SMALL, "--out", str(tmp_path), "--only"]
    harness.main(compare.STUDY, [*out, "*attention"])
    harness.main(compare.STUDY, [*out, "*compile", "*orthogonalisers"])
    found = json.loads((tmp_path / "compare_cpu.json").read_text())["sections"]
    assert set(found) == {"compile", "attention", "orthogonalisers"}
    rows = found["attention"]["blocks"]["muon"]
    assert rows["optax.contrib.muon"]["ratio"] == [1.0, 1.0, 1.0]
    assert all(row[column] > 0 for row in rows.values() for column in ("ms", "peak_mb", "compile_s"))
    assert found["compile"]["blocks"]["rows"]["optax.adamw"]["ratio"] > 0
    text = (tmp_path / "compare_cpu.md").read_text()
    assert text in capsys.readouterr().out and "## attention" in text and "| ddc_muon |" in text


def test_what_an_accelerator_is_asked_runs_here_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A cell of each kind, in small."""
    kinds = ["update | toy | adam", "step | gpt2 | adam", "train | AdamW | 0.001", "twins | highest"]
    small = ["--width", "32", "--layers", "1", "--repeats", "1", "--step-repeats", "1", "--steps", "2"]
    cells = harness.main(accelerator.STUDY, [*small, "--out", str(tmp_path), "--only", *kinds])["cells"]
    twins = cells["twins | highest"]
    assert twins["optax.adamw"] > 100 * max(twins["quotient(optax.adamw)"], twins["quotient_muon"])
    page = (tmp_path / "accelerator_cpu.md").read_text()
    assert set(cells) == set(kinds) and "Not run yet" not in page and "| quotient(optax.adamw) |" in page
    assert "**Twins.**" in capsys.readouterr().out


def test_peers_are_left_out_where_they_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_PACKAGES", {"no_such_module": "no-such-package"})
    config, args = harness.parse(compare.STUDY, [])
    assert ("sections", "peers") not in compare.cells(config, args)
    monkeypatch.setattr(peers, "_PACKAGES", {"json": "jax"})
    assert ("sections", "peers") in compare.cells(config, args)


@pytest.mark.skipif(peers.absent() is not None, reason=str(peers.absent()))
@pytest.mark.filterwarnings("default")
def test_a_peer_takes_steps() -> None:
    """LoRA-RITE: HeavyBall compiles for a minute."""
    rows: dict[str, Any] = {name: make() for name, make in peers.lora_rows(peers.lora_case(2, 32), 1e-3).items()}
    timing.in_turns(rows, peers.lora_case(2, 32).grads, 2)
    assert all(len(row.seconds) == 2 for row in rows.values())
    assert rows["pytorch_optimizer.LoRARite"].state_bytes > 0


def test_both_muons_have_the_same_leaves() -> None:
    """Adam keeps two moments of a leaf, Muon one: arrays of every matrix's shape are counted in the states."""
    config = lm.LMConfig(23, d_model=16, layers=2, heads=2, kv_heads=2, d_head=8, d_ff=40, max_len=29, mlp="swiglu")
    params, _ = lm.params_and_loss(config, jax.random.key(0))
    axes = jax.tree.leaves(sizes.muon_axes(params), is_leaf=lambda x: hasattr(x, "output_axis"))
    assert len(axes) == config.layers * 7
    case = sizes.Case(params, params, lm.gauges(config), labels=sizes.LABELS)
    states = [jax.eval_shape(tx.init, params) for tx in (case.muon(1e-3), case.ddc_muon(1e-3))]
    wanted, found = (Counter(x.shape for x in jax.tree.leaves(state)) for state in states)
    for shape in {x.shape for x in jax.tree.leaves(params) if x.ndim > 2 or (x.ndim == 2 and min(x.shape) > 8)}:
        assert found[shape] == wanted[shape], shape


def committed(name: str) -> Any:
    return json.loads((timing.RESULTS / f"{name}.json").read_text())


def test_committed_outputs_stay_and_discover_rejects_nothing() -> None:
    """Two cells are over their limits, each by less than a factor of two, and the page says so."""
    assert all(not row["rejected"] for row in committed("discover")["cases"].values())
    assert [row["change"] <= 1e-5 for row in committed("orbit")["rows"].values()] == [True] * 6, "of GPT-2"
    rows = committed("exactness")["rows"]
    assert len(rows) == 42
    for dtype, limit in (("float64", 1e-12), ("float32", 1e-5)):
        cells = [x for row in rows.values() for x in row[dtype].values() if isinstance(x, float)]
        assert len(cells) >= 200 and max(cells) <= 2 * limit and sum(x > limit for x in cells) <= 1


@pytest.mark.skipif(committed("compare_cpu")["versions"]["jaxlib"] != version("jaxlib"), reason="another XLA's plans")
def test_the_peak_of_quotient_is_what_was_measured() -> None:
    """A peak needs no quiet machine: where the code's has changed, the stored times are of other code, too."""
    row, peak = "quotient(optax.adamw)", "prepared(blocks(sized)['adam'][{!r}], sized.params, sized.grads).peak_bytes"
    found = timing.alone("benchmarks.compare", f"(lambda sized: {peak.format(row)})(case(SIZES['attention']))")
    stored = committed("compare_cpu")["sections"]["attention"]["blocks"]["adam"][row]["peak_mb"]
    assert found == pytest.approx(1e6 * stored, rel=0.03)


def test_what_a_program_moves_is_counted() -> None:
    """Operands and results of kernels; not what lies on chip, and an asynchronous copy once."""
    program = """
ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %start = (f32[8]{0:S(1)}, f32[8]{0}, u32[]{:S(2)}) copy-start(%a), metadata={op_name="%a"}
  %done = f32[8]{0:S(1)} copy-done(%start)
  %f = (f32[8]{0}, bf16[4,2]{1,0:T(8,128)}) fusion(%done, %a), kind=kLoop, calls=%f_computation
  %x = f32[8]{0} get-tuple-element(%f), index=0
  ROOT %r = f32[8]{0} fusion(%x), kind=kLoop, calls=%r_computation
}
"""
    assert counts.traffic(program) == (3, 32 + (32 + 32 + 16) + (32 + 32))


def test_an_update_is_counted(tmp_path: Path) -> None:
    """AdamW moves what it has to and little more; the page has a row each."""
    args = ["--platforms", "cpu", "--sizes", "toy", "--width", "16", "--layers", "1", "--only", "*adamw*"]
    result = harness.main(counts.STUDY, [*args, "--out", str(tmp_path)])
    (rows,) = (by_platform["cpu"] for by_platform in result["sizes"].values())
    assert 1.0 <= rows["optax.adamw"]["gbyte"] / rows["optax.adamw"]["limit_gbyte"] < 2.0
    assert rows["quotient(optax.adamw)"]["kernels"] > rows["optax.adamw"]["kernels"]
    assert (tmp_path / "counts.md").read_text().count("\n| quotient(optax.adamw)") == 2
