"""Code that the training examples share: the command line, checkpoints, and the files that a run writes at its end."""

import argparse
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import matplotlib
import numpy as np
import orbax.checkpoint as ocp

from examples import cli

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def options(doc: str | None, name: str, steps: int = 300, rate: float = 3e-3) -> argparse.ArgumentParser:
    """The command line of a training run, described by `doc`, an example's docstring. Examples may add options."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=cli.Help)
    parser.add_argument("--data", type=Path, help="text to train on, by default the standard library's sources")
    parser.add_argument("--out", type=Path, default=Path("outputs") / name, help="checkpoints, PNG, JSON")
    parser.add_argument("--steps", type=int, default=steps, help="to train in all")
    parser.add_argument("--rate", type=float, default=rate, help="peak learning rate, after 20 steps of warm-up")
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights")
    parser.add_argument("--stop-after", type=int, help="save and leave after this step, as if killed")
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--batch", type=int, default=16, help="sequences")
    parser.add_argument("--length", type=int, default=64, help="tokens of a sequence")
    parser.add_argument("--width", type=int, default=64, help="d_model")
    parser.add_argument("--layers", type=int, default=2, help="blocks")
    return parser


def parse(doc: str | None, name: str, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line of an example that adds no options of its own."""
    return options(doc, name).parse_args(argv)


class Checkpoints:
    """Orbax checkpoints of one run: a state (a tree of arrays), and the losses so far (as JSON)."""

    def __init__(self, out: Path) -> None:
        self.manager = ocp.CheckpointManager(
            (out / "checkpoints").resolve(), options=ocp.CheckpointManagerOptions(max_to_keep=2)
        )

    def save(self, step: int, state: Any, losses: Sequence[Any]) -> None:
        """Saves state and losses under the number of steps taken. Returns when they are on disk."""
        meta = ocp.args.JsonSave({"losses": list(losses)})
        self.manager.save(step, args=ocp.args.Composite(state=ocp.args.StandardSave(state), meta=meta))
        self.manager.wait_until_finished()

    def restore(self, abstract: Any) -> tuple[Any, list[Any]] | None:
        """The state of the latest checkpoint, structured like `abstract`, and its losses; None if there is none."""
        step = self.manager.latest_step()
        if step is None:
            return None
        wanted = ocp.args.Composite(state=ocp.args.StandardRestore(abstract), meta=ocp.args.JsonRestore())
        saved = self.manager.restore(step, args=wanted)
        return saved["state"], saved["meta"]["losses"]

    def close(self) -> None:
        """Stops Orbax's threads."""
        self.manager.close()


def digest(tree: Any) -> str:
    """SHA-256 of all bytes of a tree. Two runs with equal digests have ended at bit-equal weights."""
    sha = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        sha.update(np.asarray(leaf).tobytes())
    return sha.hexdigest()[:16]


def report(
    name: str, out: Path, losses: Sequence[float], validation: float, params: Any, optimizer: str = "ddc_adamw"
) -> dict[str, Any]:
    """Prints how a run ended, and writes the loss curve as PNG and all results as JSON."""
    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    axis.plot(np.arange(1, len(losses) + 1), losses, lw=1, label="training, each batch")
    axis.axhline(validation, color="tab:orange", ls="--", label=f"validation at the end: {validation:.3f}")
    axis.set(title=f"{name}: {optimizer} on bytes of text", xlabel="step", ylabel="nats per byte")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(out / "loss.png", dpi=120)
    plt.close(figure)

    result: dict[str, Any] = {"steps": len(losses), "validation": validation, "sha256": digest(params)}
    result["losses"] = list(losses)
    (out / "result.json").write_text(json.dumps(result, indent=1))
    print(f"validation loss {validation:.4f} after {len(losses)} steps; weights {result['sha256']}")
    print(f"wrote {out}/loss.png and {out}/result.json")
    return result
