"""Peak memory of a private step over a plain one, where it could grow: long sequences, large tied vocabularies.

    python benchmarks/memory.py

Each step runs in a process of its own (Linux), after a first one that loads what there is to load. Compared are the
parameters and the growth of the process while the second one runs; a plain step has gradients, a private one its sum.
"""

import ctypes
import os
import re
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import fodp


class Decoder(nn.Module):
    """Words, one layer of attention, and the same table to predict words with."""

    def __init__(self, words: int, width: int):
        super().__init__()
        self.table = nn.Embedding(words, width)
        self.layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)

    def forward(self, tokens):
        return self.layer(self.table(tokens)) @ self.table.weight.t()


class Long(nn.Module):
    """Two wide layers over a long sequence."""

    def __init__(self, width: int):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.LayerNorm(width), nn.Linear(width, width))

    def forward(self, sequence):
        return self.body(sequence).mean(1)[:, :10]


def cases():
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(50_000, (8, 64), generator=generator)
    yield "tied vocabulary 50,000, width 256, 8 texts of 64", lambda: Decoder(50_000, 256), (tokens, tokens)
    sequences, labels = torch.randn(8, 2048, 1024, generator=generator), torch.randint(10, (8,), generator=generator)
    yield "length 2,048, width 1,024, 8 sequences", lambda: Long(1024), (sequences, labels)


def losses(model, batch):
    output = model(batch[0])
    if output.dim() == 3:
        return F.cross_entropy(output.transpose(1, 2), batch[1], reduction="none").mean(1)
    return F.cross_entropy(output, batch[1], reduction="none")


def plain(model, batch):
    def step():
        model.zero_grad(set_to_none=True)
        losses(model, batch).mean().backward()

    return step


def private(model, batch):
    clipper = fodp.Clipper(model, losses)
    return lambda: clipper.clipped_sum(batch, 1.0)


def peak(make, model, batch) -> float:
    """MB of parameters and growth, measured in a child that forgets."""
    reading, writing = os.pipe()
    if os.fork() == 0:
        torch.set_num_threads(1)
        step = make(model, batch)
        step()
        model.zero_grad(set_to_none=True)
        ctypes.CDLL(None).malloc_trim(0)  # give back what the first step has freed
        before = status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here on
        step()
        os.write(writing, str(status("VmHWM") - before).encode())
        os._exit(0)
    os.close(writing)
    grown = float(os.read(reading, 100))
    os.wait()
    return grown + sum(p.numel() * p.element_size() for p in model.parameters()) / 1e6


def status(entry: str) -> float:
    return int(re.search(rf"{entry}:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1e3


if __name__ == "__main__":
    for name, build, batch in cases():
        model = build()
        ours, theirs = peak(private, model, batch), peak(plain, model, batch)
        print(f"{name}: plain {theirs:.0f} MB, private {ours:.0f} MB, {ours / theirs:.2f} times", flush=True)
