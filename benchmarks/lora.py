"""LoRA factors: our GL-exact optimizers beside LoRA-RITE, in equivariance and in time.

    python -m benchmarks.lora            # needs the extra `peers`

Equivariance: 20 steps on ½‖A·B − T‖²/n start from (A, B) and from (A·S, S⁻¹·B), and the table has the distance of the
two products by the condition of S. Time: one update of 24 pairs of width 768 and rank 16, all in one process, in turns
(`timing`). `peers` has PyTorch's side.
"""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

import gauge_optax as go
from benchmarks import peers
from benchmarks.timing import host, in_turns, prepared, quartiles
from examples.studies import harness
from examples.studies.report import bare

Products = Callable[[np.ndarray, np.ndarray], np.ndarray]

OUT = Path(__file__).parent / "results"
RANK, ROWS, COLUMNS, STEPS, RATE = 8, 40, 32, 20, 1e-2
CONDITIONS = (1.0, 10.0, 100.0, 1e3, 1e4)
GAUGE = go.head_linear({"b": "_ basis"}, {"a": "basis _"})


def moved(condition: float, seed: int, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(S⁻¹·A, B·S) with S of exactly this condition."""
    draw = np.random.default_rng([seed, 1])
    left, right = (np.linalg.qr(draw.normal(size=(RANK, RANK)))[0] for _ in range(2))
    s = left * np.exp(np.linspace(-0.5, 0.5, RANK) * np.log(condition)) @ right.T
    return np.linalg.solve(s, a), b @ s


def start(seed: int, zero: bool) -> tuple[np.ndarray, np.ndarray]:
    """A (rank, columns) and B (rows, rank)."""
    draw = np.random.default_rng(seed)
    a, b = draw.normal(size=(RANK, COLUMNS)) / np.sqrt(COLUMNS), draw.normal(size=(ROWS, RANK))
    return a, 0.0 * b if zero else b / np.sqrt(RANK)


def target() -> np.ndarray:
    """T, of full rank."""
    return np.random.default_rng(99).normal(size=(ROWS, COLUMNS)) / 4.0


def by_optax(make: Callable[[], Any], dtype: str) -> Products:
    """The product after training with an Optax optimizer."""
    tx = make()

    @jax.jit
    def train(params: Any, goal: Any) -> Any:
        def loss(p: Any, goal: Any) -> jax.Array:
            return 0.5 * jnp.sum(jnp.square(p["b"] @ p["a"] - goal)) / goal.size

        p, _ = harness.descend(tx, loss, (params, tx.init(params)), lambda n: goal, 0, STEPS)
        return p["a"], p["b"]

    def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        with jax.enable_x64(dtype == "float64"):
            factors = train({"a": jnp.asarray(a, dtype), "b": jnp.asarray(b, dtype)}, jnp.asarray(target(), dtype))
            a, b = (np.asarray(x, np.float64) for x in factors)
        return b @ a

    return product


def by_torch(make: Callable[[list[Any]], Any], dtype: str) -> Products:
    """The product after training with a PyTorch optimizer."""
    import torch

    def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        params = [torch.nn.Parameter(torch.tensor(x, dtype=getattr(torch, dtype))) for x in (a, b)]
        goal, optimizer = torch.tensor(target(), dtype=getattr(torch, dtype)), make(params)
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = 0.5 * ((params[1] @ params[0] - goal) ** 2).sum() / goal.numel()
            loss.backward()
            optimizer.step()
        a, b = (x.detach().numpy().astype(np.float64) for x in params)
        return b @ a

    return product


def rite(params: list[Any]) -> Any:
    """LoRA-RITE."""
    from pytorch_optimizer import LoRARite

    return LoRARite(params, lr=RATE)


def plus() -> optax.GradientTransformation:
    """LoRA+: AdamW with 16 times the rate on B."""
    rates = {"a": optax.adamw(RATE), "b": optax.adamw(16 * RATE)}
    return optax.partition(rates, {"a": "a", "b": "b"})


def torch_muon(params: list[Any]) -> Any:
    """Muon as PyTorch users have it."""
    from pytorch_optimizer import Muon

    return Muon([{"params": params, "use_muon": True}], lr=RATE)


def equivariance(seeds: int) -> dict[str, Any]:
    """Per start, dtype and optimizer: the geometric mean over seeds of products' relative distance, per condition."""
    table: dict[str, Any] = {}
    for zero in (False, True):
        for dtype in ("float64", "float32"):
            rows: dict[str, Products] = {
                "optax.adamw": by_optax(lambda: optax.adamw(RATE), dtype),
                "LoRA+": by_optax(plus, dtype),
                "optax.contrib.muon": by_optax(lambda: optax.contrib.muon(RATE), dtype),
                "pytorch_optimizer.Muon": by_torch(torch_muon, dtype),
                "quotient_adamw": by_optax(lambda: go.quotient_adamw(RATE, GAUGE, weight_decay=0.0), dtype),
                "quotient_muon": by_optax(lambda: go.quotient_muon(RATE, GAUGE), dtype),
                "pytorch_optimizer.LoRARite": by_torch(rite, dtype),
            }
            for name, product in tqdm(rows.items(), desc=f"{dtype}, {'B = 0' if zero else 'random'}"):
                table.setdefault("B = 0" if zero else "random", {}).setdefault(dtype, {})[name] = {
                    f"{c:g}": float(np.exp(np.mean([np.log(_apart(product, c, n, zero)) for n in range(seeds)])))
                    for c in CONDITIONS
                }
    return table


def _apart(product: Products, condition: float, seed: int, zero: bool) -> float:
    a, b = start(seed, zero)
    plain, twin = product(a, b), product(*moved(condition, seed, a, b))
    return float(np.linalg.norm(twin - plain) / np.linalg.norm(plain))


def speed(pairs: int, width: int, rounds: int) -> dict[str, Any]:
    """Seconds of one update, and quartiles over LoRA-RITE's in the same round."""
    case = peers.lora_case(pairs, width)
    gauge = go.head_linear({"pairs/{i}/b": "_ basis"}, {"pairs/{i}/a": "basis _"})
    rows = peers.lora_rows(case, RATE) | {
        "quotient_adamw": lambda: prepared(go.quotient_adamw(RATE, gauge), case.params, case.grads),
        "quotient_muon": lambda: prepared(go.quotient_muon(RATE, gauge), case.params, case.grads),
    }
    updates = {name: make() for name, make in tqdm(rows.items(), desc="compile")}
    in_turns(updates, case.grads, rounds, pause=0.2)
    base = updates["pytorch_optimizer.LoRARite"]
    return {
        name: {"median_ms": 1e3 * float(np.median(x.seconds)), "of_lora_rite": quartiles(x, base)}
        for name, x in updates.items()
    }


def render(result: dict[str, Any]) -> str:
    """The tables."""
    lines = ["# LoRA factors", ""]
    lines += [
        "Many pairs of LoRA factors have one product: A·S and S⁻¹·B for every invertible matrix S. This page says how",
        "far the products of two runs are apart that start from such pairs, *twins*, and how long updates take.", "",
        f"{result['host']}; load average {result['load']:.1f} when times were taken. Distances: geometric mean",
        f"over {result['seeds']} seeds; forming the twin alone costs about as much.", "",
    ]
    for first, by_dtype in result["equivariance"].items():
        for dtype, rows in by_dtype.items():
            of_condition = [[c, *(f"{row[c]:.1e}" for row in rows.values())] for c in next(iter(rows.values()))]
            lines += [f"## Products of twins apart after {STEPS} steps, start {first}, {dtype}", ""]
            lines += [bare([["condition of S", *rows], *of_condition]), ""]
    times = [["", "ms", "of LoRA-RITE (quartiles)"]]
    for name, row in result["speed"].items():
        low, middle, high = row["of_lora_rite"]
        times.append([name, f"{row['median_ms']:.1f}", f"{middle:.2f} ({low:.2f} to {high:.2f})"])
    return "\n".join([*lines, "## One update of 24 pairs, width 768, rank 16, float32", "", bare(times)]) + "\n"


@dataclasses.dataclass(frozen=True)
class Config:
    """Seeds of equivariance, and rounds of timing."""

    seeds: int = 10
    rounds: int = 15


def measured(c: Config) -> dict[str, Any]:
    """Both comparisons."""
    if missing := peers.absent():
        raise SystemExit(missing)
    return {
        "host": host(), "versions": peers.versions(), "seeds": c.seeds, "rounds": c.rounds,
        "load": os.getloadavg()[0], "speed": speed(24, 768, c.rounds), "equivariance": equivariance(c.seeds),
    }


if __name__ == "__main__":
    harness.once(__doc__, "lora", measured, render, Config(), OUT)
