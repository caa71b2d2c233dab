"""Studies of training runs, all on one harness: `python -m examples.studies NAME`."""
