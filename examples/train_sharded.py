"""Trains the language model on a mesh of devices, and resumes a run on another mesh or with another layout.

    python -m examples.train_sharded --devices 8 --mesh 4x2 --layout fsdp_tp --stop-after 150  # stops half-way ...
    python -m examples.train_sharded --devices 8 --mesh 2x4 --layout tp                        # ... goes on elsewhere
    python -m examples.train_sharded --devices 1 --mesh 1x1 --layout dp --out outputs/alone    # without interruption

`--devices 8` makes virtual CPU devices; without it, the mesh consists of the devices that exist. Layouts are those of
`models.lm_sharding`. Mesh and layout change only the order of sums: the losses of the two runs above differ by 1e-6,
and both end (one minute for each command on 2 CPU cores) with

    validation loss 2.1854 after 300 steps
"""

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

import gauge_optax as go
from examples import common, data
from models import lm, lm_sharding

HEADS = 8

Optimizer = Callable[[optax.Schedule, list[go.Gauge]], optax.GradientTransformationExtraArgs]
OPTIMIZERS: Mapping[str, Optimizer] = {
    "ddc_adamw": lambda rate, gauges: go.ddc_adamw(rate, gauges, weight_decay=0.1),
    "ddc_muon": lambda rate, gauges: go.ddc_muon(rate, gauges, weight_decay=0.1, consistent_rms=0.2),
    "adamw": lambda rate, gauges: optax.adamw(rate, weight_decay=0.1),
}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the options of a training run, and those of its mesh and layout."""
    parser = common.options(__doc__, "train_sharded")
    parser.add_argument("--devices", type=int, help="so many virtual CPU devices; default: the devices there are")
    parser.add_argument("--mesh", default="4x2", help="data x model")
    parser.add_argument("--layout", choices=lm_sharding.LAYOUTS, default="fsdp_tp")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="ddc_adamw")
    return parser.parse_args(argv)


def use_virtual_devices(count: int) -> None:
    """Divides the CPU into devices. This has an effect only before JAX has initialised its devices."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # LAPACK's threads would compete with the devices
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)


def laid_out(tx: optax.GradientTransformation, params: Any, shardings: Any, whole: NamedSharding) -> tuple[Any, Any]:
    """The shapes and shardings of parameters and optimizer state, with which both are made, saved and restored.

    Args:
      tx: the optimizer.
      params: the parameters, as arrays or shapes.
      shardings: the shardings of the parameters.
      whole: the sharding of arrays that have no other, such as a step counter.

    Returns:
      Parameters and state, as trees of shapes with shardings. Moments have the shardings of their parameters. For all
      other arrays of the state, such as `ddc_adamw`'s numbers per channel and per head, XLA chooses.
    """
    params = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), params, shardings)
    chosen = jax.jit(tx.init).lower(params).compile().output_shardings

    def on_mesh(chosen: Any) -> Any:  # a sharding, or a tree of them
        return jax.tree.map(lambda s: s if isinstance(s, NamedSharding) else whole, chosen)

    def like_parameter(chosen: Any, sharding: NamedSharding) -> Any:  # Muon keeps no second moment
        return chosen if isinstance(chosen, optax.MaskedNode) else sharding

    places = optax.tree.map_params(
        tx, like_parameter, chosen, shardings, transform_non_params=on_mesh,
        is_leaf=lambda x: isinstance(x, optax.MaskedNode))
    shapes = jax.eval_shape(tx.init, params)
    return params, jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, places)


def main(argv: Sequence[str] | None = None) -> dict[str, Any] | None:
    """Trains from the latest checkpoint, if there is one, and returns the results.

    Returns None if `--stop-after` ends the run before `--steps`.
    """
    args = parse(argv)
    if args.devices is not None:
        use_virtual_devices(args.devices)
    sides = tuple(map(int, args.mesh.split("x")))
    if args.devices is None and (here := jax.device_count()) < (wanted := sides[0] * sides[1]):
        raise SystemExit(f"--mesh {args.mesh} wants {wanted} devices, here are {here}: add --devices {wanted} for "
                         f"virtual ones, or write --mesh 1x{here}")
    mesh = lm_sharding.make_mesh(*sides)
    config = lm.llama_config(
        vocab=data.VOCAB, d_model=args.width, layers=args.layers, heads=HEADS, kv_heads=HEADS // 2,
        d_head=max(2, args.width // HEADS), d_ff=3 * args.width, max_len=args.length,
    )
    train, held_out = data.batches(args.length, args.batch, args.data)
    rate = optax.warmup_cosine_decay_schedule(0.0, args.rate, min(20, args.steps // 2), args.steps)
    tx = OPTIMIZERS[args.optimizer](rate, lm.gauges(config))
    fresh, loss = lm.params_and_loss(config, jax.random.key(args.seed))
    whole, by_batch = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    target = laid_out(tx, fresh, lm_sharding.shardings(fresh, mesh, args.layout), whole)
    places = jax.tree.map(lambda x: x.sharding, target)

    def step(params: Any, state: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    # Results have the shardings of the arguments, so that the arguments' memory can be reused (`donate_argnums`).
    train_step = jax.jit(step, donate_argnums=(0, 1), out_shardings=(*places, whole))

    checkpoints = common.Checkpoints(args.out)
    saved = checkpoints.restore(target)
    if saved is None:
        params = jax.device_put(fresh, places[0])
        state, losses = jax.jit(tx.init, out_shardings=places[1])(params), list[float]()
        print(go.check(tx, state, params, jax.jit(jax.grad(loss))(params, jax.device_put(train[0], by_batch))))
    else:
        (params, state), losses = saved
        print(f"resuming after step {len(losses)}, on a mesh of {args.mesh}")

    last = min(args.steps, args.stop_after or args.steps)
    for n in tqdm(range(len(losses), last), initial=len(losses), total=args.steps, unit="step"):
        params, state, value = train_step(params, state, jax.device_put(train[n], by_batch))
        losses.append(float(value))
        if (n + 1) % args.save_every == 0 or n + 1 == last:
            checkpoints.save(n + 1, (params, state), losses)
    checkpoints.close()
    if last < args.steps:
        print(f"stopped after step {last}; the same command without --stop-after goes on from here, on any mesh")
        return None

    evaluate = jax.jit(loss)
    validation = float(np.mean([evaluate(params, jax.device_put(tokens, by_batch)) for tokens in held_out]))
    name = f"train_sharded, {args.layout} on {args.mesh}"
    return common.report(name, args.out, losses, validation, params, args.optimizer)


if __name__ == "__main__":
    main()
