"""Real text without a download: the interpreter's own standard library, bytes as tokens, read with grain.

A batch is found by its number alone, so resuming at step n needs no iterator state: `batches[n]` is the same
array in a run that was killed and in one that was not.
"""

import sysconfig
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import grain.python as grain
import numpy as np

VOCAB = 256
VALIDATION_SHARE = 0.05


@dataclass(frozen=True)
class Windows:
    """Non-overlapping windows of `length` + 1 tokens: every token but a window's first is predicted once."""

    tokens: np.ndarray
    length: int

    def __len__(self) -> int:
        """How many whole windows there are."""
        return (len(self.tokens) - 1) // self.length

    def __getitem__(self, index: int) -> np.ndarray:
        """Window `index` as int32."""
        start = index * self.length
        return self.tokens[start : start + self.length + 1].astype(np.int32)


def read_bytes(path: Path | None = None) -> np.ndarray:
    """All bytes of one file, or of the standard library's top-level modules in alphabetical order."""
    if path is not None:
        return np.frombuffer(path.read_bytes(), np.uint8)
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return np.frombuffer(b"\n".join(source.read_bytes() for source in sources), np.uint8)


def read_prose() -> np.ndarray:
    """All bytes of the interpreter's own reference, English sentences as `help()` prints them."""
    return np.frombuffer("\n".join(topics[name] for name in sorted(topics)).encode(), np.uint8)


def batches(
    length: int, batch: int, path: Path | None = None, seed: int = 0, tokens: np.ndarray | None = None
) -> tuple[grain.MapDataset, list[np.ndarray]]:
    """Endless training batches (batch, length + 1), looked up by number, and held-out ones from the end."""
    tokens = read_bytes(path) if tokens is None else tokens
    cut = int(len(tokens) * (1 - VALIDATION_SHARE))
    if len(tokens) - cut <= batch * length:
        raise ValueError(f"{len(tokens)} bytes of text are too few for batches of {batch} × {length}")
    train = grain.MapDataset.source(Windows(tokens[:cut], length)).shuffle(seed=seed).repeat().batch(batch)
    held_out = grain.MapDataset.source(Windows(tokens[cut:], length)).shuffle(seed=seed)
    held_out = held_out.batch(batch, drop_remainder=True)
    return train, [held_out[i] for i in range(min(8, len(held_out)))]
