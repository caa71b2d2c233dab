"""Our optimizers beside `optax.adamw`, `optax.contrib.muon` and PyTorch peers: time, memory, compile time, one table.

    python -m benchmarks.compare                               # everything; most of an hour on 2 CPU cores
    python -m benchmarks.compare --sizes gpt2 --tables         # one size
    python -m benchmarks.compare --sizes --tables peers        # one table; needs the extra `peers`
    python -m benchmarks.compare --sizes toy --tables --only ddc_muon --repeats 3

Runs on the default device, CPU or GPU. Every ratio is taken in one process, in turns with its base. Writes
compare_<device>.json and .md to benchmarks/results/ after every block; what a run does not measure stays as it was,
unless machine or versions have changed.
"""

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from tqdm import tqdm

import gauge_optax as go
from benchmarks import peers
from benchmarks.orthogonalisers import PLAIN, POLAR, orthogonalisers
from benchmarks.render import page
from benchmarks.sizes import SIZES, Case, Size, case, muon_axes
from benchmarks.timing import Timed, Update, device_peak, host, in_turns, nbytes, prepared, quartiles, update_step
from models import lm

RATE = 1e-6
"""Small, so that no eigenbasis drifts to a refresh while times are taken."""
COMPILED = ("optax.adamw", "optax.contrib.muon", "quotient(optax.adamw)", "ddc_adamw", "ddc_muon")
TABLES = ("orthogonalisers", "compile", "peers")
PAUSE = 0.05
"""Seconds before every call beside PyTorch: either library's threads spin for some milliseconds after theirs."""

Section = dict[str, Any]
Block = dict[str, optax.GradientTransformation]


def blocks(sized: Case) -> dict[str, Block]:
    """What is timed together; the first row of each is its base."""
    plain: Block = {
        "optax.contrib.muon": sized.muon(RATE),
        "optax.contrib.muon, per head": sized.muon(RATE, per_head=True),
    }
    if jax.default_backend() != "cpu":
        # The base's products are TF32 there, ours float32, as equivariance needs.
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
    if sized.tokens is not None:  # attention alone has no norms, whose products with kernels could be held
        made["beside"] = {
            "optax.adamw": adamw,
            "rotational_adamw": sized.rotational_adamw(RATE),
            "compress_second_moments(optax.adamw)": go.links.compress_second_moments(adamw),
            "compress_second_moments(optax.adamw) in uint8": go.links.compress_second_moments(adamw, "uint8"),
            "hold_products(optax.adamw)": sized.hold_products(adamw),
        }
    return made


def at_highest(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same optimizer with every matrix product at full precision."""

    def update(*args: Any) -> Any:
        with jax.default_matmul_precision("highest"):
            return tx.update(*args)

    return optax.GradientTransformation(tx.init, update)


def chosen(block: Mapping[str, Any], only: Sequence[str]) -> dict[str, Any]:
    """The rows whose name contains one of these, after their base; nothing where there are none."""
    base, *others = block
    kept = [name for name in others if any(part in name for part in only)]
    return {name: block[name] for name in [base, *kept]} if kept or any(part in base for part in only) else {}


def milliseconds(update: Timed) -> float:
    """Median over rounds."""
    return 1e3 * float(np.median(update.seconds))


def row(update: Any, base: Timed) -> Section:
    """The columns every table has."""
    return {
        "ms": milliseconds(update),
        "ratio": quartiles(update, base),
        "state_mb": update.state_bytes / 1e6,
        "compile_s": update.compile_seconds,
    }


def timed(block: Block, sized: Case, repeats: int, whole: bool = False) -> dict[str, Update]:
    """Every optimizer of a block, timed in turns: its update, or the whole step."""
    given, loss = (sized.tokens, sized.loss) if whole else (sized.grads, None)
    made = {n: prepared(tx, sized.params, given, loss) for n, tx in tqdm(block.items(), "compile", leave=False)}
    in_turns(made, given, repeats)
    return made


def update_row(update: Update, base: Update, sized: Case) -> Section:
    """The columns of an update."""
    others = {"device_peak_mb": device_peak(update, sized.grads), "least_peak_mb": update.least_peak_bytes}
    reported = {name: count / 1e6 for name, count in others.items() if count is not None}
    return row(update, base) | {"peak_mb": update.peak_bytes / 1e6} | reported


def update_rows(block: Block, sized: Case, repeats: int) -> dict[str, Section]:
    """A block's rows."""
    made = timed(block, sized, repeats)
    base = next(iter(made.values()))
    return {name: update_row(update, base, sized) for name, update in made.items()}


def step_columns(block: Block, sized: Case, repeats: int) -> dict[str, Section]:
    """A block's columns on loss, gradient and update as one compiled function."""
    made = timed(block, sized, repeats, whole=True)
    base = next(iter(made.values()))
    return {n: {"step_ms": milliseconds(step), "step_ratio": quartiles(step, base)} for n, step in made.items()}


def size_section(size: Size, args: argparse.Namespace) -> Iterator[Section]:
    """One size, as far as it is measured; blocks come one after the other, to hold few states at once."""
    sized = case(size)
    section: Section = {
        "about": size.about if args.width is None and args.layers is None else f"{size.about}; here in other sizes",
        "parameters": sum(x.size for x in jax.tree.leaves(sized.params)),
        "parameters_mb": nbytes(sized.params) / 1e6,
        "repeats": args.repeats,
        "blocks": {},
    }
    whole = sized.tokens is not None and args.step_repeats > 0
    if sized.tokens is not None and whole:
        batch, length = sized.tokens.shape
        section["step"] = {"batch": batch, "length": length - 1, "repeats": args.step_repeats}
    for name, block in blocks(sized).items():
        if rows := chosen(block, args.only):
            section["blocks"][name] = updates = update_rows(rows, sized, args.repeats)
            yield section
            if whole:
                columns = step_columns(rows, sized, args.step_repeats)
                section["blocks"][name] = {n: updates[n] | columns[n] for n in updates}
                yield section


def orthogonaliser_section(args: argparse.Namespace) -> Iterator[Section]:
    """Table 8 of the DDC paper."""
    sized = case(SIZES["attention"].at(args.width, args.layers))
    rows = chosen(orthogonalisers(sized), [*args.only, POLAR])
    made = timed({n: optax.chain(tx, optax.scale(-RATE)) for n, tx in rows.items()}, sized, args.repeats)
    plain, polar = made[PLAIN], made[POLAR]
    updates = {}
    for name, update in made.items():
        beyond = 1e3 * float(np.median(np.array(update.seconds) - np.array(polar.seconds)))
        beside_polar = {"of_polar": quartiles(update, polar), "beyond_polar_ms": beyond}
        updates[name] = update_row(update, plain, sized) | beside_polar
    yield {"repeats": args.repeats, "blocks": {"rows": updates}}


def compile_section(args: argparse.Namespace) -> Iterator[Section]:
    """Seconds to trace, lower and compile an update at several depths, from nothing, on shapes alone."""
    rows: Section = {}
    section: Section = {"depths": args.depths, "width": args.depths_width, "blocks": {"rows": rows}}
    for name in chosen(dict.fromkeys(COMPILED), args.only):
        seconds = [_compiled(name, SIZES["toy"].at(args.depths_width, layers).config) for layers in args.depths]
        rows[name] = {"seconds": seconds, "ratio": sum(seconds[-1]) / sum(seconds[0])}
        yield section


def _compiled(name: str, config: lm.LMConfig) -> list[float]:
    """Seconds of tracing, lowering, compiling."""
    shapes = jax.eval_shape(lambda: lm.params_and_loss(config, jax.random.key(0))[0])
    gauges = lm.gauges(config)
    tx = {
        "optax.adamw": lambda: optax.adamw(RATE),
        "optax.contrib.muon": lambda: optax.contrib.muon(RATE, muon_weight_dimension_numbers=muon_axes(shapes)),
        "quotient(optax.adamw)": lambda: go.quotient(optax.adamw(RATE), gauges),
        "ddc_adamw": lambda: go.ddc_adamw(RATE, gauges),
        "ddc_muon": lambda: go.ddc_muon(RATE, gauges),
    }[name]()
    state = jax.eval_shape(tx.init, shapes)
    jax.clear_caches()
    times = [time.perf_counter()]
    traced = jax.jit(update_step(tx), donate_argnums=(0, 1)).trace(shapes, state, shapes)
    times.append(time.perf_counter())
    lowered = traced.lower()
    times.append(time.perf_counter())
    lowered.compile()
    times.append(time.perf_counter())
    return np.diff(times).tolist()


def peer_section(args: argparse.Namespace) -> Iterator[Section]:
    """Muon and LoRA optimizers of PyTorch beside JAX's."""
    if why := peers.absent():
        yield {"absent": why}
        return
    size = SIZES["attention"].at(args.width, args.layers)
    sized, lora = case(size), peers.lora_case(4 * size.config.layers, size.config.d_model)
    section: Section = {
        "versions": peers.versions(), "repeats": args.repeats, "rank": peers.RANK, "pairs": 4 * size.config.layers,
        "blocks": {},
    }
    for name, block, given in (
        ("muon", peers.muon_rows(sized, RATE), sized.grads),
        ("lora", peers.lora_rows(lora, RATE), lora.grads),
    ):
        if rows := {n: make() for n, make in chosen(block, args.only).items()}:
            in_turns(rows, given, args.repeats, pause=PAUSE)
            base = next(iter(rows.values()))
            section["blocks"][name] = {n: row(update, base) for n, update in rows.items()}
            yield section


def sections(args: argparse.Namespace) -> Iterator[tuple[str, Section]]:
    """Everything asked for, by name, each as often as there is more of it."""
    for name in args.sizes:
        yield from ((name, section) for section in size_section(SIZES[name].at(args.width, args.layers), args))
    tables = {"orthogonalisers": orthogonaliser_section, "compile": compile_section, "peers": peer_section}
    for name in args.tables:
        yield from ((name, section) for section in tables[name](args))


def merged(old: Any, new: Any, levels: int) -> Any:
    """The new figures, and of the old those that were not taken again, down to so many levels of the tree."""
    if not (levels and isinstance(old, dict) and isinstance(new, dict)):
        return new
    return {k: merged(old[k], new[k], levels - 1) if k in old and k in new else (old | new)[k] for k in old | new}


def device() -> str:
    """The device in a file's name: cpu, h200, …"""
    return jax.devices()[0].device_kind.lower().removeprefix("nvidia ").replace(" ", "_")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", nargs="*", choices=SIZES, default=list(SIZES))
    parser.add_argument("--tables", nargs="*", choices=TABLES, default=list(TABLES))
    parser.add_argument("--repeats", type=int, default=9, help="rounds of updates")
    parser.add_argument("--step-repeats", type=int, default=5, help="rounds of whole steps; 0 leaves them out")
    parser.add_argument("--only", nargs="*", default=[""], help="rows whose name contains one of these, and their base")
    parser.add_argument("--width", type=int, help="of every size, to try the command out")
    parser.add_argument("--layers", type=int, help="of every size, likewise")
    parser.add_argument("--depths", type=int, nargs="*", default=[12, 48], help="layers at which compiling is timed")
    parser.add_argument("--depths-width", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> Section:
    """Measure, print and write."""
    args = parse(argv)
    about = {
        "host": host(), "device": device(),
        "versions": {name: version(name) for name in ("jax", "jaxlib", "optax")},
    }
    args.out.mkdir(parents=True, exist_ok=True)
    json_file, page_file = (args.out / f"compare_{device()}.{kind}" for kind in ("json", "md"))
    result: Section = about | {"sections": {}}
    if json_file.exists():
        old = json.loads(json_file.read_text())
        if {k: old.get(k) for k in about} == about:
            result = old
    before = dict(result["sections"])
    levels = 2 if args.only == [""] else 3  # whole blocks are taken anew, or some of their rows
    progress = tqdm(sections(args), unit="block")
    for name, section in progress:
        progress.set_postfix_str(name)
        if "absent" in section and name in before:
            continue
        result["sections"][name] = merged(before.get(name), section, levels)
        json_file.write_text(json.dumps(result, indent=1))
        page_file.write_text(page(json.loads(json_file.read_text())))
    text = page(json.loads(json.dumps(result)))
    print(text)
    return result


if __name__ == "__main__":
    main()
