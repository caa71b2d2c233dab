"""Sphinx settings: `make docs` builds the site into build/docs; warnings are errors.

Notebooks and results live elsewhere in the repository and are copied beside the pages before a build; pages of public
symbols are written from what the packages export. Notebooks are shown with the outputs that they store, which the tests
compare with a fresh run.
"""

import ast
import importlib.metadata
import inspect
import re
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Any

ROOT, DOCS = Path(__file__).resolve().parent.parent, Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from docs import symbols

# Pages from elsewhere in the repository → where they are on the site, in the order of the menu.
COPIED = {
    "README.md": "overview.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "notebooks/README.md": "notebooks/index.md",
    "examples/results/README.md": "results/index.md",
    "benchmarks/results/training.md": "results/training.md",
    "examples/results/released.md": "results/released.md",
    "examples/results/quantize.md": "results/quantize.md",
    "examples/results/lora_weights.md": "results/lora_weights.md",
    "examples/results/qwix_weights.md": "results/qwix_weights.md",
    "examples/results/measure_weights.md": "results/measure_weights.md",
    "benchmarks/results/tuned.md": "results/tuned.md",
    "benchmarks/results/rates.md": "results/rates.md",
    "benchmarks/results/track3.md": "results/track3.md",
    "benchmarks/results/transfer.md": "results/transfer.md",
    "benchmarks/results/compare_cpu.md": "results/compare_cpu.md",
    "benchmarks/results/accelerator_h200.md": "results/accelerator_h200.md",
    "benchmarks/results/accelerator_h100_80gb_hbm3.md": "results/accelerator_h100.md",
    "benchmarks/results/precision.md": "results/precision.md",
    "benchmarks/results/counts.md": "results/counts.md",
    "benchmarks/results/lora.md": "results/lora_factors.md",
    "benchmarks/results/discover.md": "results/discover_times.md",
    "benchmarks/results/unprepared.md": "results/unprepared.md",
    "benchmarks/results/first_step.md": "results/first_step.md",
    "benchmarks/results/before_parts.md": "results/before_parts.md",
    "benchmarks/results/side_by_side.md": "results/side_by_side.md",
}

# Link of such a page → where it leads on the site. Links to other files of the repository become plain names.
PAGES = {source: f"/{target}" for source, target in COPIED.items() if target != "overview.md"} | {
    **{Path(x).name: f"/results/{Path(x).name}" for x in COPIED if x.startswith("examples/") and "README" not in x},
    "notebooks": "/notebooks/index.md",
}

# Pages that the menu lists under the page of results (`results/index.md`).
RESULTS = "\n".join(Path(x).stem for x in COPIED.values() if x.startswith("results/") and x != "results/index.md")

project = "gauge_optax"
author = "the gauge_optax authors"
copyright = "2026, the gauge_optax authors"
version = release = importlib.metadata.version("gauge_optax")

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["overview.md"]
default_role = "code"
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "off"
suppress_warnings = ["myst.header", "mystnb.unknown_mime_type"]

autodoc_typehints = "none"
napoleon_google_docstring, napoleon_numpy_docstring = True, False
napoleon_use_rtype = False
napoleon_custom_sections = [("Reference", "notes_style"), ("References", "notes_style")]

# MathJax 3.2.2 is a file of the site, so that formulas need no network. Its menu would fetch more parts.
mathjax_path = "mathjax/tex-svg.js"
mathjax3_config = {"options": {"enableMenu": False}}

html_theme = "sphinx_book_theme"
html_title = "gauge_optax"
html_static_path, html_css_files = ["_static"], ["site.css"]
html_search_scorer = str(DOCS / "_static" / "scorer.js")  # guides before the changelog
# The bar above the page stays empty, because the sidebar has the search field. On a phone the sidebar is folded away,
# and the article's header has a button for the search.
navbar: dict[str, Any] = {f"navbar_{part}": [] for part in ("start", "center", "end", "persistent")}
html_theme_options = {"show_toc_level": 2} | navbar


def as_written(
    app: Any, what: str, name: str, thing: Any, options: Any, signature: str | None, returns: str | None
) -> tuple[str | None, str | None] | None:
    """The signature as the source has it: Sphinx alone would replace each alias of a type by its long definition."""
    if what not in ("function", "method") or not inspect.isfunction(inspect.unwrap(thing)):
        return None
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(thing))))
    except (OSError, TypeError):
        return None
    function = tree.body[0]
    if not isinstance(function, ast.FunctionDef):
        return None
    arguments = function.args
    if what == "method" and arguments.args and arguments.args[0].arg in ("self", "cls"):
        arguments.args = arguments.args[1:]
    gives = ast.unparse(function.returns) if function.returns is not None else None
    return f"({ast.unparse(arguments)})", None if gives in (None, "None") else gives


def prepare(app: Any) -> None:
    """Before a build: copies notebooks, pictures and pages from elsewhere to docs/, and writes the pages of symbols."""
    for folder, sources in {
        "notebooks": sorted((ROOT / "notebooks").glob("*.ipynb")),
        "results": [
            *sorted((ROOT / "examples" / "results").glob("*.png")),
            *((ROOT / "benchmarks" / "results" / name) for name in ("track3.png", "transfer.png")),
        ],
    }.items():
        (DOCS / folder).mkdir(exist_ok=True)
        for path in sources:
            shutil.copy(path, DOCS / folder)
    for source, target in COPIED.items():
        (DOCS / target).write_text(moved((ROOT / source).read_text()))
    notebooks = "\n".join(path.stem for path in sorted((ROOT / "notebooks").glob("*.ipynb")))
    with (DOCS / "notebooks" / "index.md").open("a") as page:
        page.write(f"\n```{{toctree}}\n:hidden:\n\n{notebooks}\n```\n")
    with (DOCS / "results" / "index.md").open("a") as page:
        page.write("\n```{toctree}\n:hidden:\n\n" + RESULTS + "\n```\n")
    symbols.write(DOCS / "api")


def moved(text: str) -> str:
    """The text of a page of the repository, with its links replaced by those that work on the site."""

    def link(hit: re.Match[str]) -> str:
        mark, label, goes = hit[1], hit[2], hit[3].removeprefix("../../")
        if mark:
            return f"![{label}]({'/results/' + Path(goes).name})"
        if goes.startswith("docs/"):
            return f"[{label}]({goes.removeprefix('docs')})"
        if goes in PAGES:
            return f"[{label}]({PAGES[goes]})"
        kept = goes.startswith(("http", "#")) or goes.endswith(".ipynb")
        return hit[0] if kept else label if label.startswith("`") else f"`{goes}`"

    return re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", link, text)


def setup(app: Any) -> None:
    """Sphinx calls this function: it registers `prepare` and `as_written`."""
    app.connect("builder-inited", prepare)
    app.connect("autodoc-process-signature", as_written)
