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
from gauge_optax.binding import Matched, bind, block_specs, leaves_by_path, with_leaves

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

    def _found(self, params: Tree) -> Matched:
        axes = "_ channel"
        specs = block_specs(self.name, "tokens", {self.tokens: axes})
        specs += block_specs(self.name, "positions", {self.positions: axes})
        return bind(self.name, specs, (), params)[0]

    def act(self, element: Tree, params: Tree) -> Tree:
        leaves = leaves_by_path(params)
        moved = {}
        for block in self._found(params).blocks:
            sign = 1.0 if block.argument == "tokens" else -1.0
            leaf = leaves[block.path]
            moved[block.path] = block.write(leaf, (block.view(leaf) + sign * element[""][None]).astype(leaf.dtype))
        return with_leaves(params, moved)

    def read(self, params: Tree) -> Tree:
        block = self._found(params).blocks[1]
        return {"": -jnp.mean(jnp.asarray(block.view(leaves_by_path(params)[block.path]), _REAL), 0)}

    def logarithm(self, element: Tree) -> Tree:
        return element

    def balance(self, params: Tree) -> Tree:  # the sum over rows of |t + u|² and |p − u|² is least
        leaves = leaves_by_path(params)
        tokens, positions = (jnp.asarray(b.view(leaves[b.path]), _REAL) for b in self._found(params).blocks)
        return {"": (jnp.sum(positions, 0) - jnp.sum(tokens, 0)) / (len(tokens) + len(positions))}

    def _shape(self, params: Tree) -> tuple[int, ...]:
        return (dict(self._found(params).sizes)["channel"],)

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
