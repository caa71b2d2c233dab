"""Speed, as ratios: both sides in one process, interleaved. Numbers live in `benchmarks/results`, never in tests.

Four questions are settled, and their benchmarks gone: what packed heads save (`packing.md`), how long readings of
curvature take (`curvature.md`), what `go.measure.track` costs (`metrics.md`), and whether `go.check` is silent for
right set-ups (`preflight.md`). The results stay; commit 0145e0a has the code that made them.
"""
