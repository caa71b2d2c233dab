"""Trains the Linen decoder with ddc_adamw through `TrainState`, and saves and resumes runs with Orbax.

    python -m examples.train_linen                            # one minute on 2 CPU cores
    python -m examples.train_linen --stop-after 150           # stops half-way ...
    python -m examples.train_linen                            # ... and this command goes on from there

A resumed run ends with the same weights, bit by bit, as one without interruption. Both print (the hash differs from
machine to machine)

    validation loss 2.3309 after 300 steps; weights f7c79967ce673f11
"""

import argparse
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax
from flax.training.train_state import TrainState
from tqdm import tqdm

import gauge_optax as go
from examples import common, data
from models import linen_mha


def create(config: linen_mha.MHAConfig, args: argparse.Namespace) -> TrainState:
    """Makes initial parameters and optimizer state. The gauges are those of the model's configuration."""
    params, loss = linen_mha.params_and_loss(config, jax.random.key(args.seed))
    rate = optax.warmup_cosine_decay_schedule(0.0, args.rate, min(20, args.steps // 2), args.steps)
    tx = go.ddc_adamw(rate, linen_mha.gauges(config), weight_decay=0.1)
    # `apply_fn` is the loss here, and not the model: nothing in this example needs logits.
    return TrainState.create(apply_fn=loss, params=params, tx=tx)


@jax.jit
def train_step(state: TrainState, tokens: jax.Array) -> tuple[TrainState, jax.Array]:
    """Takes one training step. Returns the new state, and the loss before the step."""
    loss, grads = jax.value_and_grad(state.apply_fn)(state.params, tokens)
    return state.apply_gradients(grads=grads), loss


def main(argv: Sequence[str] | None = None) -> dict[str, Any] | None:
    """Trains from the latest checkpoint, if there is one, and returns the results.

    Returns None if `--stop-after` ends the run before `--steps`.
    """
    args = common.parse(__doc__, "train_linen", argv)
    config = linen_mha.MHAConfig(
        vocab=data.VOCAB, d_model=args.width, layers=args.layers, d_ff=4 * args.width, max_len=args.length
    )
    train, held_out = data.batches(args.length, args.batch, args.data)
    state = create(config, args)

    checkpoints = common.Checkpoints(args.out)
    losses: list[float] = []
    saved = checkpoints.restore(jax.eval_shape(lambda: state))
    if saved is not None:
        state, losses = saved
        print(f"resuming after step {len(losses)}")
    else:  # once, before the first step: `check` raises errors for mistakes that training would not report
        print(go.check(state.tx, state.opt_state, state.params, jax.grad(state.apply_fn)(state.params, train[0])))

    last = min(args.steps, args.stop_after or args.steps)
    for n in tqdm(range(len(losses), last), initial=len(losses), total=args.steps, unit="step"):
        state, loss = train_step(state, train[n])
        losses.append(float(loss))
        if (n + 1) % args.save_every == 0 or n + 1 == last:
            checkpoints.save(n + 1, state, losses)
    checkpoints.close()
    if last < args.steps:
        print(f"stopped after step {last}; the same command without --stop-after goes on from here")
        return None

    evaluate = jax.jit(state.apply_fn)
    validation = float(np.mean([evaluate(state.params, tokens) for tokens in held_out]))
    return common.report("train_linen", args.out, losses, validation, state.params)


if __name__ == "__main__":
    main()
