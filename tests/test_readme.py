"""The README and what it leads to: blocks of Python run, and figures are those of the committed results."""

import itertools
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
GPT2 = "update | gpt2"


def result(path: str) -> Any:
    return json.loads((ROOT / path).read_text())


def cpu(block: str) -> Any:
    """Rows of the comparison on two CPU cores."""
    return result("benchmarks/results/compare_cpu.json")["sections"]["gpt2"]["blocks"][block]


def ratios(rows: Any) -> dict[str, float]:
    """The medians of times, of the plain optimizer's."""
    return {name: row["ratio"][1] for name, row in rows.items()}


def text(path: str) -> str:
    """A page without its line breaks."""
    return " ".join((ROOT / path).read_text().split())


def says(path: str, *sentences: str) -> None:
    """All of these stand on the page."""
    assert [x for x in sentences if x not in text(path)] == [], path


CHOOSE, TRAINING, LORA = "docs/guides/choose.md", "benchmarks/results/training.md", "docs/guides/lora.md"


def test_pages_are_short() -> None:
    assert README.count("\n") <= 130 and len((ROOT / CHOOSE).read_text().split()) <= 900


def test_python_blocks_run_and_print_what_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    setting, training = re.findall(r"```python\n(.*?)```", README, re.S)
    names: dict[str, Any] = {}
    exec(compile(setting, "README.md", "exec"), names)
    shown, printed = README.split("```python")[1].split("```\n")[2], capsys.readouterr().out  # the block after the code
    assert "3 gauges" in shown
    assert len({re.sub(r"[\d.]+e-\d+\)", "", block.strip()) for block in (shown, printed)}) == 1
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


def gain(size: int, start: str, arm: str) -> str:
    """What an arm's best loss differs from the plain arm's, in per cent: mean and deviation over seeds."""
    committed = result("examples/results/starts.json")
    sweeps = [starts.swept((size, start, name)).losses(committed) for name in (arm, starts.ARMS[arm].plain)]
    ours, plain = (np.array(losses[best(losses)]) for losses in sweeps)
    return f"{100 * ((ours / plain).mean() - 1):+.1f} ± {100 * (ours / plain).std():.1f}"


@pytest.mark.parametrize(("taken", "arm", "block", "measured", "plain"), [
    ("quotient(adamw)", "quotient-adamw", "adam", "quotient(optax.adamw)", "optax.adamw"),
    ("ddc_adamw", "ddc_adamw", "adam", "ddc_adamw", "optax.adamw"),
    ("quotient_muon", "quotient_muon", "muon", "quotient_muon", "optax.contrib.muon, per head"),
])
def test_a_row_of_the_choice_is_what_was_measured(taken: str, arm: str, block: str, measured: str, plain: str) -> None:
    row = re.search(rf"^\| `{re.escape(taken)}` \|((?:[^|]*\|){{6}}[^|]*)\|$", (ROOT / TRAINING).read_text(), re.M)
    assert row is not None
    cells = [cell.strip().replace("\N{NO-BREAK SPACE}", " ") for cell in row[1].split("|")][1:]
    assert cells[:3] == [gain(128, start, arm) for start in starts.STARTS]
    ours, theirs = cpu(block)[measured], cpu(block)[plain]
    step, update = (ours[key][1] / theirs[key][1] for key in ("step_ratio", "ratio"))
    assert cells[3:] == [f"{x:.2f}" for x in (step, update, ours["peak_mb"] / theirs["peak_mb"])]


def test_times_of_updates_in_the_guides_are_what_was_measured() -> None:
    """Medians, on two CPU cores and on one GPU."""
    adam, muon, beside = (ratios(cpu(block)) for block in ("adam", "muon", "beside"))
    short, shorter = (beside[f"compress_second_moments(optax.adamw){kind}"] for kind in ("", " in uint8"))
    gpu = result("benchmarks/results/accelerator_h200.json")["cells"]
    gpu_adam, gpu_muon = (ratios(gpu[f"{GPT2} | {block}"]) for block in ("adam", "muon"))
    found = result("benchmarks/results/precision.json")
    ms, polar = found["updates"], found["polar"].values()
    exact = [ms[name] / ms["optax.contrib.muon, float32 products"] for name in ("quotient_muon", "max_norm_muon")]
    says(CHOOSE, f"{adam['quotient(optax.adamw)']:.1f} × AdamW's ({adam['quotient(optax.adamw), hold=False']:.1f} ",
         f"| {adam['ddc_adamw']:.1f} × AdamW's", f"| {muon['quotient_muon']:.2f} × `optax.cont",
         f"takes {cpu('adam')['quotient(optax.adamw)']['step_ratio'][1]:.2f} × AdamW's with `quotient`",
         f"| {muon['max_norm_muon']:.2f} × Muon's |",
         f"| {short:.1f} × AdamW's with bfloat16, {shorter:.1f} × with uint8 |",
         f"QK-clip | the sides keep their ratio | {beside['hold_products(optax.adamw)']:.1f} × AdamW's |",
         f"mean angles | {beside['rotational_adamw']:.1f} × AdamW's |",
         f"`quotient(optax.adamw)` took {gpu_adam['quotient(optax.adamw)']:.1f} × AdamW's",
         f"take {gpu_muon['quotient_muon']:.1f} × and {gpu_muon['max_norm_muon']:.1f} × Muon's in TF32",
         "[{:.2f} × and {:.2f} ×](/results/precision.md) Muon's in float32".format(*exact))
    slower = sorted(rows["float32"]["ms"] / rows["TF32"]["ms"] for rows in polar)
    tf32, float32 = (max(rows[name]["equivariance"] for rows in polar) for name in ("TF32", "float32"))
    says("docs/guides/devices.md", "take {:.1f} to {:.1f} times as long as with TF32".format(*slower),
         f"an error of {tf32:.0g}, with float32 up to {float32:.5f},")


def test_what_adapters_and_a_step_cost_is_what_was_measured() -> None:
    says(TRAINING, "{}, {} and {} %".format(*(gain(64, start, "quotient-adamw") for start in starts.STARTS)))
    ours, adamw = cpu("adam")["quotient(optax.adamw)"], cpu("adam")["optax.adamw"]
    muon = ratios(cpu("muon"))
    says("README.md", f"a step of GPT-2 takes [{ours['step_ratio'][1] / adamw['step_ratio'][1]:.2f} × AdamW's time]",
         f"an update {ours['peak_mb'] / adamw['peak_mb']:.2f} × AdamW's memory",
         f"an update takes {muon['max_norm_muon']:.2f} × the time of Optax's Muon")
    committed = result("examples/results/lora.json")

    def losses(start: str, arm: str) -> np.ndarray:
        """Of the best rate, by rank."""
        sweeps = [lora.swept((rank, start, arm)).losses(committed) for rank in lora.RANKS]
        return np.array([np.mean(sweep[best(sweep)]) for sweep in sweeps])

    worse = 100 * (losses("badly scaled", "adamw") / losses("balanced", "adamw") - 1)
    one, other = (losses(start, "quotient_adamw") for start in ("balanced", "badly scaled"))
    np.testing.assert_allclose(one, other, rtol=1e-4)
    ms = {name: row["median_ms"] for name, row in result("benchmarks/results/lora.json")["speed"].items()}
    says(LORA, f"ends {worse.min():.1f} to {worse.max():.1f} % higher",
         f"takes {ms['quotient_adamw'] / ms['optax.adamw']:.1f} times")


def test_what_adapters_of_a_released_model_lose_by_one_rate_is_what_was_measured() -> None:
    cells = [(*key.split(" | "), x) for key, x in result("examples/results/lora_weights.json")["cells"].items()]
    sweeps = {arm: [{float(rate): x["validation"] for *group, rate, seed, x in cells
                     if group == [rank, arm] and seed == "42" and x["finite"]} for rank in ("4", "16", "64", "256")]
              for arm in ("adamw", "quotient_muon")}
    assert best_for_all(sweeps["quotient_muon"]) == (0.0063, 0.0)
    rates = [min(x, key=x.__getitem__) for x in sweeps["adamw"]]
    assert rates == sorted(rates, reverse=True)
    first, *_, last = (min(a.values()) - min(b.values()) for a, b in zip(*sweeps.values(), strict=True))
    says(LORA, f"falls from {max(rates):g} to {min(rates):g}", f"costs {best_for_all(sweeps['adamw'])[1]:.3f} nats",
         f"{-first:.3f} nats behind AdamW at rank 4 and {last:.3f} ahead at rank 256")


# Validation losses of an independent run, whose records are not part of the repository: from LeCun-normal kernels, from
# 0.02 and from zero outputs.
INDEPENDENT = {"Muon": (1.383, 1.388, 1.383), "0.04": (1.416, 1.393, 1.409), "0.02": (1.375, 1.355, 1.374)}


def test_the_independent_run_stands_beside_our_own_comparison() -> None:
    """The page on training has its losses; page, guide and docstring say how far ahead it found `max_norm_muon`."""
    ahead = [100 * (1 - ours / muon) for ours, muon in zip(INDEPENDENT["0.02"], INDEPENDENT["Muon"], strict=True)]
    assert all(ours > muon for ours, muon in zip(INDEPENDENT["0.04"], INDEPENDENT["Muon"], strict=True))
    said = f"{min(ahead):.1f} to {max(ahead):.1f} % ahead", "level or behind"
    says(TRAINING, *said, *("{}, {} and {}".format(*losses) for losses in INDEPENDENT.values()))
    says(CHOOSE, *said)
    assert all(x in " ".join((go.max_norm_muon.__doc__ or "").split()) for x in said)


def test_the_best_rate_of_short_runs_is_the_committed_one() -> None:
    """0.04 in every place of the comparison, and what its neighbours add there."""
    cells, costs = result("benchmarks/results/track3.json")["cells"], []
    for (size, steps), start in itertools.product(((64, 400), (128, 200)), starts.STARTS):
        sweeps: dict[str, dict[float, float]] = {}  # by decay: the loss at each rate
        for name, cell in cells.items():
            place, decay, rate, seed = name.rsplit(" | ", 3)
            if (place, seed) == (f"{size} | {start} | max_norm_muon | quotient, free | {steps}", "42"):
                sweeps.setdefault(decay, {})[float(rate)] = cell["validation"]
        losses = max(sweeps.values(), key=len)
        rates = sorted(losses)
        assert min(losses, key=losses.__getitem__) == 0.04
        costs += [losses[rates[rates.index(0.04) + k]] - losses[0.04] for k in (-1, 1)]
    says(TRAINING, f"costs {min(costs):.2f} to {max(costs):.2f} nats there")


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", README))))
def test_links_exist(link: str) -> None:
    assert (ROOT / link).exists()


def test_what_rotations_gain_is_what_the_stored_runs_show() -> None:
    """Losses of a released model under Qwix's GPTQ and under rounding to nearest, and their differences by window."""
    qwix = result("examples/results/qwix_weights.json")["cells"]
    plain = {name: cell["loss"] for name, cell in result("examples/results/released_weights.json")["cells"].items()
             if name.startswith("round | SmolLM2")}
    exact = plain["round | SmolLM2 | released | exact"]
    points, shown = ("released", "R1 and R2"), []
    losses = [qwix[f"GPTQ | W4A16 | {point}"]["loss"] for point in points]
    for form in ("W4A16", "W4A8", "W4A4"):
        less = -np.diff([qwix[f"GPTQ | {form} | {point}"]["windows"] for point in points], axis=0)
        shown.append(f"{less.mean():.3f} ± {less.std(ddof=1) / less.size ** 0.5:.3f}")
    for form in ("W4A16", "W16A4"):
        rounded = (plain[f"round | SmolLM2 | {point} | {form}"] for point in points)
        shown.append("from {:.3f} to {:.3f}".format(*rounded))
    ends = f"ends at {losses[0]:.3f} from the released weights, and at {losses[1]:.3f} after"
    says("docs/guides/spend.md", f"is {exact:.3f} nats", ends, *shown)
    says("README.md", f"adds {losses[1] - exact:.2f} nats per token to the loss, not {losses[0] - exact:.2f}")


def test_the_memory_of_a_wide_layer_is_what_was_measured() -> None:
    rows = result("benchmarks/results/compare_cpu.json")["sections"]["1b_layer"]["blocks"]["adam"]
    usual, least = (rows["ddc_adamw"][key] / rows["optax.adamw"][key] for key in ("peak_mb", "least_peak_mb"))
    says("docs/guides/recipes.md", f"takes {usual:.2f} times AdamW's memory in that order, and {least:.2f} times in")
