"""How the examples' help texts look: an example's docstring as it is written, and the default of every option."""

import argparse


class Help(argparse.RawDescriptionHelpFormatter):
    """Descriptions as they are written; defaults, but for those that say nothing."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        silent = action.default in (None, False, argparse.SUPPRESS) or "default" in (action.help or "")
        return action.help if silent else f"{action.help or ''} (default: %(default)s)".strip()
