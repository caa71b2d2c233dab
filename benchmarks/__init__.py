"""Speed, as ratios: both sides in one process, interleaved. Numbers live in `benchmarks/results`, never in tests.

Nine questions are settled, and their benchmarks gone: what packed heads save (`packing.md`), how long readings of
curvature take (`curvature.md`), what `go.measure.track` costs (`metrics.md`), whether `go.check` is silent for right
set-ups (`preflight.md`), how fifteen optimizers do at one rate each (`track3.md`), which rate of a narrow network
serves a wide one (`transfer.md`), what the precision of products costs on a GPU (`precision.md`), and how the core of
parts compares with the one before, in results (`side_by_side.md`) and in time (`before_parts.md`). The results stay.
Commit a058822 has the code that made the last two, 65e721f that of the one before them, 4bffc9a that of the two before
that, 0145e0a that of the others.
"""
