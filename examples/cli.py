"""The format of the examples' help texts: an example's docstring, unchanged, and the default of every option."""

import argparse


class Help(argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of descriptions, and shows defaults, but not None or False."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        silent = action.default in (None, False, argparse.SUPPRESS) or "default" in (action.help or "")
        return action.help if silent else f"{action.help or ''} (default: %(default)s)".strip()
