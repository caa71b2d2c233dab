"""Three measurements at a minimum (DDC, C.1, C.4, §5.8): Fisher information at the end of training, and along a step.

    python -m examples.studies minimum            # some minutes on one core

* *isolation* (C.1): how large a part of the readout of a grokking transformer is in the kernel of its Fisher
  information. The start has no such part, because its mean column is removed. What is found at the end has come in
  during training.
* *order* (C.4): how fast the Gauss–Newton matrix of a diagonal network falls toward the point where a pair (u, v) is
  zero, along the direction in which both grow equally. If it falls with the exponent 2k − 2, the minimum has order k.
* *one step* (§5.8, Table 6): the curvature along a step of attention, before and after the step, and how far the steps
  of *twins*, two weight sets of one function, differ.

The Fisher information is sampled with 100 labels per parameter, which the model draws. Training is in float32 (for *one
step* in float64), and measurements are in float64.
"""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from matplotlib.axes import Axes

import gauge_optax as go
from examples.studies import diagonal_network, harness, report, row_shift, starts
from examples.studies.harness import Arm, Result, Training
from models import lm

Tree = Any
Cell = dict[str, Any]
Arms = dict[str, optax.GradientTransformation]


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes. Those of the first two measurements are the sizes of `row_shift` (C.1) and `diagonal_network` (C.4)."""

    steps: int = 4000
    modulus: int = 41
    width: int = 32
    hidden: int = 128
    modes: int = 64
    vocab: int = 12
    pretraining: int = 200
    warmup: int = 20  # gradients, all at one point, that an optimizer gets in *one step* before its step is measured
    twins: int = 4


FULL = Config(steps=8000, modulus=113, width=128, hidden=512)

# The names of cells in the JSON are "measurement: optimizer".
ISOLATION, ORDER, ONE_STEP = "isolation", "order", "one step"
DEAD = 1e-12  # eigenvalues below this share of the largest count as zero
FLOOR = 1e-10  # a share of a leaf below this is roundoff of float32
SAME = 0.05  # curvatures whose relative difference is below this count as equal


def in_float64(tree: Tree) -> Tree:
    """The tree in float64, for measurements. Call it inside `jax.enable_x64`."""
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x, np.float64)), tree)


# C.1: the readout ---------------------------------------------------------------------------------------

SHIFT = go.logit_shift({"unembed": "_ vocab"})


@functools.cache
def _readout(c: Config) -> tuple[row_shift.Config, Training, dict[str, Callable[..., Any]]]:
    """The sizes of `row_shift` (C.1), its problem with the arms of *isolation*, and their compiled runs."""
    small = row_shift.Config(steps=c.steps, modulus=c.modulus, width=c.width, hidden=c.hidden)
    case = row_shift.build(small)
    adamw = optax.adamw(small.learning_rate, b2=small.b2, weight_decay=small.weight_decay)
    arms = {"SGD": Arm(optax.sgd(0.1)), "quotient(adamw)": Arm(go.quotient(adamw, SHIFT))}
    case = dataclasses.replace(case, arms={**case.arms, **arms})
    return small, case, {name: harness.advance(case, case.arms[name]) for name in STUDIES[ISOLATION][1]}


def isolation(c: Config, name: str, seed: int) -> Cell:
    """Trains, and measures which share of the readout and of its last step no output depends on.

    This share is measured in two ways: by the kernel of the sampled Fisher information, and by the gauge.
    """
    small, case, runs = _readout(c)
    start, data = case.make(seed)
    start |= {"unembed": start["unembed"] - jnp.mean(start["unembed"], 1, keepdims=True)}
    tx = case.arms[name].tx
    params, state = runs[name](start, tx.init(start), data, 0, c.steps)
    step, _ = tx.update(jax.grad(case.loss)(params, data), state, params)
    with jax.enable_x64(True):
        exact, fn = in_float64(params), functools.partial(row_shift.logits, heads=small.heads)
        fisher = go.measure.Fisher(fn, exact, [np.asarray(data["train"])], jax.random.key(seed), only="unembed")
        values, vectors = np.linalg.eigh(np.asarray(fisher.dense()))
        kernel, flat = vectors[:, values < DEAD * values[-1]], np.asarray(exact["unembed"]).ravel()
        along = jnp.ones_like(exact["unembed"]) * jnp.arange(1.0, c.width + 1)[:, None]  # the same for every column
        steepness = float(go.measure.directional_fisher(fisher, exact | {"unembed": along}))
        shares = [float(go.measure.gauge_fraction(exact, SHIFT, x)["unembed"]) for x in (exact, in_float64(step))]
    return _numbers(share=shares[0], share_of_step=shares[1], kernel=kernel.shape[1],
                    share_of_kernel=np.sum((kernel.T @ flat) ** 2) / np.sum(flat**2),
                    along_over_largest=abs(steepness) / values[-1], labels=fisher.samples,
                    **{key: x for key, x in case.observe(start, params, data).items() if key.startswith("t")})


# C.4: the order at the dead point -----------------------------------------------------------------------

LENGTHS = np.logspace(-1, -3, 25)
APART = 8  # every eighth of the dead pairs is measured


def _pairs(p: Tree, x: jax.Array) -> jax.Array:
    return (x @ (p["u"] * p["v"]))[:, None]


@functools.cache
def _diagonal(c: Config) -> tuple[diagonal_network.Config, Training, dict[str, Callable[..., Any]]]:
    """The sizes of `diagonal_network` (C.4), its problem, and the compiled runs of *order*."""
    small = diagonal_network.Config(steps=c.steps, modes=c.modes)
    case = diagonal_network.build(small)
    return small, case, {name: harness.advance(case, case.arms[name]) for name in STUDIES[ORDER][1]}


def order(c: Config, name: str, seed: int) -> Cell:
    """Trains; then measures curvature and loss on a line of points towards the one where a pair (u, v) is (0, 0).

    The line has the direction (1, 1). For comparison, pairs that are not dead are measured around their own point.
    """
    small, case, runs = _diagonal(c)
    start, data = case.make(seed)
    trained, _ = runs[name](start, case.arms[name].tx.init(start), data, 0, c.steps)
    with jax.enable_x64(True):
        x, end = jnp.asarray(np.asarray(data["whitened"], np.float64)), in_float64(trained)
        centers = jnp.sqrt(jnp.abs(end["u"] * end["v"]))
        dead = [_orders(end, x, at, 0.0) for at in range(small.nonzero, small.modes, APART)]
        live = [_orders(end, x, at, float(centers[at])) for at in range(0, small.nonzero, APART // 2)]
    return _numbers(lowest=min(fisher.order for fisher, _ in dead), highest=max(fisher.order for fisher, _ in dead),
                    by_kl=np.mean([kl.order for _, kl in dead]), live_by_kl=np.mean([kl.order for _, kl in live]),
                    live_readable=sum(fisher.readable for fisher, _ in live), pairs=len(dead),
                    drift=diagonal_network.observe(start, trained, data)["ratio"])


def _orders(end: Tree, x: jax.Array, at: int, center: float) -> tuple[Any, Any]:
    """The order of the minimum in pair `at`, along (1, 1): by the Gauss–Newton matrix, and by the KL divergence."""

    def point(length: float) -> Tree:
        return {name: leaf.at[at].set(center + length / 2**0.5) for name, leaf in end.items()}

    direction = {name: jnp.zeros_like(leaf).at[at].set(2**-0.5) for name, leaf in end.items()}
    target, curvature, kl = _pairs(point(0.0), x), [], []
    for length in LENGTHS:
        there = point(float(length))
        ggn = go.measure.GGN(_pairs, there, [x], "gaussian")
        curvature.append(float(go.measure.directional_fisher(ggn, direction)))
        kl.append(float(0.5 * jnp.mean(jnp.square(_pairs(there, x) - target))))
    return go.measure.kl_order(LENGTHS, curvature), go.measure.kl_order(LENGTHS, kl, of="kl")


# §5.8: one step -----------------------------------------------------------------------------------------

ATTENTION = [f"blocks/{{i}}/attn/{name}/kernel" for name in ("query", "key", "value", "out")]
TEXTBOOK, PER_HEAD = "Muon, whole kernels", "Muon, per head"


class OneStep:
    """A small decoder, and one compiled step of every optimizer."""

    def __init__(self, c: Config) -> None:
        self.c = c
        self.config = lm.LMConfig(
            vocab=c.vocab, d_model=16, layers=1, heads=2, kv_heads=2, d_head=8, d_ff=32, max_len=16,
            norm="rmsnorm", mlp="relu", bias=False,
        )
        self.graph = nnx.split(lm.build(self.config, nnx.Rngs(0)))[0]
        self.loss = lm.params_and_loss(self.config, jax.random.key(0))[1]
        gauges = lm.gauges(self.config)
        self.rotations = [gauge for gauge in gauges if gauge.name == "head_rotation"]
        self.rescales = [gauge for gauge in gauges if gauge.name == "rescale"]
        adam, polar = 1e-3, 1e-2
        arms: Arms = {  # with the gauges of rotations only, to see the effect of these gauges alone
            "AdamW": optax.adamw(adam),
            "DDC": go.ddc_adamw(adam, self.rotations),
            TEXTBOOK: starts.muon(lambda _: polar),
            PER_HEAD: starts.muon(lambda _: polar, per_head=True),
            "DDC-Muon": go.ddc_muon(polar, self.rotations),
        }
        whole: Arms = {"DDC": go.ddc_adamw(adam, gauges), "DDC-Muon": go.ddc_muon(polar, gauges)}
        self.steps = {name: self._step(tx) for name, tx in arms.items()}
        self.whole = self.steps | {name: self._step(tx) for name, tx in whole.items()}
        self.train = jax.jit(self._train)

    def fn(self, params: Tree, tokens: jax.Array) -> jax.Array:
        """The logits of the decoder."""
        return nnx.merge(self.graph, params)(tokens)

    def _train(self, params: Tree, batches: jax.Array) -> Tree:
        order = jnp.arange(self.c.pretraining) % len(batches)
        return harness.scanned(optax.adamw(3e-3), self.loss, params, batches[order])[0]

    def _step(self, tx: optax.GradientTransformation) -> Callable[[Tree, jax.Array], Tree]:
        """Returns a compiled function: the last step after a sequence of gradients, all taken at one point.

        All optimizers get the same gradients.
        """

        def last(params: Tree, batches: jax.Array) -> Tree:
            def see(state: Any, tokens: jax.Array) -> Any:
                updates, state = tx.update(jax.grad(self.loss)(params, tokens), state, params)
                return state, updates

            _, updates = jax.lax.scan(see, tx.init(params), batches)
            return jax.tree.map(lambda x: x[-1], updates)

        return jax.jit(last)

    def batches(self, seed: int) -> tuple[jax.Array, jax.Array]:
        """Draws tokens of a random Markov chain: batches (batches, 16, 17), and 64 sequences to measure with."""
        rng = np.random.default_rng(seed)
        chain = rng.dirichlet(np.full(self.c.vocab, 0.2), size=self.c.vocab).cumsum(1)
        tokens = np.empty(((self.c.warmup + 4) * 16, 17), int)
        tokens[:, 0] = rng.integers(self.c.vocab, size=len(tokens))
        for at in range(16):
            draws = rng.random((len(tokens), 1))
            tokens[:, at + 1] = np.minimum((draws > chain[tokens[:, at]]).sum(1), self.c.vocab - 1)
        return jnp.asarray(tokens[64:].reshape(-1, 16, 17)), jnp.asarray(tokens[:64, :-1])


@functools.cache
def _one_step(c: Config) -> OneStep:
    return OneStep(c)


def one_step(c: Config, name: str, seed: int) -> Cell:
    """Curvatures along attention's part of a step, at both ends of the step, for several twins.

    It also measures how far steps of twins differ.
    """
    with jax.enable_x64(True):
        case = _one_step(c)
        batches, inputs = case.batches(seed)
        start, _ = lm.params_and_loss(case.config, jax.random.key(seed))
        params = case.train(in_float64(start), batches)
        rotations, read = go.product(case.rotations), []
        for number in range(c.twins):
            twin = rotations.act(rotations.sample(jax.random.key(number), params), params) if number else params
            step = _of_attention(case.steps[name](twin, batches))
            for point in (twin, jax.tree.map(jnp.add, twin, step)):
                fisher = go.measure.Fisher(case.fn, point, [inputs], jax.random.key(seed), only=ATTENTION)
                quotient = go.measure.quotient_fisher(fisher, case.rotations)
                read.append(float(go.measure.directional_fisher(quotient, step)))
        before, after = np.array(read).reshape(-1, 2).T
        plain = case.steps[name](params, batches)
        motion = go.measure.vertical_motion(params, plain, case.rotations)
        gaps = {
            move: _gap(go.product(gauges), case.whole[name], params, batches)
            for move, gauges in (("rotation", case.rotations), ("rescale", case.rescales))
        }
        return _numbers(before=before[0], after=after[0], spread=np.ptp(before) / before[0],
                        turned=optax.tree.norm(motion) / optax.tree.norm(_of_attention(plain)),
                        loss=case.loss(params, batches[0]), **gaps)


def _of_attention(step: Tree) -> Tree:
    """The part of a step in attention's leaves, with zeros in all other leaves."""
    keep = {"attn"}
    return jax.tree.map_with_path(
        lambda path, x: x if keep & {str(getattr(key, "key", "")) for key in path} else jnp.zeros_like(x), step
    )


def _gap(group: Any, step: Callable[..., Tree], params: Tree, batches: jax.Array) -> float:
    """How far the steps from θ and from g·θ differ, relative to the step, in the leaf where they differ most.

    The step from θ is moved by g, so that both end at comparable weights.
    """
    element = group.sample(jax.random.key(1), params)
    twin = group.act(element, params)
    ours = group.act(element, jax.tree.map(jnp.add, params, step(params, batches)))
    theirs = jax.tree.map(jnp.add, twin, step(twin, batches))
    leaves = zip(*(map(np.asarray, jax.tree.leaves(tree)) for tree in (ours, theirs, twin)), strict=True)
    return max(float(np.linalg.norm(b - a)) / max(float(np.linalg.norm(a - start)), 1e-30) for a, b, start in leaves)


# Cells --------------------------------------------------------------------------------------------------


def _numbers(**found: Any) -> Cell:
    """Rounds the numbers of a cell to six digits."""
    return {key: float(f"{float(x):.6g}") for key, x in found.items()}


STUDIES: dict[str, tuple[Callable[[Config, str, int], Cell], tuple[str, ...]]] = {
    ISOLATION: (isolation, ("SGD", "AdamW", "DDC", "quotient(adamw)")),
    ORDER: (order, ("SGD", "AdamW", "DDC", diagonal_network.BALANCED)),
    ONE_STEP: (one_step, ("AdamW", "DDC", TEXTBOOK, PER_HEAD, "DDC-Muon")),
}
ARMS = [f"{name}: {arm}" for name, (_, arms) in STUDIES.items() for arm in arms]


def cell(c: Config, arm: str, seed: int) -> Cell:
    """Makes the cell with this name ("measurement: optimizer") and seed."""
    name, _, optimizer = arm.partition(": ")
    return STUDIES[name][0](c, optimizer, seed)


# Results ------------------------------------------------------------------------------------------------


def values(result: Result, name: str, arm: str, key: str) -> list[float]:
    """One number of an optimizer in one of the three measurements, for every seed."""
    return [cell[key] for cell in result["cells"][f"{name}: {arm}"].values()]


def _table(result: Result, name: str, columns: dict[str, tuple[str, str]]) -> str:
    lines = [[f"{name}: arm", *columns]]
    for arm in STUDIES[name][1]:
        lines.append([arm, *(report.listed(values(result, name, arm, k), form) for k, form in columns.values())])
    return report.plain(lines)


def section(result: Result) -> str:
    """The results as Markdown: tables, and sentences about them."""
    c = Config(**result["settings"])
    return "\n\n".join([
        f"What the Fisher information says where training ended. {report.made_with(result)} It is read in float64, and "
        "all of the third study is in float64.",
        f"**C.1, isolation.** The network of C.1 above, from a start without a mean column. The *share* is that of the "
        f"squared norm of the unembedding (or of its last step) along the gauge's orbit; the *kernel* is that of the "
        f"unembedding's own Fisher, eigenvalues below {DEAD:g} of the largest, of {c.width * c.modulus:,} dimensions. "
        f"{c.width} of them are the gauge's; where a network is nearly certain of all answers, more are that small.",
        _table(result, ISOLATION, {
            "share along the orbit": ("share", ".1e"), "of the last step": ("share_of_step", ".1e"),
            "kernel, dimensions": ("kernel", ",.0f"), "share in the kernel": ("share_of_kernel", ".1e"),
            "Fisher along the orbit, of the largest": ("along_over_largest", ".0e"),
            "test accuracy": ("test_accuracy", ".3f"),
        }),
        _isolation_verdict(result),
        "**C.4, the order at the dead point.** The diagonal network of C.4 above. Pairs (u, v) whose target is 0 are "
        "set to ℓ·(1, 1)/√2, the balanced joint mode, from ℓ = 0.1 to 0.001, all else as trained. *Order* is from the "
        "exponent 2k − 2 of the Gauss–Newton matrix along the mode, the least and the largest of "
        f"{values(result, ORDER, 'SGD', 'pairs')[0]:.0f} pairs; the same from the KL divergence, ℓ^2k. Live pairs, "
        "whose target is 1, are a control: there the curvature must not fall, and k = 1.",
        _table(result, ORDER, {
            "least order": ("lowest", ".4f"), "largest": ("highest", ".4f"), "by KL": ("by_kl", ".4f"),
            "live pairs, by KL": ("live_by_kl", ".3f"), "live pairs with a falling curvature": ("live_readable", ".0f"),
            "drift of log(u/v), rms": ("drift", ".2g"),
        }),
        _order_verdict(result),
        "**§5.8 and Table 6, one step.** A decoder of one layer (width 16, two heads of 8), trained for "
        f"{c.pretraining} steps of AdamW; then every optimizer sees the same {c.warmup} gradients at that point, and "
        "takes one step. DDC is given the rotations of heads alone. *Curvature* is the directional Fisher of the four "
        "attention kernels along their part of the step, on the quotient by these rotations, before the step and after "
        f"it; its *spread* is over {c.twins} twins. *Turned* is the rotation of heads in a step of length 1. The last "
        "columns are the gap of one step of twins, relative to it, with all gauges in DDC: 1 is no agreement.",
        _table(result, ONE_STEP, {
            "curvature before": ("before", ".3g"), "after": ("after", ".3g"), "spread over twins": ("spread", ".0e"),
            "turned": ("turned", ".0e"), "gap, rotations": ("rotation", ".0e"), "gap, rescales": ("rescale", ".0e"),
        }),
        _step_verdict(result),
    ])


def _isolation_verdict(result: Result) -> str:
    share = {arm: values(result, ISOLATION, arm, "share") for arm in STUDIES[ISOLATION][1]}
    pinned = {arm: [x < FLOOR for x in share[arm]] for arm in ("DDC", "quotient(adamw)")}
    by = "the readout's share along the orbit"
    largest = max(x for arm in share for x in values(result, ISOLATION, arm, "along_over_largest"))
    return " ".join([
        report.paper("AdamW leaks the readout along the orbit, on the Fisher's zeros",
                     [x > 1e-3 for x in share["AdamW"]], f"{by} (above 1e-3)"),
        report.paper("DDC pins this share at the floor", pinned["DDC"], f"{by} (below {FLOOR:g})"),
        f"The same of `quotient(adamw)`, {report.on_seeds(pinned['quotient(adamw)'])}. The Fisher along the orbit is "
        f"at most {largest:.0e} of its largest eigenvalue, roundoff.",
    ])


def _order_verdict(result: Result) -> str:
    def of_all(*keys: str) -> list[float]:
        return [x for arm in STUDIES[ORDER][1] for key in keys for x in values(result, ORDER, arm, key)]

    within = [abs(x - 2.0) < 0.02 for x in of_all("lowest", "highest", "by_kl")]
    control, drifts = [x == 0 for x in of_all("live_readable")], of_all("drift")
    apart = max(drifts) / max(min(drifts), report.ROUNDING)
    return ("The paper: read by Gauss–Newton at the dead point along the balanced mode, the order is one number, k = 2 "
            "for a product of two, whatever the optimizer; by the order k, this shows here in "
            f"{'all' if all(within) else f'{sum(within)} of'} {len(within)} reads (within 1 %). The drift of the gauge "
            f"differs by a factor of {report.number(apart)} between the arms. The control "
            f"{'holds' if all(control) else 'FAILS'}: the curvature of live pairs is no falling power of ℓ "
            f"{'in any run' if all(control) else 'in some runs only'}.")


def _step_verdict(result: Result) -> str:
    def of(arm: str, key: str) -> list[float]:
        return values(result, ONE_STEP, arm, key)

    def ratio(ours: str, theirs: str, key: str) -> list[float]:
        return [a / b for a, b in zip(of(ours, key), of(theirs, key), strict=True)]

    def small(arm: str, key: str) -> list[bool]:
        return [x < 1e-10 for x in of(arm, key)]

    muon = [ratio("DDC-Muon", PER_HEAD, key) for key in ("before", "after")]
    adam = [ratio("DDC", "AdamW", key) for key in ("before", "after")]
    same = [all(abs(x - 1) <= SAME for x in pair) for pair in zip(*muon, strict=True)]
    held = [all(both) for both in zip(small("DDC", "turned"), small("DDC-Muon", "turned"), strict=True)]
    gap = "the gap of twins after a step (1e-10)"
    return " ".join([
        report.paper("on a Muon base the gauge leaves the curvature along a step where Muon without the gauge leaves "
                     "it", same, f"the directional Fisher (both ends within {SAME:.0%})"),
        f"The ratios are {report.span([x for pair in muon for x in pair], '.3f')} beside Muon per head. Beside "
        f"textbook Muon, which takes the polar factor of all heads at once, it is "
        f"{report.span(ratio('DDC-Muon', TEXTBOOK, 'before'), '.2f')}: the other matrices do that, not the gauge. On "
        f"the Adam base the ratios are {report.span([x for pair in adam for x in pair], '.3f')}; AdamW's own curvature "
        f"differs by {report.span(of('AdamW', 'spread'), '.0%')} between twins, DDC's by rounding.",
        report.paper("Table 6, the orbit is held on both bases", held, "the rotation of heads (below 1e-10)"),
        report.paper("the Adam base composes with rotations", small("DDC", "rotation"), gap),
        report.paper("the Adam base composes with rescales", small("DDC", "rescale"), gap),
        report.paper("the Muon base composes with rotations", small("DDC-Muon", "rotation"), gap),
        report.paper("Muon's orthogonaliser by itself does not compose with rescales",
                     [not x for x in small(PER_HEAD, "rescale")], gap),
        "On the slice it does: the gap of the library's `ddc_muon` under rescales is below 1e-10 "
        f"{report.on_seeds(small('DDC-Muon', 'rescale'))}, where Table 6 has a no.",
    ])


# Figure -------------------------------------------------------------------------------------------------


def figure(result: Result, path: Path) -> None:
    """Draws three panels, one per measurement: shares, orders, curvatures."""
    title = "The minimum: what leaked, of which order, and what a step feels"
    fig, (shares, orders, steps) = report.panels(3, title, grid=True)
    _dots(shares, result, ISOLATION, {"share": "of the readout", "share_of_step": "of its last step"}, 1e-20)
    shares.set(title="Share along the orbit (C.1)", xscale="log", xlabel="share of the squared norm")
    shares.axvline(FLOOR, color="gray", ls=":", lw=1)
    _dots(orders, result, ORDER, {"lowest": "dead pair, Gauss–Newton", "live_by_kl": "live pair, KL"})
    orders.set(title="Order at the dead point (C.4)", xlabel="k", xlim=(0.5, 2.5))
    _dots(steps, result, ONE_STEP, {"before": "before the step", "after": "after it"})
    steps.set(title="Curvature along attention's step (§5.8)", xlabel="directional Fisher", xscale="log")
    steps.xaxis.set_minor_formatter("")
    steps.set_xticks([0.25, 0.5, 1.0, 2.0], ["0.25", "0.5", "1", "2"])
    for axis in (shares, orders, steps):
        axis.legend(loc="best", fontsize=8)
    report.save_as_is(fig, path)


def _dots(axis: Axes, result: Result, name: str, keys: dict[str, str], least: float = 0.0) -> None:
    arms = STUDIES[name][1]
    for (key, label), marker, color in zip(keys.items(), "os", ("tab:blue", "tab:orange"), strict=True):
        for at, arm in enumerate(arms):
            found = np.maximum(values(result, name, arm, key), least)
            axis.plot(found, [at] * len(found), marker, color=color, ms=6, alpha=0.6, label=None if at else label)
    report.rows(axis, arms)


STUDY = harness.Study(__doc__, "minimum", harness.by_seed(ARMS, cell), section, figure, config=Config(), full=FULL)
