"""Speed, as ratios: both sides in one process, interleaved. Numbers live in `benchmarks/results`, never in tests.

Six questions are settled, and their benchmarks gone: what packed heads save (`packing.md`), how long readings of
curvature take (`curvature.md`), what `go.measure.track` costs (`metrics.md`), whether `go.check` is silent for right
set-ups (`preflight.md`), how fifteen optimizers do at one rate each (`track3.md`), and which rate of a narrow network
serves a wide one (`transfer.md`). The results stay; commit 4bffc9a has the code that made the last two, 0145e0a that of
the others.
"""
