"""Runs a study by its name; without a name, lists all of them.

python -m examples.studies                              # the names
python -m examples.studies row_shift --seeds 42         # one study, with its options
"""

import sys
from pathlib import Path

from examples.studies import harness


def main() -> None:
    """Runs the study that the command line names."""
    folder = Path(__file__).parent
    sources = sorted((*folder.glob("*.py"), *folder.parent.glob("*.py")))
    names = [source.stem for source in sources if "\nSTUDY = " in source.read_text()]
    if len(sys.argv) < 2 or sys.argv[1] not in names:
        raise SystemExit(f"python -m examples.studies NAME [options]; NAME is one of: {', '.join(names)}")
    harness.main(harness.find(sys.argv[1]), sys.argv[2:])


if __name__ == "__main__":
    main()
