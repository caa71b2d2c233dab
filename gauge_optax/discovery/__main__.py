"""`python -m gauge_optax.discovery my.module:build` prints the report of a model, and its gauges and axes as source.

`build` takes no argument and returns (fn, params, batches), the arguments of `gauge_optax.discover`.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import get_args

from gauge_optax.discovery.checks import Outputs
from gauge_optax.discovery.report import discover


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the report, then gauges and axes as source.

    Args:
      arguments: those of the command line, without the program's name; None reads `sys.argv`.

    Returns:
      The exit status: 0, or 1 if `discover` refuses the function.
    """
    parser = argparse.ArgumentParser(prog="python -m gauge_optax.discovery", description=__doc__)
    parser.add_argument("build", metavar="module:function", help="returns (fn, params, batches)")
    parser.add_argument("--outputs", choices=get_args(Outputs), help="by default, as fn shows")
    parser.add_argument("--near", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    name, _, function = chosen.build.partition(":")
    if not function or not all(part.isidentifier() for part in name.split(".")):
        parser.error(f"{chosen.build!r}: write module:function, as in my.module:build")
    sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        parser.error(f"{chosen.build!r}: {error}")
    build = getattr(module, function, None)
    if not callable(build):
        problem = f"{name} has no attribute {function!r}" if build is None else f"{name}.{function} is no function"
        parser.error(f"{chosen.build!r}: {problem}; write one that returns (fn, params, batches)")
    built = build()
    if not isinstance(built, tuple | list) or len(built) != 3:
        count = f"{len(built)} values" if isinstance(built, tuple | list) else type(built).__name__
        parser.error(f"{chosen.build!r}: it returns {count}, not (fn, params, batches)")
    fn, params, batches = built
    try:
        report = discover(
            fn, params, batches, outputs=chosen.outputs, near=chosen.near, seed=chosen.seed,
            progress=sys.stderr.isatty(),
        )
    except ValueError as error:
        if "\n  remedy:" not in str(error):
            raise  # not one of this library's errors, which name a remedy: it comes from the user's function
        sys.stderr.write(f"{error}\n")
        return 1
    lists = f"gauges = {report.code()}\n\nwhole = {report.code(report.whole)}"
    sys.stdout.write(f"{report}\n\n{lists}\n\n{report.axes}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
