"""Writes examples/results/README.md, the table of all studies, from the JSON files beside it.

    python -m examples.studies.tables            # or: --results <folder>

To add a study, add a row to SECTIONS: its name, a heading, and the coordinates and statistics that its verdicts name.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from examples import cli, demo
from examples.studies import grokking, harness

RESULTS = Path(__file__).parents[1] / "results"
EARLIER, LATER = "7c6ca5f", "68d5793"
"""The commits that have the code of studies whose question is settled, and which were removed."""

INTRODUCTION = """# Results

This page has the training runs of the project: the demo, comparisons of optimizers, and small studies that test what
papers claim. Every number is read from a JSON file beside it (`python -m examples.studies.tables` writes this page).
Every sentence that says whether a finding shows is computed from the numbers, and names the coordinate or statistic
that it was read from: many findings are true in one coordinate and false in another. A section whose question is
settled stands as it was last written, and names the commit that has its code.

*The paper* is *Dead-Direction Conditioners*, whose appendix C has the studies C.1 to C.15, or, in sections of those
names, *Rotational Equilibrium* or *GaugeFix-LRM*. `python -m examples.studies <name> --out examples/results` makes a
JSON and its figure again (delete the old JSON first: finished runs are kept). The studies of appendix C that
are here run in seconds to three minutes on one CPU core, with three seeds, and at the paper's sizes
with `--full`. *Drift* is motion that changes no output: the largest distance from the start among some hundred readings
of a run, unless a column says otherwise. A loss is *matched* if it is at most twice the other's. [What training
gains](../../benchmarks/results/training.md) says what the runs mean for the choice of an optimizer. More runs:
[rounding to few bits](quantize.md), a released model [under LoRA](lora_weights.md), [rounded by Qwix](qwix_weights.md)
and [counted, fine-tuned and merged](measure_weights.md), [released architectures](released.md), [times and memory of
updates](../../benchmarks/results/compare_cpu.md), [LoRA factors](../../benchmarks/results/lora.md), [times of
`discover`](../../benchmarks/results/discover.md), [time to the first step](../../benchmarks/results/first_step.md),
[times beside the core before its parts](../../benchmarks/results/before_parts.md)."""


class Section(NamedTuple):
    """The section of one study on the page.

    Attributes:
      name: the name of its JSON and figure, most often that of the study too.
      heading: its heading on the page.
      by: coordinates and statistics, one of which every sentence with "shows" or "does not show" must name.
      markdown: parsed JSON → the section's text; None if the study of this name has a function for it.
      command: what makes the JSON, if that is not the study of this name.
      settled: the commit that has the code, if the code was removed. The text is then read from a file beside the JSON.
    """

    name: str
    heading: str
    by: tuple[str, ...] = ()
    markdown: Callable[[Any], str] | None = None
    command: str = ""
    settled: str = ""

    def text(self, results: Path) -> str:
        """The text of the section, after the command that makes it."""
        if self.settled:
            text = (results / f"{self.name}.md").read_text().strip()
            made = f"in commit {self.settled} `examples/studies/{self.name}.py` made this section"
            return f"The question is settled and its code gone; {made}. {text}"
        command = self.command or f"{self.name}.py"
        folder = "examples/studies" if (Path(__file__).parent / command.split()[0]).exists() else "examples"
        say = self.markdown or harness.find(self.name).section
        return f"`{folder}/{command}`. {say(json.loads((results / f'{self.name}.json').read_text()))}"


def _demo(runs: Any) -> str:
    said = ("Every optimizer trains twice, from two sets of weights that compute the same function. One seed, float32, "
            "2-core CPU; losses in nats per byte, the first three columns on the same training batch.")
    return f"{said}\n\n```\n{demo.table(runs)}\n```"


SECTIONS = [
    Section("demo", "Twins of a small language model", markdown=_demo),
    Section("twins_benchmark", "Twins by the protocol of arXiv 2608.05136", ("relative distance of the logits",)),
    Section("starts", "From three usual starts"),
    Section("kronecker", "Shampoo and SOAP inside quotient"),
    Section("whole_model", "Every symmetry of a decoder on the quotient", settled=EARLIER),
    Section("lora", "Fine-tuning with LoRA: rules, ranks and starts"),
    Section("merge", "Merging networks after alignment"),
    Section("released_weights", "Two released models, job by job"),
    Section("probe", "One probe for two networks", settled=EARLIER),
    Section("packed", "Packed heads: training what a gauge leaves"),
    Section("rotational_walk", "Rotational equilibrium: a random walk", ("norm and rotation over the prediction",),
            settled=LATER),
    Section("rotational_networks", "Rotational equilibrium: trained networks",
            ("norm over its prediction", "rotation over its prediction", "cos(g, m)", "rotation at the end")),
    Section("rotational_balance", "Rotational equilibrium: what imbalance costs", ("test loss",), settled=LATER),
    Section("rotational_rates", "Rotational equilibrium: rate, decay and warm-up", ("test loss", "validation loss"),
            settled=LATER),
    Section("rotational_variants", "Rotational equilibrium: variants and their options", ("held-out loss",),
            settled=LATER),
    Section("gaugefix_lrm", "GaugeFix-LRM: learnable multipliers, fixed, held and free",
            ("|log(s_Q/s_K)|", "s_Q·s_K", "validation loss", "gradient norm")),
    Section("gaugefix_networks", "GaugeFix-LRM: where multipliers drift",
            ("|log(s_Q/s_K)|", "s_Q·s_K", "validation loss"), settled=LATER),
    Section("row_shift", "C.1 Logit shift of a grokking transformer", ("norm of the mean column", "that norm")),
    Section("relu_rescale", "C.2 ReLU rescale, teacher and student"),
    Section("layernorm_scale", "C.3 LayerNorm scale"),
    Section("diagonal_network", "C.4 Diagonal linear network", ("log|u| − log|v|",)),
    Section("grokking", "Grokking, and whether it stays",
            ("norm of the output kernel's mean", "axis alignment of the hidden layer's dead directions")),
    Section("grokking_59", "Grokking at p = 59: with the projection, and without",
            ("norm of the output kernel's mean", "axis alignment of the hidden layer's dead directions"),
            grokking.STUDY.section, "grokking.py --p 59 --steps 8000 --grid-steps 2500"),
    Section("grokking_59_128", "C.9 Grokking at p = 59 with 128 hidden units",
            ("axis alignment of the hidden layer's dead directions",), grokking.STUDY.section,
            "grokking.py --p 59 --hidden 128 --steps 8000 --grid-steps 2500"),
    Section("overtraining_lm", "C.5 Over-training a language model",
            ("gap at the end", "validation loss", "number of readable cells"), settled=LATER),
    Section("depth24", "C.6 Grokking with 24 blocks", ("accuracy on held-out pairs", "the smallest singular value"),
            settled=LATER),
    Section("depth8", "C.7 and C.8 Grokking with 8 rotary blocks",
            ("accuracy on held-out pairs", "the variance of that accuracy", "whether 95% stay",
             "the smallest eigenvalue of the Fisher", "test loss", "the smallest singular value"), settled=LATER),
    Section("vit", "C.10 A vision transformer under weight decay",
            ("validation loss at the end", "number of dead units", "smallest singular value", "effective rank"),
            settled=LATER),
    Section("digit_addition", "C.13 Effective rank and the feed-forward block",
            ("effective rank before the block", "effective rank behind the block", "scale of the block"),
            settled=LATER),
    Section("sparse_parity", "C.14 Keeping or shedding a block: sparse parity",
            ("final accuracy", "final loss", "log|γ|")),
    Section("self_tests", "C.15 Equivariance self-tests"),
    Section("minimum", "C.1, C.4 and §5.8 read at a minimum",
            ("share along the orbit", "order k", "directional Fisher", "rotation of heads", "gap of twins")),
    Section("lemmas", "Theorem 1, Lemmas 17 and 23, Remarks 8 and 12", settled=EARLIER),
    Section("radial_equilibrium", "B.7 Where decay and loss balance", settled=EARLIER),
    Section(  # its text is made of sentences of other studies
        "table4", "DDC's Table 4, finding by finding",
        ("validation loss", "accuracy on held-out pairs", "the smallest eigenvalue of the Fisher", "readable cells",
         "axis alignment of the hidden layer's dead directions"),
        settled=EARLIER,
    ),
]


def page(results: Path) -> str:
    """The whole text of README.md. Studies without a JSON are left out."""
    parts = [INTRODUCTION]
    for section in SECTIONS:
        path = results / f"{section.name}.json"
        if path.exists() or section.settled:
            parts += [f"## {section.heading}", section.text(results)]
            parts += [f"![{section.heading}]({section.name}.png)"] * path.with_suffix(".png").exists()
    return "\n\n".join(parts) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    """Writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=cli.Help)
    parser.add_argument("--results", type=Path, default=RESULTS)
    results = parser.parse_args(argv).results
    (results / "README.md").write_text(page(results))
    print(f"wrote {results / 'README.md'}")


if __name__ == "__main__":
    main()
