"""Appendix B of *Dead-Direction Conditioners* in NumPy, float64, written from the paper's text alone.

A gauge is a class with `step(params, grads)`, which changes the arrays in place. Names follow the paper: ρ for norms,
u for the joint radial coordinate, M for a head's Gram matrix.
"""

import numpy as np

Array = np.ndarray
B1, B2, EPS = 0.9, 0.999, 1e-8


class Adam:
    """Adam on one array."""

    def __init__(self) -> None:
        self.m, self.v, self.t = np.zeros(()), np.zeros(()), 0

    def moments(self, g: Array, square: Array) -> tuple[Array, Array]:
        """m̂ and v̂."""
        self.t += 1
        self.m, self.v = B1 * self.m + (1 - B1) * g, B2 * self.v + (1 - B2) * square
        return self.m / (1 - B1**self.t), self.v / (1 - B2**self.t)

    def step(self, g: Array) -> Array:
        """m̂/(√v̂ + ε)."""
        mean, variance = self.moments(g, g**2)
        return mean / (np.sqrt(variance) + EPS)


class Rescale:
    """B.4, B.6, B.7: tensors with one length each per channel, of which s = Π ρᵢ^eᵢ is invariant.

    Args:
      shapes: of the tensors; the channels are the last axis of the first and the first axis of the second. Without
        channels a tensor has one length.
      exponents: e.
      by_channel: whether lengths are per channel.
      radial: "linear" or "log".
    """

    def __init__(self, shapes, exponents, by_channel, lr, wd, radial="linear", max_log_step=0.5, floor=1e-3):  # type: ignore[no-untyped-def]
        self.axes = [tuple(range(len(n))) for n in shapes]
        if by_channel:
            self.axes = [tuple(range(len(shapes[0]) - 1)), tuple(range(1, len(shapes[1])))]
        self.by_channel, self.e, self.n = by_channel, exponents, sum(e * e for e in exponents)
        self.lr, self.wd, self.radial, self.most, self.floor = lr, wd, radial, max_log_step, floor
        self.u, self.tangential = Adam(), [Adam() for _ in shapes]

    def spread(self, x: Array, k: int, ndim: int) -> Array:
        """A number per channel beside the tensor."""
        return x if not self.by_channel or k == 0 else x.reshape(-1, *(1,) * (ndim - 1))

    def step(self, weights: list[Array], grads: list[Array]) -> None:
        """One update."""
        rho = [np.sqrt(np.sum(w * w, a)) for w, a in zip(weights, self.axes, strict=True)]
        g_log = [np.sum(w * g, a) for w, g, a in zip(weights, grads, self.axes, strict=True)]
        joint = sum(e * g for e, g in zip(self.e, g_log, strict=True))
        if self.radial == "log":
            delta_u = -self.lr * self.u.step(joint / np.sqrt(self.n)) - np.sqrt(self.n) * self.lr * self.wd
        else:
            s = np.prod([r**e for r, e in zip(rho, self.e, strict=True)], 0)
            least = self.floor / (self.n * self.wd) if self.wd else 0.0
            loss_step = -self.lr * self.u.step(joint / self.n / np.maximum(s, least))
            s_new = s * np.exp(-self.n * self.lr * self.wd) + loss_step
            move = np.log(np.maximum(s_new, 1e-300)) - np.log(s)
            delta_u = np.clip(move, -self.most, self.most) / np.sqrt(self.n)
        for k, (w, g) in enumerate(zip(weights, grads, strict=True)):
            r = self.spread(rho[k], k, w.ndim)
            g_tan = self.tangent(g, w, k, r)
            if self.by_channel and w.size == rho[k].size:  # one entry per channel: a sign is all its direction
                g_tan = np.zeros_like(g)
            u = self.tangent(self.tangential[k].step(r * g_tan), w, k, r)
            grow = np.exp(self.spread(self.e[k] * delta_u / np.sqrt(self.n), k, w.ndim))
            w[...] = grow * w - self.lr * r * u

    def tangent(self, x: Array, w: Array, k: int, r: Array) -> Array:
        """Without its part along the k-th tensor, whose lengths are r."""
        return x - self.spread(np.sum(x * w, self.axes[k]), k, w.ndim) / r**2 * w


class Head:
    """B.8 for one head: Q and K of shape (d_model, d_head)."""

    def __init__(self, lr: float, v_mode: str) -> None:
        self.lr, self.v_mode, self.adam = lr, v_mode, (Adam(), Adam())
        self.basis: Array | None = None

    @staticmethod
    def horizontal(ws: list[Array], gs: list[Array]) -> list[Array]:
        """The Lyapunov projection, by the eigenvectors of M."""
        skew = sum(w.T @ g for w, g in zip(ws, gs, strict=True))
        values, vectors = np.linalg.eigh(sum(w.T @ w for w in ws))
        inside = vectors.T @ (skew - skew.T) @ vectors
        a = vectors @ (inside / (values[:, None] + values[None])) @ vectors.T
        return [g - w @ a for w, g in zip(ws, gs, strict=True)]

    def step(self, ws: list[Array], gs: list[Array]) -> None:
        """One update; the eigenbasis is the one of the first point."""
        gs = self.horizontal(ws, gs)
        if self.v_mode == "body_frame" and self.basis is None:
            self.basis = np.linalg.eigh(sum(w.T @ w for w in ws))[1]
        if self.basis is not None:
            gs = [g @ self.basis for g in gs]
        updates = []
        for adam, g in zip(self.adam, gs, strict=True):
            squares = {"per_head_scalar": np.mean(g**2), "per_head_matrix": g.T @ g / len(g), "body_frame": g**2}
            mean, variance = adam.moments(g, squares[self.v_mode])
            if self.v_mode == "per_head_matrix":
                values, vectors = np.linalg.eigh(variance + EPS**2 * np.eye(len(variance)))
                updates.append(mean @ (vectors * values**-0.5) @ vectors.T)
            else:
                updates.append(mean / (np.sqrt(variance) + EPS))
        if self.basis is not None:
            updates = [u @ self.basis.T for u in updates]
        for w, u in zip(ws, self.horizontal(ws, updates), strict=True):  # B.1: the outer projection
            w -= self.lr * u
