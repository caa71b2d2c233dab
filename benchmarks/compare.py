"""Time, memory and compile time of our optimizers, of `optax.adamw`, `optax.contrib.muon`, and of PyTorch optimizers.

    python -m benchmarks.compare --out outputs/benchmarks      # everything; most of an hour on 2 CPU cores
    python -m benchmarks.compare --only "*gpt2" "*compile"     # some of the sections: a size, or a table
    python -m benchmarks.compare --out outputs/dry --only "*toy" --width 16 --layers 1 --repeats 3   # to try it

Runs on the default device, CPU or GPU. Optimizers are timed in *blocks*: all optimizers of a block run in turns in one
process, and times are given as ratios to the first of the block, its *base*. Writes compare_<device>.json and .md after
every section. The section `peers` needs the package's extra of this name.
"""

import argparse
import dataclasses
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

import jax
import numpy as np
import optax
from tqdm import tqdm

import gauge_optax as go
from benchmarks import peers, timing
from benchmarks.orthogonalisers import PLAIN, POLAR, orthogonalisers
from benchmarks.render import page
from benchmarks.sizes import SIZES, Case, Size, case
from benchmarks.timing import Timed, Update, device_peak, host, in_turns, nbytes, prepared, quartiles
from examples.studies import harness
from models import lm

RATE = 1e-6
"""The learning rate. It is so small that no eigenbasis drifts far enough to be refreshed while times are taken."""
PAUSE = 0.05
"""Seconds of pause before each call if PyTorch is timed too: threads of both libraries spin for a while after calls."""

Section = dict[str, Any]
Block = dict[str, optax.GradientTransformation]


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the comparison.

    They are the rounds in which updates and whole steps are timed (0 leaves steps out); a width and a number of layers
    for all models (0 leaves each model as it is); and the numbers of layers and the width for which compiling is timed.
    """

    repeats: int = 9
    step_repeats: int = 5
    width: int = 0
    layers: int = 0
    depths: str = "12 48"
    depths_width: int = 64

    def of(self, name: str) -> Size:
        """The model with this name in `SIZES`, with the width and layers of this configuration if they are not 0."""
        return SIZES[name].at(self.width, self.layers)


def blocks(sized: Case) -> dict[str, Block]:
    """Name of a block → its optimizers, which are timed in turns. The first one is the base of the ratios."""
    plain = {"optax.contrib.muon": sized.muon(RATE), "optax.contrib.muon, per head": sized.muon(RATE, per_head=True)}
    if jax.default_backend() != "cpu":
        # There the base's matrix products are in TF32, and ours in float32, which equivariance needs. This row is the
        # base with the same precision as ours.
        plain["optax.contrib.muon, float32 products"] = at_highest(sized.muon(RATE))
    adamw = optax.adamw(RATE, weight_decay=0.1)
    made = {
        "adam": {
            "optax.adamw": adamw,
            "quotient(optax.adamw)": go.quotient(adamw, sized.gauges),
            "quotient(optax.adamw), hold=False": go.quotient(adamw, sized.gauges, hold=False),
            "ddc_adamw": go.ddc_adamw(RATE, sized.gauges, weight_decay=0.1),
        },
        "muon": plain | {
            "quotient_muon": sized.quotient_muon(RATE), "ddc_muon": sized.ddc_muon(RATE),
            "max_norm_muon": sized.max_norm_muon(RATE),
        },
    }
    if sized.tokens is not None:  # the size with attention kernels alone has no norms, which `hold_products` needs
        made["beside"] = {
            "optax.adamw": adamw,
            "rotational_adamw": sized.rotational_adamw(RATE),
            "compress_second_moments(optax.adamw)": go.links.compress_second_moments(adamw),
            "compress_second_moments(optax.adamw) in uint8": go.links.compress_second_moments(adamw, "uint8"),
            "hold_products(optax.adamw)": sized.hold_products(adamw),
        }
    return made


def at_highest(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same optimizer with every matrix product in full precision."""

    def update(*args: Any) -> Any:
        with jax.default_matmul_precision("highest"):
            return tx.update(*args)

    return optax.GradientTransformation(tx.init, update)


def milliseconds(update: Timed) -> float:
    """The median time over rounds, in milliseconds."""
    return 1e3 * float(np.median(update.seconds))


def row(update: Any, base: Timed) -> Section:
    """The columns that every table has."""
    return {"ms": milliseconds(update), "ratio": quartiles(update, base), "state_mb": update.state_bytes / 1e6,
            "compile_s": update.compile_seconds}


def timed(block: Block, sized: Case, repeats: int, whole: bool = False) -> dict[str, Update]:
    """Compiles all optimizers of a block and times them in turns: their updates, or whole training steps (`whole`)."""
    given, loss = (sized.tokens, sized.loss) if whole else (sized.grads, None)
    made = {n: prepared(tx, sized.params, given, loss) for n, tx in tqdm(block.items(), "compile", leave=False)}
    in_turns(made, given, repeats)
    return made


def update_row(update: Update, base: Update, sized: Case) -> Section:
    """The columns of an optimizer in the table of updates."""
    others = {"device_peak_mb": device_peak(update, sized.grads), "least_peak_mb": update.least_peak_bytes}
    reported = {name: count / 1e6 for name, count in others.items() if count is not None}
    return row(update, base) | {"peak_mb": update.peak_bytes / 1e6} | reported


def update_rows(block: Block, sized: Case, repeats: int) -> dict[str, Section]:
    """Optimizer → its columns in the table of updates, for a block."""
    made = timed(block, sized, repeats)
    return {name: update_row(update, next(iter(made.values())), sized) for name, update in made.items()}


def step_columns(block: Block, sized: Case, repeats: int) -> dict[str, Section]:
    """Optimizer → its columns on whole steps (loss, gradient and update as one compiled function), for a block."""
    made = timed(block, sized, repeats, whole=True)
    base = next(iter(made.values()))
    return {n: {"step_ms": milliseconds(step), "step_ratio": quartiles(step, base)} for n, step in made.items()}


def size_section(c: Config, name: str) -> Section:
    """Measures one size. Blocks are measured one after the other, so that few states are in memory at once."""
    sized = case(c.of(name))
    section: Section = {
        "about": SIZES[name].about + "; here in other sizes" * bool(c.width or c.layers),
        "parameters": sum(x.size for x in jax.tree.leaves(sized.params)),
        "parameters_mb": nbytes(sized.params) / 1e6,
        "repeats": c.repeats,
        "blocks": {name: update_rows(block, sized, c.repeats) for name, block in blocks(sized).items()},
    }
    if sized.tokens is not None and c.step_repeats:
        batch, length = sized.tokens.shape
        section["step"] = {"batch": batch, "length": length - 1, "repeats": c.step_repeats}
        for name, block in blocks(sized).items():
            for row, columns in step_columns(block, sized, c.step_repeats).items():
                section["blocks"][name][row] |= columns
    return section


def orthogonaliser_section(c: Config) -> Section:
    """Measures the rows of Table 8 of the DDC paper (`benchmarks.orthogonalisers`)."""
    sized = case(c.of("attention"))
    rows = {name: optax.chain(tx, optax.scale(-RATE)) for name, tx in orthogonalisers(sized).items()}
    made, found = timed(rows, sized, c.repeats), {}
    for name, update in made.items():
        beyond = 1e3 * float(np.median(np.array(update.seconds) - np.array(made[POLAR].seconds)))
        beside_polar = {"of_polar": quartiles(update, made[POLAR]), "beyond_polar_ms": beyond}
        found[name] = update_row(update, made[PLAIN], sized) | beside_polar
    return {"repeats": c.repeats, "blocks": {"rows": found}}


COMPILED: Mapping[str, Callable[[Any, Any], optax.GradientTransformation]] = {
    "optax.adamw": lambda gauges, params: optax.adamw(RATE),
    "optax.contrib.muon": lambda gauges, params: Case(params, params, gauges).muon(RATE),
    "quotient(optax.adamw)": lambda gauges, params: go.quotient(optax.adamw(RATE), gauges),
    "ddc_adamw": lambda gauges, params: go.ddc_adamw(RATE, gauges),
    "ddc_muon": lambda gauges, params: go.ddc_muon(RATE, gauges),
}


def compile_section(c: Config) -> Section:
    """Measures the seconds to trace, lower and compile an update at several depths, without caches or arrays."""
    depths, rows = [int(layers) for layers in c.depths.split()], {}
    for name in COMPILED:
        seconds = [_compiled(name, SIZES["toy"].at(c.depths_width, layers).config) for layers in depths]
        rows[name] = {"seconds": seconds, "ratio": sum(seconds[-1]) / sum(seconds[0])}
    return {"depths": depths, "width": c.depths_width, "blocks": {"rows": rows}}


def _compiled(name: str, config: lm.LMConfig) -> list[float]:
    """The seconds of tracing, of lowering, and of compiling."""
    shapes = jax.eval_shape(lambda: lm.params_and_loss(config, jax.random.key(0))[0])
    tx = COMPILED[name](lm.gauges(config), shapes)
    state = jax.eval_shape(tx.init, shapes)
    jax.clear_caches()
    times = [time.perf_counter()]
    traced = jax.jit(timing.update_step(tx), donate_argnums=(0, 1)).trace(shapes, state, shapes)
    times.append(time.perf_counter())
    lowered = traced.lower()
    times.append(time.perf_counter())
    lowered.compile()
    times.append(time.perf_counter())
    return np.diff(times).tolist()


def peer_section(c: Config) -> Section:
    """Measures Muon and LoRA optimizers of PyTorch, and those of JAX."""
    config = c.of("attention").config
    sized, lora = case(c.of("attention")), peers.lora_case(4 * config.layers, config.d_model)
    section: Section = {"versions": peers.versions(), "repeats": c.repeats, "rank": peers.RANK,
                        "pairs": 4 * config.layers, "blocks": {}}
    made = {"muon": (peers.muon_rows(sized, RATE), sized.grads), "lora": (peers.lora_rows(lora, RATE), lora.grads)}
    for name, (block, given) in made.items():
        rows = {n: make() for n, make in block.items()}
        in_turns(rows, given, c.repeats, pause=PAUSE)
        base = next(iter(rows.values()))
        section["blocks"][name] = {n: row(update, base) for n, update in rows.items()}
    return section


TABLES = {"orthogonalisers": orthogonaliser_section, "compile": compile_section, "peers": peer_section}


def cells(c: Config, args: argparse.Namespace) -> harness.Cells:
    """One cell per section. The section of PyTorch optimizers is left out if they are not installed."""
    names = [*SIZES, *(name for name in TABLES if name != "peers" or peers.absent() is None)]
    return harness.by_name(
        names, lambda c, args, name: TABLES[name](c) if name in TABLES else size_section(c, name), "sections")(c, args)


def head(c: Config) -> harness.Result:
    """The header of the results: everything that must be equal for two runs that share a file."""
    versions = {name: version(name) for name in ("jax", "jaxlib", "optax")}
    return {"host": host(), "device": device(), "versions": versions, "sections": {}}


def device() -> str:
    """The name of the device as part of a file's name: cpu, h200, …"""
    return jax.devices()[0].device_kind.lower().removeprefix("nvidia ").replace(" ", "_")


STUDY = timing.benchmark(__doc__, lambda c: f"compare_{device()}", cells, page, config=Config(), head=head)

if __name__ == "__main__":
    harness.main(STUDY)
