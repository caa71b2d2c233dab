"""The list of public symbols, and a page for each.

Here: which symbols, under which heading. Not here: what the pages look like (Sphinx).
"""

import inspect
import shutil
from pathlib import Path
from typing import Any

import gauge_optax as go

GROUPS: dict[str, tuple[str, ...]] = {
    "Optimizers": (
        "quotient", "quotient_adamw", "quotient_muon", "ddc_adamw", "ddc_muon", "from_state",
        "rotational", "rotational_adamw", "rotational_sgdm", "rotational_lion",
    ),
    "Links of a chain": (
        "gauge_project", "scale_by_ddc", "scale_by_scaled_polar", "scale_by_relative_rms", "scale_by_opposite_gram",
        "add_gauge_decay", "gauge_retract",
    ),
    "Around an optimizer": ("gauge_fix", "transport", "hyperball", "track", "track_balance", "track_rotation"),
    "Gauges": (
        "norm_scale", "rescale", "scale_invariant", "multiplier_balance",
        "logit_shift", "head_rotation", "rope_torus", "head_linear",
        "rope_linear", "product", "Gauge",
    ),
    "Gauges found": ("discover", "plan", "lora", "axes_by_name", "by_path", "to_json", "from_json"),
}  # fmt: skip
MODULES = {"Measures": go.measure, "Assertions": go.testing}


def paths() -> dict[str, list[str]]:
    """Heading → dotted paths of its symbols."""
    found = {heading: [f"gauge_optax.{name}" for name in names] for heading, names in GROUPS.items()}
    return found | {heading: _of(module) for heading, module in MODULES.items()}


def _of(module: Any) -> list[str]:
    names = getattr(module, "__all__", None) or [
        name for name, thing in vars(module).items()
        if inspect.isfunction(thing) and thing.__module__ == module.__name__ and not name.startswith("_")
    ]  # fmt: skip
    return [f"{module.__name__}.{name}" for name in sorted(names)]


def write(folder: Path) -> None:
    """One page per symbol, and an index with the first sentence of each."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    index = ["# Reference", ""]
    for heading, symbols in paths().items():
        index += [f"## {heading}", "", "| | |", "|---|---|"]
        for symbol in symbols:
            module, _, name = symbol.rpartition(".")
            thing = getattr({"gauge_optax": go, "gauge_optax.measure": go.measure}.get(module, go.testing), name)
            title = symbol.replace("gauge_optax.", "go.")
            summary = (inspect.getdoc(thing) or "").splitlines()[0].replace("|", "\\|")
            index.append(f"| [`{title}`]({symbol}.md) | {summary} |")
            kind = "autoclass" if inspect.isclass(thing) else "autofunction"
            members = "\n   :members:" if inspect.isclass(thing) else ""
            text = f"# {title}\n\n```{{eval-rst}}\n.. {kind}:: {symbol}{members}\n```\n"
            (folder / f"{symbol}.md").write_text(text)
        index.append("")
    index += ["```{toctree}", ":hidden:", "", *(symbol for own in paths().values() for symbol in own), "```", ""]
    (folder / "index.md").write_text("\n".join(index))
