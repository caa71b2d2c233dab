"""Real text without a download: the sources of Python's standard library. Tokens are bytes; they are read with grain.

`batches[n]` depends on the number n alone. To resume a run at step n, no iterator state has to be saved.
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
    """Windows of `length` + 1 tokens. Neighbours share a token, so that every token but the first is predicted once."""

    tokens: np.ndarray
    length: int

    def __len__(self) -> int:
        """The number of whole windows."""
        return (len(self.tokens) - 1) // self.length

    def __getitem__(self, index: int) -> np.ndarray:
        """The window with the number `index`, as int32."""
        start = index * self.length
        return self.tokens[start : start + self.length + 1].astype(np.int32)


def read_bytes(path: Path | None = None) -> np.ndarray:
    """All bytes of one file or, without `path`, of the standard library's top-level modules in alphabetical order."""
    if path is not None:
        return np.frombuffer(path.read_bytes(), np.uint8)
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return np.frombuffer(b"\n".join(source.read_bytes() for source in sources), np.uint8)


def read_prose() -> np.ndarray:
    """All bytes of Python's language reference, which is English text, as `help()` prints it."""
    return np.frombuffer("\n".join(topics[name] for name in sorted(topics)).encode(), np.uint8)


def batches(
    length: int, batch: int, path: Path | None = None, seed: int = 0, tokens: np.ndarray | None = None
) -> tuple[grain.MapDataset, list[np.ndarray]]:
    """Returns training batches (batch, length + 1), an endless sequence, and a list of held-out batches.

    The held-out batches are from the end of the text.
    """
    tokens = read_bytes(path) if tokens is None else tokens
    cut = int(len(tokens) * (1 - VALIDATION_SHARE))
    if len(tokens) - cut <= batch * length:
        raise ValueError(f"{len(tokens)} bytes of text are too few for batches of {batch} × {length}")
    train = grain.MapDataset.source(Windows(tokens[:cut], length)).shuffle(seed=seed).repeat().batch(batch)
    held_out = grain.MapDataset.source(Windows(tokens[cut:], length)).shuffle(seed=seed)
    held_out = held_out.batch(batch, drop_remainder=True)
    return train, [held_out[i] for i in range(min(8, len(held_out)))]
