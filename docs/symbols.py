"""Writes the reference: one page per public symbol, and an index under the headings of `gauge_optax.__all__`.

The headings are the comments in `gauge_optax/__init__.py`, so that a new name is written in one place. Sphinx decides
what the pages look like.
"""

import importlib
import inspect
import re
import shutil
from pathlib import Path
from typing import Any

import gauge_optax as go

INTRODUCTION = """Every public name has a page with its arguments, what it returns and raises, and an example that the
tests run. `go` is `gauge_optax`.

A *gauge* is a symmetry of a model: moves of its weights that leave the loss as it is. One such move is an *element*.
All weights that the moves reach are an *orbit*; they compute one function. The *slice* contains one point of every
orbit, and the *frame* is the element that leads from that point to the weights at `init`; it is read from one block
of weights per gauge, the *anchor*. A part of a step along the orbit is *vertical*, the rest is *horizontal*. [How
gauge_optax works](../design.md) explains these words."""
MODULES = {
    "Orbits": go.orbit, "Norms and rotation": go.norms, "Further links": go.links, "Paths and JSON": go.tools,
    "Measures": go.measure, "Assertions": go.testing,
}


def groups() -> dict[str, list[str]]:
    """Heading → public names. The headings are the comments in `__all__`, each above the names that it groups."""
    source = Path(go.__file__).read_text()
    listing = source[source.index("__all__ = [") :]
    grouped: dict[str, list[str]] = {}
    for line in listing[listing.index("\n") : listing.index("\n]")].splitlines():
        text = line.strip()
        if text.startswith("# "):
            heading = text.removeprefix("# ").rstrip(".")
            grouped[heading] = []
        elif text:
            grouped[heading] += re.findall(r'"(\w+)"', text)
    return grouped


def paths() -> dict[str, list[str]]:
    """Heading → dotted paths of symbols. Public modules, such as `go.orbit`, have headings of their own (`MODULES`)."""
    modules = {module.__name__ for module in MODULES.values()}
    dotted = {heading: [f"gauge_optax.{name}" for name in names] for heading, names in groups().items()}
    symbols = {heading: listed for heading, listed in dotted.items() if not modules & set(listed)}
    return symbols | {heading: _public(module) for heading, module in MODULES.items()}


def _public(module: Any) -> list[str]:
    """Dotted paths of a module's public names: those in its `__all__`, or else all functions that it defines."""
    names = getattr(module, "__all__", None) or [
        name for name, symbol in vars(module).items()
        if inspect.isfunction(symbol) and symbol.__module__ == module.__name__ and not name.startswith("_")
    ]
    return [f"{module.__name__}.{name}" for name in names]


def write(folder: Path) -> None:
    """Writes a page per symbol, and an index with the first line of each docstring."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    index, pages = ["# Reference", "", INTRODUCTION, ""], []
    for heading, symbols in paths().items():
        index += [f"## {heading}", "", "| | |", "|---|---|"]
        for path in symbols:
            module, _, name = path.rpartition(".")
            symbol = getattr(importlib.import_module(module), name)
            title = path.replace("gauge_optax.", "go.")
            summary = (inspect.getdoc(symbol) or "").splitlines()[0].replace("|", "\\|")
            index.append(f"| [`{title}`]({path}.md) | {summary} |")
            kind = "autoclass" if inspect.isclass(symbol) else "autofunction"
            members = "\n   :members:\n   :inherited-members:" if inspect.isclass(symbol) else ""
            text = f"# {title}\n\n```{{eval-rst}}\n.. {kind}:: {path}{members}\n```\n"
            (folder / f"{path}.md").write_text(text)
            pages.append(f"{title.removeprefix('go.')} <{path}>")  # a phone's menu has room for 30 letters
        index.append("")
    index += ["```{toctree}", ":hidden:", "", *pages, "```", ""]
    (folder / "index.md").write_text("\n".join(index))
