"""Speed, as ratios: both sides in one process, interleaved. Numbers live in `benchmarks/results`, never in tests.

These questions are settled, and their benchmarks gone; the results stay. The commit has the code that made them.

* 0145e0a: what packed heads save (`packing.md`), how long readings of curvature take (`curvature.md`), what
  `go.measure.track` costs (`metrics.md`), whether `go.check` is silent for right set-ups (`preflight.md`).
* 4bffc9a: how fifteen optimizers do at one rate each (`track3.md`), which rate of a narrow network serves a wide one
  (`transfer.md`).
* 65e721f: what the precision of products costs on a GPU (`precision.md`).
* a058822: how the core of parts compares with the one before, in results (`side_by_side.md`) and in time
  (`before_parts.md`).
* 7c6ca5f: what LoRA's factors cost beside LoRA-RITE, and how far twins of them end apart (`lora.md`); how long choosing
  a point of GPT-2's orbit takes (`orbit.md`), and the first training step of a new process (`first_step.md`); how many
  dead directions a Llama of 1.2 million parameters has (`census_large.md`); how far outputs of 42 models move at other
  points of their orbits (`exactness.md`).
"""
