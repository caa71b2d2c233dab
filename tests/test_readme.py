"""The README and what it leads to: blocks of Python run, and figures are those of the committed results."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gauge_optax as go
from examples import demo, lora
from examples.studies import starts
from examples.studies.harness import best, best_for_all

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
CHOOSE = (ROOT / "docs" / "guides" / "choose.md").read_text()
TRAINING = (ROOT / "benchmarks" / "results" / "training.md").read_text()


def result(path: str) -> Any:
    return json.loads((ROOT / path).read_text())


def test_it_has_at_most_130_lines() -> None:
    assert README.count("\n") <= 130


def test_the_guide_on_choosing_has_at_most_900_words() -> None:
    assert len(CHOOSE.split()) <= 900


def test_python_blocks_run_and_print_what_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    setting, training = re.findall(r"```python\n(.*?)```", README, re.S)
    names: dict[str, Any] = {}
    exec(compile(setting, "README.md", "exec"), names)
    shown = README.split("```python")[1].split("```\n")[2]  # the block after the code
    assert "3 gauges" in shown
    printed = capsys.readouterr().out
    for line in shown.splitlines():
        assert re.sub(r"[\d.]+e-\d+\)", "", line) in printed
    fresh = dict(names)
    exec(compile(training, "README.md", "exec"), names)
    assert capsys.readouterr().out.splitlines()[-1] == "True"
    exec(compile(training.replace("range(10)", "range(1)"), "README.md", "exec"), fresh)
    assert float(names["loss"]) < float(fresh["loss"]), "ten steps of the example do not train"


def test_table_is_the_committed_demo() -> None:
    shown = re.search(r"<!-- demo:begin -->\n```\n(.*?)\n```\n<!-- demo:end -->", README, re.S)
    assert shown is not None
    assert shown[1] == demo.table(result("examples/results/demo.json"))
    assert all(line in (demo.__doc__ or "") for line in shown[1].splitlines())


def gain(size: int, start: str, arm: str) -> tuple[str, str]:
    """What an arm's best loss differs from the plain arm's, in per cent: mean and deviation over seeds."""
    committed = result("examples/results/starts.json")
    sweeps = [starts.swept((size, start, name)).losses(committed) for name in (arm, starts.ARMS[arm].plain)]
    ours, plain = (np.array(losses[best(losses)]) for losses in sweeps)
    return f"{100 * ((ours / plain).mean() - 1):+.1f}", f"{100 * (ours / plain).std():.1f}"


@pytest.mark.parametrize(
    ("taken", "arm", "block", "measured", "plain"),
    [
        ("quotient(adamw)", "quotient-adamw", "adam", "quotient(optax.adamw)", "optax.adamw"),
        ("ddc_adamw", "ddc_adamw", "adam", "ddc_adamw", "optax.adamw"),
        ("quotient_muon", "quotient_muon", "muon", "quotient_muon", "optax.contrib.muon, per head"),
    ],
)
def test_a_row_of_the_choice_is_what_was_measured(taken: str, arm: str, block: str, measured: str, plain: str) -> None:
    row = re.search(rf"^\| `{re.escape(taken)}` \|((?:[^|]*\|){{6}}[^|]*)\|$", TRAINING, re.M)
    assert row is not None
    cells = [cell.strip().replace("\N{NO-BREAK SPACE}", " ") for cell in row[1].split("|")][1:]
    assert cells[:3] == ["{} ± {}".format(*gain(128, start, arm)) for start in starts.STARTS]
    rows = result("benchmarks/results/compare_cpu.json")["sections"]["gpt2"]["blocks"][block]
    ours, theirs = rows[measured], rows[plain]
    step, update = (ours[key][1] / theirs[key][1] for key in ("step_ratio", "ratio"))
    assert cells[3:] == [f"{x:.2f}" for x in (step, update, ours["peak_mb"] / theirs["peak_mb"])]


def test_times_of_updates_in_the_guide_on_choosing_are_what_was_measured() -> None:
    """Medians, on two CPU cores and on one GPU."""
    text, blocks = " ".join(CHOOSE.split()), result("benchmarks/results/compare_cpu.json")["sections"]["gpt2"]["blocks"]
    adam, muon = ({name: row["ratio"][1] for name, row in blocks[block].items()} for block in ("adam", "muon"))
    assert f"{adam['quotient(optax.adamw)']:.1f} × AdamW's ({adam['quotient(optax.adamw), hold=False']:.1f} " in text
    assert f"| {adam['ddc_adamw']:.1f} × AdamW's" in text and f"| {muon['quotient_muon']:.2f} × `optax.cont" in text
    assert f"takes {blocks['adam']['quotient(optax.adamw)']['step_ratio'][1]:.2f} × AdamW's with `quotient`" in text
    cells = result("benchmarks/results/accelerator_cpu.json")["cells"]
    beside = {name: row["ratio"][1] for name, row in cells["update | gpt2 | beside"].items()}
    assert f"| {cells['update | gpt2 | muon']['max_norm_muon']['ratio'][1]:.2f} × Muon's |" in CHOOSE
    short, shorter = (beside[f"compress_second_moments(optax.adamw){kind}"] for kind in ("", " in uint8"))
    assert f"| {short:.1f} × AdamW's with bfloat16, {shorter:.1f} × with uint8 |" in CHOOSE
    assert f"QK-clip | the ratio of both sides | {beside['hold_products(optax.adamw)']:.1f} × AdamW's |" in CHOOSE
    assert f"a step | {beside['rotational_adamw']:.1f} × AdamW's |" in CHOOSE
    gpu = result("benchmarks/results/accelerator_h200.json")["cells"]
    adam, muon = ({name: row["ratio"][1] for name, row in gpu[f"update | gpt2 | {block}"].items()}
                  for block in ("adam", "muon"))
    assert f"`quotient(optax.adamw)` takes {adam['quotient(optax.adamw)']:.1f} × AdamW's" in text
    assert f"take {muon['quotient_muon']:.1f} × and {muon['max_norm_muon']:.1f} × Muon's in TF32" in text
    found = result("benchmarks/results/precision.json")
    ms, devices = found["updates"], " ".join((ROOT / "docs" / "guides" / "devices.md").read_text().split())
    ours = [ms[name] / ms["optax.contrib.muon, float32 products"] for name in ("quotient_muon", "max_norm_muon")]
    assert "[{:.2f} × and {:.2f} ×](/results/precision.md) Muon's in float32".format(*ours) in text
    table = found["polar"].values()
    slower = sorted(rows["float32"]["ms"] / rows["TF32"]["ms"] for rows in table)
    assert "take {:.1f} to {:.1f} times as long as with TF32".format(*slower) in devices
    short, long = (max(rows[name]["equivariance"] for rows in table) for name in ("TF32", "float32"))
    assert f"an error of {short:.0g}, with float32 up to {long:.5f}," in devices


def test_what_adapters_and_a_step_cost_is_what_was_measured() -> None:
    (a, b), (c, d), (e, f) = (gain(64, start, "quotient-adamw") for start in starts.STARTS)
    assert f"{a} ± {b}, {c} ± {d} and {e} ± {f} %" in " ".join(TRAINING.split())
    rows = result("benchmarks/results/compare_cpu.json")["sections"]["gpt2"]["blocks"]["adam"]
    step = rows["quotient(optax.adamw)"]["step_ratio"][1] / rows["optax.adamw"]["step_ratio"][1]
    assert f"a step of GPT-2 takes [{step:.2f} × AdamW's time]" in README
    memory = rows["quotient(optax.adamw)"]["peak_mb"] / rows["optax.adamw"]["peak_mb"]
    assert f"an update {memory:.2f} × AdamW's memory" in README
    muon = result("benchmarks/results/accelerator_cpu.json")["cells"]["update | gpt2 | muon"]
    assert f"an update takes {muon['max_norm_muon']['ratio'][1]:.2f} × the time of Optax's Muon" in README
    guide = " ".join((ROOT / "docs" / "guides" / "lora.md").read_text().split())
    committed = result("examples/results/lora.json")

    def loss(rank: int, start: str, arm: str) -> float:
        losses = lora.swept((rank, start, arm)).losses(committed)
        return float(np.mean(losses[best(losses)]))

    worse = [100 * (loss(r, "badly scaled", "adamw") / loss(r, "balanced", "adamw") - 1) for r in lora.RANKS]
    assert f"ends {min(worse):.1f} to {max(worse):.1f} % higher" in guide
    for rank in lora.RANKS:
        ours = [loss(rank, start, "quotient_adamw") for start in ("balanced", "badly scaled")]
        assert ours[0] == pytest.approx(ours[1], rel=1e-4)
    speed = result("benchmarks/results/lora.json")["speed"]
    assert f"takes {speed['quotient_adamw']['median_ms'] / speed['optax.adamw']['median_ms']:.1f} times" in guide


def test_what_adapters_of_a_released_model_lose_by_one_rate_is_what_was_measured() -> None:
    cells = [(*key.split(" | "), x) for key, x in result("examples/results/lora_weights.json")["cells"].items()]
    sweeps = {arm: [{float(rate): x["validation"] for *group, rate, seed, x in cells
                     if group == [rank, arm] and seed == "42" and x["finite"]} for rank in ("4", "16", "64", "256")]
              for arm in ("adamw", "quotient_muon")}
    assert best_for_all(sweeps["quotient_muon"]) == (0.0063, 0.0)
    rates = [min(x, key=x.__getitem__) for x in sweeps["adamw"]]
    first, *_, last = (min(a.values()) - min(b.values()) for a, b in zip(*sweeps.values(), strict=True))
    guide = " ".join((ROOT / "docs" / "guides" / "lora.md").read_text().split())
    assert f"falls from {max(rates):g} to {min(rates):g}" in guide and rates == sorted(rates, reverse=True)
    assert f"costs {best_for_all(sweeps['adamw'])[1]:.3f} nats" in guide
    assert f"{-first:.3f} nats behind AdamW at rank 4 and {last:.3f} ahead at rank 256" in guide


# Validation losses of an independent run, whose records are not part of the repository: from LeCun-normal kernels, from
# 0.02 and from zero outputs.
INDEPENDENT = {"Muon": (1.383, 1.388, 1.383), "0.04": (1.416, 1.393, 1.409), "0.02": (1.375, 1.355, 1.374)}


def test_the_independent_run_stands_beside_our_own_comparison() -> None:
    """The page on training has its losses; page, guide and docstring say how far ahead it found `max_norm_muon`."""
    page, *others = (" ".join(text.split()) for text in (TRAINING, CHOOSE, go.max_norm_muon.__doc__ or ""))
    for losses in INDEPENDENT.values():
        assert "{}, {} and {}".format(*losses) in page
    ahead = [100 * (1 - ours / muon) for ours, muon in zip(INDEPENDENT["0.02"], INDEPENDENT["Muon"], strict=True)]
    assert all(ours > muon for ours, muon in zip(INDEPENDENT["0.04"], INDEPENDENT["Muon"], strict=True))
    for said in (page, *others):
        assert f"{min(ahead):.1f} to {max(ahead):.1f} % ahead" in said and "level or behind" in said


def test_the_best_rate_of_short_runs_is_the_committed_one() -> None:
    """0.04 in every place of the comparison, and what its neighbours add there."""
    cells, costs = result("benchmarks/results/track3.json")["cells"], []
    for size, steps in ((64, 400), (128, 200)):
        for start in starts.STARTS:
            ours = f"{size} | {start} | max_norm_muon | quotient, free | {steps}"
            sweeps: dict[str, dict[float, float]] = {}  # by decay: the loss at each rate
            for name, cell in cells.items():
                place, decay, rate, seed = name.rsplit(" | ", 3)
                if (place, seed) == (ours, "42"):
                    sweeps.setdefault(decay, {})[float(rate)] = cell["validation"]
            losses = max(sweeps.values(), key=len)
            rates = sorted(losses)
            assert min(losses, key=losses.__getitem__) == 0.04
            costs += [losses[rates[rates.index(0.04) + k]] - losses[0.04] for k in (-1, 1)]
    assert f"costs {min(costs):.2f} to {max(costs):.2f} nats there" in " ".join(TRAINING.split())


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", README))))
def test_links_exist(link: str) -> None:
    assert (ROOT / link).exists()


def test_what_rotations_gain_is_what_the_stored_runs_show() -> None:
    """Losses of a released model under Qwix's GPTQ and under rounding to nearest, and their differences by window."""
    qwix = result("examples/results/qwix_weights.json")["cells"]
    plain = {name: cell["loss"] for name, cell in result("examples/results/released_weights.json")["cells"].items()
             if name.startswith("round | SmolLM2")}
    exact = plain["round | SmolLM2 | released | exact"]
    said, shown = " ".join((ROOT / "docs" / "guides" / "spend.md").read_text().split()), [f"is {exact:.3f} nats"]
    for form in ("W4A16", "W4A8", "W4A4"):
        before, after = (np.asarray(qwix[f"GPTQ | {form} | {point}"]["windows"]) for point in ("released", "R1 and R2"))
        less = before - after
        shown.append(f"{less.mean():.3f} ± {less.std(ddof=1) / len(less) ** 0.5:.3f}")
    losses = [qwix[f"GPTQ | W4A16 | {point}"]["loss"] for point in ("released", "R1 and R2")]
    shown.append(f"ends at {losses[0]:.3f} from the released weights, and at {losses[1]:.3f} after")
    for form in ("W4A16", "W16A4"):
        before, after = (plain[f"round | SmolLM2 | {point} | {form}"] for point in ("released", "R1 and R2"))
        shown.append(f"from {before:.3f} to {after:.3f}")
    assert [x for x in shown if x not in said] == []
    assert f"adds {losses[1] - exact:.2f} nats per token to the loss, not {losses[0] - exact:.2f}" in README
