"""A diagonal linear network u ∘ v (DDC, C.4): 64 scales that no output depends on, and which optimizers move them.

    python -m examples.studies diagonal_network

x·(u ∘ v) stays the same when u_c is multiplied and v_c divided by the same number, one number per coordinate c. The
network learns a sparse target from a start where u_c and v_c differ. Prints the final losses, and how far two
coordinates of the scales have moved, as root mean square over c. One is the gauge's, log|u_c|. The other is the
paper's, log|u_c| − log|v_c|. It also changes if v_c alone grows. This changes the product u_c·v_c and the outputs,
so that it is no drift.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax

import gauge_optax as go
from examples.studies import harness, report
from examples.studies.harness import Arm, Result, Training, rms
from examples.studies.report import Panel

Params = dict[str, jax.Array]
Data = dict[str, jax.Array]

AS_DRAWN = ", inputs as drawn"


@dataclass(frozen=True)
class Config:
    """Sizes. The paper gives the number of modes and of steps, and has no decay. The other numbers are our choice."""

    steps: int = 4000
    modes: int = 64
    nonzero: int = 8
    samples: int = 128
    start: float = 0.1  # √(u·v) at the start; in DDC a product counts as at least 1 % of the mean at the start
    asymmetry: float = 0.5  # log-scales at the start are uniform between −asymmetry and asymmetry
    learning_rate: float = 1e-3
    sgd_rate: float = 1e-1


FULL = Config()


def loss(params: Params, data: Data, inputs: str = "whitened") -> jax.Array:
    """The mean squared error of x·(u ∘ v)."""
    x, target = data[inputs], data["target"]
    return jnp.mean(jnp.square(x @ (params["u"] * params["v"] - target)))


def make(c: Config, seed: int) -> tuple[Params, Data]:
    """Draws a start at which |u_c| and |v_c| differ, a sparse target, and inputs, both as drawn and whitened."""
    tilt, inputs = jax.random.split(jax.random.key(seed))
    log_scale = jax.random.uniform(tilt, (c.modes,), minval=-c.asymmetry, maxval=c.asymmetry)
    x = jax.random.normal(inputs, (c.samples, c.modes))
    target = (jnp.arange(c.modes) < c.nonzero).astype(x.dtype)
    data = {"drawn": x, "whitened": jnp.linalg.qr(x)[0] * c.samples**0.5, "target": target}
    return {"u": c.start * jnp.exp(log_scale), "v": c.start * jnp.exp(-log_scale)}, data


BALANCED, PRINTED, PAPERS = "DDC, balanced rest", "DDC, as printed", "log|u| − log|v|"
GAUGE = go.rescale(up={"u": "channel"}, down={"v": "channel"})


def log_ratio(params: Params) -> jax.Array:
    """The paper's coordinate, log|u_c| − log|v_c|, for every c."""
    return jnp.log(jnp.abs(params["u"])) - jnp.log(jnp.abs(params["v"]))


def observe(start: Params, params: Params, data: Data) -> dict[str, jax.Array]:
    """What is measured along a run: losses, how far coordinates have moved, and the smallest product |u_c·v_c|."""
    return {
        "loss": loss(params, data),
        "drawn_loss": loss(params, data, "drawn"),
        "drift": rms(go.measure.drift(start, params, GAUGE)[0][""]),
        "ratio": rms(log_ratio(params) - log_ratio(start)),
        "smallest_product": jnp.min(jnp.abs(params["u"] * params["v"])),
    }


def build(c: Config) -> Training:
    """The arms, all without decay: SGD, AdamW and three variants of DDC; AdamW and DDC also on inputs as drawn.

    The variants of DDC are the library's default, rest="balanced", and the paper's rule as printed.
    """
    adamw = optax.adamw(c.learning_rate, weight_decay=0.0)
    ddc = go.ddc_adamw(c.learning_rate, GAUGE, weight_decay=0.0)
    as_drawn = functools.partial(loss, inputs="drawn")
    arms = {
        "SGD": Arm(optax.sgd(c.sgd_rate)),
        "AdamW": Arm(adamw),
        "DDC": Arm(ddc),
        BALANCED: Arm(go.ddc_adamw(c.learning_rate, GAUGE, weight_decay=0.0, rest="balanced")),
        PRINTED: Arm(go.ddc_adamw(c.learning_rate, GAUGE, weight_decay=0.0, preset="paper")),
        f"AdamW{AS_DRAWN}": Arm(adamw, as_drawn),
        f"DDC{AS_DRAWN}": Arm(ddc, as_drawn),
    }
    return Training(arms, functools.partial(make, c), loss, observe)


figure = report.figure("Diagonal linear network: scale traded between u and v",
                       Panel("loss", "Training loss", ylabel="mean squared error"),
                       Panel("drift", "Drift of what the gauge reads, rms over coordinates", drift=True))


def section(result: Result) -> str:
    """The results as Markdown: a table, and sentences about it."""
    c = Config(**result["settings"])
    columns = {
        "final loss": lambda arm: report.listed(report.final(result, arm, _loss_of_arm(arm))),
        "drift, rms over coordinates": report.column(result, "drift", at=report.largest),
        "the same of log|u| − log|v|": report.column(result, "ratio", at=report.largest),
        "smallest u·v on the way": report.column(result, "smallest_product", at=report.smallest),
    }
    drawn = f"AdamW{AS_DRAWN}", f"DDC{AS_DRAWN}"
    return "\n\n".join([
        f"{c.modes} coordinates, {c.nonzero} of them 1 in the target, the rest 0; {c.samples} samples, whitened; "
        f"u·v = {c.start**2:g} at the start, log-scales within ±{c.asymmetry}; {c.steps:,} steps, learning rate "
        f"{c.learning_rate} (SGD {c.sgd_rate}), no decay. {report.made_with(result)}",
        report.table(result, columns),
        f"{report.containment(result, *drawn, 'drift', 'log|u|', 'drawn_loss')} With whitened inputs: "
        f"{report.containment(result, 'AdamW', 'DDC', 'drift', 'log|u|')} {_sgd(result)}",
        f"In the paper's coordinate, {PAPERS}, {report.farther(result, 'DDC', 'AdamW', 'ratio')}: at the anchor's "
        f"rest v takes all growth. {report.containment(result, 'AdamW', BALANCED, 'ratio', PAPERS)} "
        f"{report.containment(result, 'AdamW', PRINTED, 'ratio', PAPERS)}",
    ])


def _loss_of_arm(arm: str) -> str:
    return "drawn_loss" if arm.endswith(AS_DRAWN) else "loss"


def _sgd(result: Result) -> str:
    sgd, adamw = (report.largest(result, arm, "ratio") for arm in ("SGD", "AdamW"))
    less = [a < b for a, b in zip(sgd, adamw, strict=True)]
    return report.paper("SGD moves scale less than AdamW", less, f"the largest rms of {PAPERS}")

STUDY = harness.Study(__doc__, "diagonal_network", harness.trained(build), section, figure, config=Config(), full=FULL)
