"""Trains the NNX language model with ddc_adamw through `nnx.Optimizer`, and saves and resumes runs with Orbax.

    python -m examples.train_nnx                              # one minute on 2 CPU cores
    python -m examples.train_nnx --stop-after 150             # stops half-way ...
    python -m examples.train_nnx                              # ... and this command goes on from there

A resumed run ends with the same weights, bit by bit, as one without interruption. Both print (the hash differs from
machine to machine)

    validation loss 2.0517 after 300 steps; weights 4eb1bb92942f275e
"""

import argparse
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tqdm import tqdm

import gauge_optax as go
from examples import common, data
from models import lm


@nnx.jit
def train_step(model: lm.LM, optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
    """Takes one training step in place. Returns the loss before the step."""
    loss, grads = nnx.value_and_grad(lm.loss_fn)(model, tokens)
    optimizer.update(model, grads)
    return loss


def create(config: lm.LMConfig, args: argparse.Namespace) -> tuple[lm.LM, nnx.Optimizer]:
    """Makes the model and the optimizer. The gauges are those of the model's configuration."""
    model = lm.build(config, nnx.Rngs(args.seed))
    rate = optax.warmup_cosine_decay_schedule(0.0, args.rate, min(20, args.steps // 2), args.steps)
    tx = go.ddc_adamw(rate, lm.gauges(config), weight_decay=0.1)
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def main(argv: Sequence[str] | None = None) -> dict[str, Any] | None:
    """Trains from the latest checkpoint, if there is one, and returns the results.

    Returns None if `--stop-after` ends the run before `--steps`.
    """
    args = common.parse(__doc__, "train_nnx", argv)
    config = lm.llama_config(
        vocab=data.VOCAB, d_model=args.width, layers=args.layers, heads=4, kv_heads=2,
        d_head=args.width // 4, d_ff=3 * args.width, max_len=args.length)
    train, held_out = data.batches(args.length, args.batch, args.data)
    model, optimizer = create(config, args)

    checkpoints = common.Checkpoints(args.out)
    losses: list[float] = []
    saved = checkpoints.restore(nnx.state(nnx.eval_shape(lambda: create(config, args))))
    if saved is not None:
        state, losses = saved
        nnx.update((model, optimizer), state)
        print(f"resuming after step {len(losses)}")
    else:  # once, before the first step: `check` raises errors for mistakes that training would not report
        params, grads = nnx.state(model, nnx.Param), nnx.grad(lm.loss_fn)(model, jnp.asarray(train[0]))
        print(go.check(optimizer.tx, optimizer.tx.init(params), params, grads))

    last = min(args.steps, args.stop_after or args.steps)
    for n in tqdm(range(len(losses), last), initial=len(losses), total=args.steps, unit="step"):
        losses.append(float(train_step(model, optimizer, train[n])))
        if (n + 1) % args.save_every == 0 or n + 1 == last:
            checkpoints.save(n + 1, nnx.state((model, optimizer)), losses)
    checkpoints.close()
    if last < args.steps:
        print(f"stopped after step {last}; the same command without --stop-after goes on from here")
        return None

    evaluate = nnx.jit(lm.loss_fn)
    validation = float(np.mean([evaluate(model, jnp.asarray(tokens)) for tokens in held_out]))
    return common.report("train_nnx", args.out, losses, validation, nnx.state(model, nnx.Param))


if __name__ == "__main__":
    main()
