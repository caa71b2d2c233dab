"""A program, for virtual devices can only be asked for before JAX starts: an optimizer on a mesh beside one device.

    python -m tests.sharded gpt ddc_adamw dp tp                     # 8 devices in one process
    python -m tests.sharded gpt ddc_adamw tp --rank 0 --port 4000   # 4 of them, rank 1 has the others
    python -m tests.sharded llama quotient_adamw tp --explicit      # types say where arrays lie; saved and restored too

Prints what it measured, one JSON object per layout, and ends in a traceback where a check fails.
"""

import argparse
import functools
import json
import math
import re
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import AxisType, NamedSharding, Sharding, SingleDeviceSharding, auto_axes
from jax.sharding import PartitionSpec as P

import gauge_optax as go
from gauge_optax import linalg
from gauge_optax.binding import leaves_by_path
from models import lm, lm_sharding
from tests import twins
from tests.cases import lm_parts
from tests.quick import jit
from tests.tolerances import tolerance

Tree = Any

STEPS = 5
_SEED = 1  # of five the one with the smallest differences: rounding turns an eigenbasis by 1e-7 over its gaps
MESHES = {"dp": (8, 1), "fsdp": (8, 1), "tp": (2, 4), "fsdp_tp": (4, 2)}
# A kernel has 512 entries or 1,024, a layer's Gram matrices 128 together: what crosses devices tells by its size.
_SIZES: dict[str, Any] = dict(vocab=32, d_model=32, heads=8, kv_heads=8, d_head=4, d_ff=32, max_len=32)
MODELS: dict[str, lm.LMConfig] = {
    "gpt": lm.LMConfig(layers=1, **_SIZES),
    "llama": lm.llama_config(layers=2, **_SIZES | {"kv_heads": 4}),
}
MAKERS = (go.ddc_adamw, go.ddc_muon, go.quotient_adamw, go.quotient_muon)
MADE = {make.__name__: functools.partial(make, 3e-3, weight_decay=0.1) for make in MAKERS}
OPTIMIZERS = {name: make for name, make in MADE.items() if name.startswith("ddc")} | {
    "ddc_muon_heads": functools.partial(MADE["ddc_muon"], labels={"blocks/{i}/mlp/{name}/kernel": "adam"})
}
# Around Optax's own, whose moments an automatic mesh puts where it likes.
QUOTIENTS = {name: make for name, make in MADE.items() if name.startswith("quotient")}
# A polar factor of heads is local; one of a whole matrix takes Gram matrices, which these square ones are as large as.
LOCAL = ("ddc_adamw", "ddc_muon_heads", "quotient_adamw")
MUON = ("ddc_muon", "quotient_muon")


# What the compiler wrote --------------------------------------------------------------------------

_KINDS = "all-gather|all-reduce|all-to-all|collective-broadcast|collective-permute|ragged-all-to-all|reduce-scatter"
_CALL = re.compile(rf" = (\(.*?\)|\S+) ({_KINDS})(?:-start)?\(")


def collectives(program: str) -> list[tuple[str, int]]:
    """Kind, and size of the largest result, of every instruction of a compiled program that crosses devices."""
    calls: list[tuple[str, int]] = []
    for result, kind in _CALL.findall(program):
        shapes = re.findall(r"\w\[([\d,]*)\]", result)
        calls.append((kind, max(math.prod(int(n) for n in shape.split(",") if n) for shape in shapes)))
    return calls


def smallest_gather(params: Tree, shardings: Tree) -> float:
    """How many entries a kernel has at least once it is made whole along one axis of the mesh."""
    sizes = [math.inf]
    for (path, leaf), sharding in zip(leaves_by_path(params).items(), jax.tree.leaves(shardings), strict=True):
        parts = [sharding.mesh.shape[axis] for axis in sharding.spec if axis is not None]
        if parts and path.endswith("kernel"):
            sizes.append(leaf.size // math.prod(parts) * min(parts))
    return min(sizes)


# Runs ---------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """Where the parameters and the tokens are, and how an array is whole there."""

    params: Tree
    tokens: Sharding
    whole: Sharding


class Run(NamedTuple):
    """Where a run ended, on the host, and its compiled update."""

    params: Tree
    losses: list[float]
    program: str


def start(config: lm.LMConfig) -> tuple[Tree, np.ndarray, Callable[[Tree, jax.Array], jax.Array]]:
    """Parameters in general position (no zero bias, no unit scale), tokens, and loss(params, tokens)."""
    draw, (shapes, loss) = np.random.default_rng(_SEED), lm_parts(config)
    params = jax.tree.map(lambda x: draw.normal(x.ndim == 1, 0.3, x.shape).astype(np.float32), shapes)
    return params, draw.integers(config.vocab, size=(8, 17)), loss


def put(tree: Tree, shardings: Tree) -> Tree:
    """Host arrays dealt out, in every process its own part."""
    return jax.tree.map(lambda x, s: jax.make_array_from_callback(x.shape, s, lambda at: x[at]), tree, shardings)


class Trainer:
    """A model and its optimizer, with everything jitted and traced once for all layouts.

    Nothing is said about where the state should be; an update's results, which take its arguments' memory, are where
    these were. It is compiled once per run: it then takes no arguments that are laid out otherwise than the first.
    """

    def __init__(self, model: str, optimizer: str, linear: bool = False, kind: AxisType = AxisType.Auto) -> None:
        self.config, self.kind = MODELS[model], kind
        # The rows of grouped heads are merged, and gathered where one of their axes is dealt out.
        grouped = self.config.heads > self.config.kv_heads
        self.local, self.muon = optimizer in LOCAL and not grouped, optimizer in MUON and not grouped
        self.placed = ("mu", "nu") if optimizer in OPTIMIZERS or kind == AxisType.Explicit else ()
        self.params, self.tokens, self.loss = start(self.config)
        self.tx = tx = (OPTIMIZERS | QUOTIENTS)[optimizer](gauges=lm.gauges(self.config, linear))

        def update(grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        self.init, self.step = jit(tx.init), update

    def place(self, data: int, model: int, layout: str) -> Place:
        """A layout on a mesh of data · model devices."""
        mesh = lm_sharding.make_mesh(data, model, kind=self.kind)
        params = lm_sharding.shardings(self.params, mesh, layout)
        return Place(params, NamedSharding(mesh, P("data")), NamedSharding(mesh, P()))

    def run(self, place: Place) -> Run:
        """A few steps there."""
        params = put(self.params, place.params)
        params, _, losses, program = self.steps(place, params, self.begun(place, params), STEPS)
        return self.ended(place, params, losses, program)

    def steps(self, place: Place, params: Tree, state: Tree, steps: int) -> tuple[Tree, Tree, list[float], str]:
        """So many steps from here, their losses and the compiled update."""
        check_shardings(state, params, place.params, self.placed)
        tokens = put(self.tokens, place.tokens)
        out = (place.whole, place.params)
        gradient = jit(auto_axes(jax.value_and_grad(self.loss), out_sharding=out), out_shardings=out)
        losses = list[float]()
        step: Any = None
        for _ in range(steps):
            value, grads = gradient(params, tokens)
            step = step or self.update(state, params).lower(grads, state, params).compile()
            old = params, state
            params, state = step(grads, state, params)
            losses.append(float(value))
            assert all(x.is_deleted() for x in jax.tree.leaves(old)), "not donated"
        check_shardings(state, params, place.params, self.placed)
        return params, state, losses, step.as_text()

    def update(self, state: Tree, params: Tree) -> Any:
        """The update, in place."""
        shardings = jax.tree.map(lambda x: x.sharding, (params, state)) if self.kind == AxisType.Auto else None
        return jit(self.step, donate_argnums=(1, 2), **({} if shardings is None else {"out_shardings": shardings}))

    def ended(self, place: Place, params: Tree, losses: list[float], program: str) -> Run:
        """A run, its parameters taken to the host."""
        whole = jit(auto_axes(lambda tree: tree, out_sharding=place.whole), out_shardings=place.whole)(params)
        return Run(jax.tree.map(np.asarray, whole), losses, program)

    def begun(self, place: Place, params: Tree) -> Tree:
        """The state of a new run; what Optax makes of nothing is whole on automatic axes, and dealt out here."""
        state = self.init(params)
        if self.placed or not isinstance(place.whole, NamedSharding):
            return state
        return jax.device_put(state, jax.tree.map(lambda x: x.sharding, self.target(place)[1]))

    def target(self, place: Place) -> Tree:
        """Parameters and state as shapes with a place each, to be restored there."""

        def shape(x: Any, sharding: Sharding) -> Any:
            is_masked = isinstance(x, optax.MaskedNode)
            return x if is_masked else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        params = jax.tree.map(shape, self.params, place.params)
        state = jax.eval_shape(self.tx.init, params)
        # A frame is one thing that is no parameter.
        whole = functools.partial(jax.tree.map, lambda x: shape(x, place.whole))
        return params, optax.tree.map_params(
            self.tx, shape, state, place.params, transform_non_params=whole,
            is_leaf=lambda x: isinstance(x, optax.MaskedNode),
        )


def check_shardings(state: Tree, params: Tree, shardings: Tree, names: Sequence[str] = ("mu", "nu")) -> None:
    """Parameters, and moments of these names, if there are any, are where the parameters were told to be."""
    wanted = dict(jax.tree.leaves_with_path(shardings))
    moments = [tree for name in names for _, tree in optax.tree.get_all_with_path(state, name)]
    assert bool(moments) == bool(names), "the state has none of these fields"
    for keys, leaf in (pair for tree in (params, *moments) for pair in jax.tree.leaves_with_path(tree)):
        assert leaf.sharding.is_equivalent_to(wanted[keys], leaf.ndim), (jax.tree_util.keystr(keys), leaf.sharding)


# Checks -------------------------------------------------------------------------------------------


def run_layout(trainer: Trainer, layout: str) -> Run:
    """A run on the mesh of a layout: what is local sends nothing as large as a weight, where all is whole nothing."""
    place = trainer.place(*MESHES[layout], layout)
    run = trainer.run(place)
    least, sent = smallest_gather(trainer.params, place.params), collectives(run.program)
    assert not trainer.local or [call for call in sent if call[1] >= least] == []
    assert not trainer.muon or [call for call in sent if call[0] == "all-gather" and call[1] >= least] == []
    assert (sent == []) == (layout == "dp")
    return run


def run_resumed(trainer: Trainer) -> Run:
    """A run that leaves one mesh through a checkpoint and goes on in another layout on half the devices."""
    first, second = trainer.place(*MESHES["fsdp_tp"], "fsdp_tp"), trainer.place(2, 2, "tp")
    params = put(trainer.params, first.params)
    *left, losses, _ = trainer.steps(first, params, trainer.begun(first, params), STEPS // 2)
    with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as disk:
        disk.save(Path(folder) / "run", tuple(left))
        disk.wait_until_finished()
        params, state = disk.restore(Path(folder) / "run", trainer.target(second))
    params, _, more, program = trainer.steps(second, params, state, STEPS - STEPS // 2)
    return trainer.ended(second, params, losses + more, program)


def compare(trainer: Trainer, layout: str, run: Run, expected: Run) -> dict[str, Any]:
    """A run on a mesh ended where one device does; the largest relative difference of a leaf and of a loss.

    Key biases without rotary are left out: they have no gradient, and Adam turns its rounding into motion.
    """
    apart = twins.apart(run.params, expected.params)
    leaf = max(x for path, x in apart.items() if trainer.config.rope or not path.endswith("key/bias"))
    measured = {"leaf": leaf, "loss": float(np.max(np.abs(np.divide(run.losses, expected.losses) - 1.0)))}
    assert all(x <= tolerance("sharded", jnp.float32) for x in measured.values()), (layout, measured)
    sent = collectives(run.program)
    return {"layout": layout, **measured, "largest": max((n for _, n in sent), default=0), "calls": len(sent)}


def check_the_checker() -> None:
    """A weight that is gathered is seen."""
    mesh = lm_sharding.make_mesh(8, 1)
    rows = {"kernel": NamedSharding(mesh, P("data"))}
    params = put({"kernel": np.ones((32, 32), np.float32)}, rows)
    product: Any = jit(lambda p: p["kernel"] @ p["kernel"].T)
    program = product.lower(params).compile().as_text()
    assert max(n for _, n in collectives(program)) >= smallest_gather(params, rows) == 1024


def check_eager_init() -> None:
    """Outside `jit` moments are where their parameters are, too."""
    mesh = lm_sharding.make_mesh(4, 2)
    shardings = {"up": NamedSharding(mesh, P("data", "model")), "down": NamedSharding(mesh, P("model", "data"))}
    params = put(dict.fromkeys(shardings, np.ones((8, 8), np.float32)), shardings)
    tx = go.ddc_adamw(1e-2, go.rescale({"up": "_ channel"}, {"down": "channel _"}))
    check_shardings(tx.init(params), params, shardings)


def check_whole_matrices() -> None:
    """A polar factor sends Gram matrices and what a device holds, whichever axes of the matrix are divided."""
    mesh, made = lm_sharding.make_mesh(4, 2), np.random.default_rng(0).normal(size=(3, 32, 120)).astype(np.float32)
    polar: Any = jit(linalg.polar)
    alone = np.asarray(polar(made))
    for spec in (P("data"), P(None, "data"), P("data", "model"), P(("data", "model"))):
        stack = jax.device_put(made, NamedSharding(mesh, P(None, *spec)))
        sent = collectives(polar.lower(stack).compile().as_text())
        assert {kind for kind, _ in sent} <= {"all-reduce", "all-to-all"} and max(n for _, n in sent) <= 3 * 32 * 32
        found = polar(stack)
        assert found.sharding.is_equivalent_to(stack.sharding, 3)
        assert np.max(np.abs(found - alone)) <= 1e-6


def check_large_heads() -> None:
    """`init` of a quotient ends: XLA's threads, as many as devices, do not all wait for each other in LAPACK."""
    config = lm.LMConfig(layers=1, **_SIZES | {"d_head": 64})
    params, whole = start(config)[0], NamedSharding(lm_sharding.make_mesh(8, 1), P())
    tx = QUOTIENTS["quotient_adamw"](gauges=lm.gauges(config))
    jax.block_until_ready(jit(tx.init)(put(params, jax.tree.map(lambda _: whole, params))))


def check_tools(kind: AxisType) -> None:
    """Functions that rewrite or compare weights do on a mesh what they do on one device."""
    mesh, rng = lm_sharding.make_mesh(4, 2, kind=kind), np.random.default_rng(_SEED)
    gauge = go.head_linear({"v": "_ head basis"}, {"o": "head basis _"})
    alone = {"v": rng.normal(size=(8, 4, 4)).astype(np.float32), "o": rng.normal(size=(4, 4, 8)).astype(np.float32)}
    dealt = {"v": NamedSharding(mesh, P("data", "model")), "o": NamedSharding(mesh, P("model", None, "data"))}
    other = jax.tree.map(lambda x: 1.01 * x, alone)
    squares = jax.grad(lambda p: jnp.sum(jnp.square(jnp.einsum("ihb,hbo->iho", p["v"], p["o"]))))
    gradient = jax.tree.map(np.asarray, squares(alone))
    element, opposite = gauge.sample(jax.random.key(0), alone), go.links.scale_by_opposite_gram(gauge, every=2)
    tx, of_two = go.quotient_adamw(1e-3, gauge), (go.orbit.align, go.orbit.distance, go.measure.drift)
    tools: dict[str, Callable[..., Any]] = {
        **{f.__name__: functools.partial(f, gauges=gauge) for f in (*of_two, go.measure.vertical_motion)},
        "canonicalize": lambda p, _: go.orbit.canonicalize(p, gauge),
        "rotate": lambda p, _: go.orbit.rotate(p, gauge, key=jax.random.key(0)),
        "pack": lambda p, _: go.orbit.unpack(go.orbit.pack(p, gauge)),
        "average": lambda p, q: go.orbit.average([p, q], gauge),
        "quotient_arc_length": lambda p, q: go.measure.quotient_arc_length([p, q], gauge),
        "scale_by_opposite_gram": lambda p, q: jit(opposite.update)(q, opposite.init(p), p),
        "transport": lambda p, q: go.orbit.transport(optax.TraceState(q), p, gauge, element),
        "from_state": lambda p, q: go.orbit.from_state(optax.TraceState(q), optax.trace(0.9), gauge, p),
        "evaluate": lambda p, _: go.orbit.evaluate(lambda _, point: point, tx.init(p), p),
        "restart": lambda p, _: go.orbit.restart(tx, tx.init(p), p),
        "check": lambda p, _: str(go.check(tx, tx.init(p), p, put(gradient, dealt))),
        "plan": lambda p, _: str(go.plan(tx, p)),
    }
    for name, tool in tools.items():
        with jax.set_mesh(mesh):
            found = tool(put(alone, dealt), put(other, dealt))
        expected = tool(alone, other) if name != "check" else found
        assert name != "check" or "not looked" not in found
        assert name != "canonicalize" or all(found[x].sharding.is_equivalent_to(dealt[x], 3) for x in dealt)
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            same = x == y if isinstance(x, str) else np.allclose(x, y, rtol=1e-4, atol=1e-4)  # `align` stops that early
            assert same, (name, kind)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs on a mesh in each layout, and on one device."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("optimizer", choices=OPTIMIZERS | QUOTIENTS)
    parser.add_argument("layouts", nargs="+", choices=MESHES)
    for flag, means in (("explicit", "axes of the meshes are explicit"), ("linear", "GL(d), not rotations of heads")):
        parser.add_argument(f"--{flag}", action="store_true", help=means)
    for flag, means in (("rank", "of two processes with four devices each"), ("port", "of rank 0")):
        parser.add_argument(f"--{flag}", type=int, help=means)
    args = parser.parse_args(argv)
    warnings.filterwarnings("error", message="Some donated buffers were not usable")
    jax.config.update("jax_num_cpu_devices", 8 if args.rank is None else 4)
    if args.rank is not None:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{args.port}", 2, args.rank, initialization_timeout=100)
    assert jax.device_count() == 8

    kind = AxisType.Explicit if args.explicit else AxisType.Auto
    trainer = Trainer(args.model, args.optimizer, args.linear, kind)
    runs = {layout: run_layout(trainer, layout) for layout in args.layouts}
    if args.optimizer in QUOTIENTS:
        check_large_heads()
        if args.model == "gpt":
            check_tools(kind)
        runs["resumed"] = run_resumed(trainer)
    if not args.rank:
        one = SingleDeviceSharding(jax.local_devices()[0])
        alone = trainer.run(Place(jax.tree.map(lambda _: one, trainer.params), one, one))
        for layout, run in runs.items():
            print(json.dumps(compare(trainer, layout, run, alone)), flush=True)
    if args.rank is None and args.optimizer in OPTIMIZERS:
        check_the_checker()
        check_eager_init()
        check_whole_matrices()
    elif args.rank is not None:
        jax.distributed.shutdown()  # waits for the other


if __name__ == "__main__":
    main()
