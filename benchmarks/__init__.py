"""Speed, as ratios: both sides in one process, interleaved. Numbers live in `benchmarks/results`, never in tests."""
