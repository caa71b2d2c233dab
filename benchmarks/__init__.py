"""Speed, as ratios: both sides in one process, interleaved. Numbers live in `benchmarks/results`, never in tests.

Seven questions are settled, and their benchmarks gone: what packed heads save (`packing.md`), how long readings of
curvature take (`curvature.md`), what `go.measure.track` costs (`metrics.md`), whether `go.check` is silent for right
set-ups (`preflight.md`), how fifteen optimizers do at one rate each (`track3.md`), which rate of a narrow network
serves a wide one (`transfer.md`), and what the precision of products costs on a GPU (`precision.md`). The results stay.
Commit 65e721f has the code that made the last, 4bffc9a that of the two before, 0145e0a that of the others.
"""
