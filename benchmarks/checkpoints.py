"""How long a checkpoint of a large model takes, and how much memory: relative to its state.

    python benchmarks/checkpoints.py [--parameters 5e6] [--window 32] [--folder DIR]

Writes one checkpoint of fo-dp-sgd with a full window, and the same bytes by a plain loop of writes for comparison.
"""

import argparse
import os
import tempfile
import threading
import time
from pathlib import Path

import torch
from torch import nn

import fodp


def resident() -> int:
    """Bytes of this process in memory now (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Peak:
    """The most memory in use while in here, looked at every two milliseconds."""

    def __enter__(self) -> "Peak":
        self.before = self.most = resident()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(0.002):
            self.most = max(self.most, resident())

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()


def trainer(parameters: int, window: int) -> fodp.Trainer:
    """A run that has filled its window, without training it."""
    width = round(parameters**0.5)
    model = nn.Linear(width, width, bias=False)
    plan = fodp.Plan(
        sampling_rate=0.5, steps=100, lot_size=2, clip_norm=1.0, noise_multiplier=1.0, delta=1e-5, accountant="rdp",
        params=dict(window=window, tau=0.0), method="fo-dp-sgd",
    )  # fmt: skip
    data = (torch.zeros(4, width),)
    made = fodp.Trainer(model, lambda m, batch: m(batch[0]).sum(1), data, plan)
    release = torch.randn(made.source.engine.layout.size)
    for _ in range(window):
        made.session.states["method"].write(release)
    return made


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=float, default=5e6)
    parser.add_argument("--window", type=int, default=32)
    parser.add_argument("--folder", default=None)
    chosen = parser.parse_args()
    made = trainer(int(chosen.parameters), chosen.window)
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        path = Path(folder) / "c.pt"
        with Peak() as peak:
            started = time.perf_counter()
            made.save(path)
            seconds = time.perf_counter() - started
        size = path.stat().st_size
        chunk = torch.zeros(2**22).numpy()
        started = time.perf_counter()
        with (Path(folder) / "plain").open("wb") as file:
            for _ in range(size // chunk.nbytes + 1):
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        plain = time.perf_counter() - started
    print(
        f"{size / 1e6:.0f} MB in {seconds:.1f} s, {seconds / plain:.1f} times a plain durable write of as many bytes; "
        f"{(peak.most - peak.before) / size:.2f} times its size of memory beside the state itself"
    )
