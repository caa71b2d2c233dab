"""Draws docs/_static/architecture.svg from the imports of the package: `python -m docs.architecture`.

A box is a folder of `gauge_optax`, or a file beside its folders. It stands one row above the highest box that it
imports from. An arrow leads from the importing box to the imported one. `tests/test_structure.py` compares the picture
with the code.
"""

import ast
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGE, PICTURE = ROOT / "gauge_optax", ROOT / "docs" / "_static" / "architecture.svg"

# Box → the x coordinate of its middle in the picture, and the words below its name. `picture` computes its row.
BOXES = {
    "measure": (270, "drift, curvature"), "orbit": (270, "choose the weights"), "links": (416, "links of a chain"),
    "tools": (104, "plan, check, lora"), "states": (270, "states that move"), "ddc": (416, "the paper's Adam"),
    "discovery": (104, "finds gauges, axes"), "optimizers": (340, "quotient, Muon"), "testing": (580, "assertions"),
    "norms": (104, "steps and bounds"), "gauges": (300, "the symmetries"), "wrapped": (104, "inside wrappers"),
    "slice": (300, "the slice point"), "frozen": (104, "leaves that stay"), "parts": (300, "add, multiply, turn"),
    "transformation": (480, "checks, meshes"), "binding": (230, "paths and axes"), "linalg": (384, "small matrices"),
    "traced": (104, "reads programs"), "errors": (300, "messages"), "xla": (520, "for the compiler"),
}  # fmt: skip
# For arrows that pass other rows on their way down: (from, to) → the x coordinate at which the arrow passes these rows.
# Arrows that are not listed pass them straight above the box to which they lead.
LANES = {("measure", "discovery"): 187, ("discovery", "traced"): 12, ("tools", "frozen"): 26, ("tools", "wrapped"): 26,
         ("norms", "frozen"): 188, ("testing", "transformation"): 540}  # fmt: skip
# The boxes whose code one update runs; they are blue in the picture.
PASSED = {"binding", "gauges", "linalg", "optimizers", "parts", "slice", "transformation"}


class Step(NamedTuple):
    """A station of an update, and the function that does it."""

    word: str
    formula: str
    file: str
    function: str


STEPS = (
    Step("bind", "gauges → parts", "gauges/bound.py", "bound"),
    Step("slice", "θ̂ = F⁻¹·θ", "slice.py", "Slice.enter"),
    Step("project", "ĝ = Fᵀ·g", "optimizers/_quotient.py", "slice_gradient"),
    Step("inner step", "u = inner(ĝ, θ̂)", "transformation.py", "checked_inner"),
    Step("retract", "θ̂′ = fix(θ̂ + u)", "slice.py", "Slice.fix"),
)
WIDTH, BOX, HEIGHT, ROW, TOP = 680, 136, 38, 62, 170
HEAD = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {} {}" font-family="Helvetica, Arial, sans-serif"
 text-anchor="middle"><style>rect {{ stroke: #444 }} path {{ fill: none; stroke: #777 }}</style>
<marker id="tip" viewBox="0 0 8 8" refX="4" refY="4" markerWidth="7" markerHeight="7" orient="auto">
<path d="M0 0L8 4L0 8z" style="fill:#777;stroke:none"/></marker>
<path d="M0 0H2000V2000H0z" style="fill:#fff;stroke:none"/>
"""


def imports() -> dict[str, set[str]]:
    """Box → the boxes that its files import from."""
    edges: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        box = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if box != "__init__":
            nodes = [x for x in ast.walk(ast.parse(path.read_text())) if isinstance(x, ast.ImportFrom)]
            dotted = [f"{x.module}.{alias.name}".split(".") for x in nodes for alias in x.names]
            edges.setdefault(box, set()).update(x[1] for x in dotted if x[0] == "gauge_optax" and x[1] != box)
    return edges


def level(box: str, edges: dict[str, set[str]]) -> int:
    """The row of a box; row 0 is the lowest, and its boxes import from no other box."""
    return 1 + max((level(below, edges) for below in edges[box]), default=-1)


def below(box: str, edges: dict[str, set[str]]) -> set[str]:
    """All boxes that a box imports from, directly or through others."""
    return edges[box].union(*(below(x, edges) for x in edges[box]))


def text(x: float, y: float, words: str, size: float = 11, more: str = "") -> str:
    """The SVG of one line of words with its middle at x."""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" {more}>{words}</text>'


def frame(x: float, y: float, height: int, title: str, passed: bool, width: int = BOX) -> list[str]:
    """The SVG of a box with a title; (x, y) is the middle of its upper side. Boxes that an update passes are blue."""
    fill = "#cfe3fa" if passed else "#fff"
    rect = f'<rect x="{x - width / 2:g}" y="{y:g}" width="{width}" height="{height}" rx="5" fill="{fill}"/>'
    return [rect, text(x, y + 16, title, 12.5, 'font-weight="bold"')]


def picture() -> str:
    """The SVG file."""
    edges = imports()
    levels = {box: level(box, edges) for box in edges}
    top = {box: TOP + ROW * (max(levels.values()) - levels[box]) for box in edges}
    out = [text(WIDTH / 2, 22, "One training step: quotient(optax.adamw(…), gauges).update", 14)]
    for k, step in enumerate(STEPS):
        x = 72 + 134 * k
        out += [*frame(x, 36, 72, f"{k + 1} {step.word}", True, 120), text(x, 76, step.formula, 12)]
        out.append(text(x, 98, step.function, 11, 'font-family="monospace"'))
        out += [f'<path d="M{x + 61} 72h8" marker-end="url(#tip)"/>'] * (step is not STEPS[-1])
    out.append(text(WIDTH / 2, 138, "The code: arrows mean “imports from”. Arrows that others imply are left out."))
    out.append(text(WIDTH / 2, 154, "The step above runs through the blue boxes."))
    arrows = [(x, to) for x in edges for to in sorted(edges[x]) if not any(to in below(y, edges) for y in edges[x])]
    for box, to in arrows:
        x, y, end_x, end_y = BOXES[box][0], top[box] + HEIGHT, BOXES[to][0], top[to]
        line, lane = f"M{x} {y}", LANES.get((box, to), end_x)
        if levels[box] - levels[to] > 1:
            line += f"C{x} {y + 14} {lane} {y + 6} {lane} {y + ROW - HEIGHT}V{end_y - ROW + HEIGHT}"
            x, y = lane, end_y - ROW + HEIGHT
        line += f"C{x} {y + 14} {end_x} {end_y - 20} {end_x} {end_y - 5}"
        out.append(f'<path d="{line}" marker-end="url(#tip)"/>')
    for box, y in top.items():
        x, what = BOXES[box]
        title = f"{box}/" if (PACKAGE / box).is_dir() else f"{box}.py"
        out += [*frame(x, y, HEIGHT, title, box in PASSED), text(x, y + 31, what)]
    return HEAD.format(WIDTH, max(top.values()) + HEIGHT + 12) + "\n".join(out) + "\n</svg>\n"


if __name__ == "__main__":
    PICTURE.write_text(picture())
