"""Gauges as a user writes them: subclasses of `go.Gauge`, one with every method of a group and one with the two methods
that a group of additions needs.

`Translation` finds its leaves by the binding language; `Trade` is `go.rescale` once more, by its action alone, so that
the two can be compared.
"""

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

import gauge_optax as go
from gauge_optax.binding import bind, block_specs, leaves_by_path, with_leaves

Tree = Any
_REAL = float


@dataclasses.dataclass(frozen=True)
class Translation(go.Gauge):
    """A vector from the rows of one table to the rows of another, whose rows are added: tokens and positions."""

    tokens: str
    positions: str
    name: ClassVar[str] = "translation"
    effect: ClassVar[Any] = "shift"
    balancing: ClassVar[Any] = "shift"

    def _tables(self, params: Tree) -> tuple[jax.Array, jax.Array]:
        axes, leaves = "_ channel", leaves_by_path(params)
        specs = block_specs(self.name, "tokens", {self.tokens: axes})
        specs += block_specs(self.name, "positions", {self.positions: axes})
        tokens, positions = bind(self.name, specs, (), params)[0].blocks
        return leaves[tokens.path], leaves[positions.path]

    def act(self, element: Tree, params: Tree) -> Tree:
        tokens, positions = self._tables(params)
        moved = {self.tokens: tokens + element[""][None], self.positions: positions - element[""][None]}
        return with_leaves(params, {path: x.astype(leaves_by_path(params)[path].dtype) for path, x in moved.items()})

    def read(self, params: Tree) -> Tree:
        return {"": -jnp.mean(jnp.asarray(self._tables(params)[1], _REAL), 0)}

    def logarithm(self, element: Tree) -> Tree:
        return element

    def balance(self, params: Tree) -> Tree:  # the sum over rows of |t + u|² and |p − u|² is least
        tokens, positions = (jnp.asarray(x, _REAL) for x in self._tables(params))
        return {"": (jnp.sum(positions, 0) - jnp.sum(tokens, 0)) / (len(tokens) + len(positions))}

    def _shape(self, params: Tree) -> tuple[int, ...]:
        return self._tables(params)[0].shape[1:]

    def sample(self, key: jax.Array, params: Tree, scale: float = 1.0) -> Tree:
        return {"": jax.random.uniform(key, self._shape(params), _REAL, -scale, scale)}

    def identity(self, params: Tree) -> Tree:
        return {"": jnp.zeros(self._shape(params), _REAL)}

    def inverse(self, element: Tree) -> Tree:
        return {"": -element[""]}

    def compose(self, a: Tree, b: Tree) -> Tree:
        return {"": a[""] + b[""]}

    def dim(self, params: Tree) -> int:
        return math.prod(self._shape(params))


@dataclasses.dataclass(frozen=True)
class Trade(go.Gauge):
    """A scale between the columns of one kernel and the rows of the next, at the top of a dict of parameters."""

    up: str
    down: str
    name: ClassVar[str] = "trade"
    effect: ClassVar[Any] = "diagonal"

    def act(self, element: Tree, params: Tree) -> Tree:
        up, down, factor = params[self.up], params[self.down], jnp.exp(element[""])
        moved = {self.up: up * factor[None], self.down: down / factor[:, None]}
        return {**params, **{path: x.astype(params[path].dtype) for path, x in moved.items()}}

    def read(self, params: Tree) -> Tree:
        return {"": 0.5 * jnp.log(jnp.sum(jnp.square(jnp.asarray(params[self.up], _REAL)), 0))}
