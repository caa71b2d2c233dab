"""Benchmarks. Speed is measured as a ratio of two programs that run alternately in one process.

Results are in `benchmarks/results`; no test depends on them. Some questions are settled, so that their benchmarks were
removed and only the results are left. The following commits have the code that made them.

* 0145e0a: what packed heads save (`packing.md`), how long measurements of curvature take (`curvature.md`), what
  `go.measure.track` costs (`metrics.md`), whether `go.check` is silent for right set-ups (`preflight.md`).
* 4bffc9a: the losses of fifteen optimizers at one learning rate each (`track3.md`), and whether the best rate of a
  narrow network is good for a wide one (`transfer.md`).
* 65e721f: what the precision of matrix products costs on a GPU (`precision.md`).
* a058822: how the library's core, since it consists of parts, compares with the one before, in results
  (`side_by_side.md`) and in time (`before_parts.md`).
* 7c6ca5f: the time of LoRA factors under our optimizers and LoRA-RITE, and how far two runs from factors of one product
  differ (`lora.md`); how long choosing a point of GPT-2's orbit takes (`orbit.md`), and the first training step of a
  new process (`first_step.md`); how many dead directions a Llama of 1.2 million parameters has (`census_large.md`); how
  far outputs of 42 models move at other points of their orbits (`exactness.md`).
"""
