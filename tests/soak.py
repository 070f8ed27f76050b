"""`make soak`: kill a real training process at random moments, again and again, and see whether anything is lost.

Seeded: the final weights must equal those of an uninterrupted run bit for bit. Secure: the ledger must count at
least every release that was made, after every kill, and no noise vector may repeat. Trainings are forked from this
process, which has everything loaded, so that most kills hit the training and not the imports.
"""

import argparse
import contextlib
import hashlib
import io
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch

from fodp.cli import train
from fodp.cli.main import main as fodp
from fodp.ledger import Ledger
from fodp.ledger.card import faults
from fodp.noise import Streams

WORDS = ["--dataset", "digits", "--epochs", "40", "--noise-multiplier", "4", "--accountant", "rdp", "--threads", "1"]

train._SAVING = 1.0  # a checkpoint an epoch, whatever it costs: the more is written, the more can go wrong


def start(folder, extra):
    """Fork a training in the folder, new or resumed; returns its process id."""
    pid = os.fork()
    if pid:
        return pid
    log_noise(folder.with_suffix(".noise"))
    with folder.with_suffix(".log").open("a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        resumed = (folder / "config.json").exists()
        code = fodp(["train", "--quiet", "--out", str(folder), *(["--resume"] if resumed else [*WORDS, *extra])])
    os._exit(code)


def log_noise(path):
    """Every noise vector leaves its hash in a file, before anybody can use it."""
    original = Streams.normal_
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def normal(self, out, std, step, name):
        drawn = original(self, out, std, step, name)
        os.write(handle, f"{step} {name} {hashlib.sha256(drawn.numpy().tobytes()).hexdigest()}\n".encode())
        return drawn

    Streams.normal_ = normal


def vectors(folder):
    path = folder.with_suffix(".noise")
    return path.read_text().splitlines() if path.exists() else []


def charged(folder):
    """How many steps the run's ledger counts."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        run = json.loads((folder / "config.json").read_text())["run"]
        ledger = Ledger(folder / "ledger.sqlite", create=False)
        steps = ledger.steps(run) or 0
        ledger.close()
        return steps
    return 0


def finish(folder, extra):
    code = os.waitstatus_to_exitcode(os.waitpid(start(folder, extra), 0)[1])
    assert code == 0, f"exit code {code}: {folder.with_suffix('.log').read_text()[-2000:]}"
    ledger = Ledger(folder / "ledger.sqlite", create=False)
    assert faults(ledger) == []
    ledger.close()


def harass(folder, extra, kills, longest, chance):
    """Kill the training `kills` times, or until it comes to its end; returns how often it was hit, and when."""
    hits = {"before the first step": 0, "in training": 0}
    while sum(hits.values()) < kills:
        before, pid = len(vectors(folder)), start(folder, extra)
        time.sleep(chance.uniform(0, longest))
        os.kill(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code != -signal.SIGKILL:
            assert code == 0, f"exit code {code}: {folder.with_suffix('.log').read_text()[-2000:]}"
            return hits
        hits["in training" if len(vectors(folder)) > before else "before the first step"] += 1
        assert charged(folder) >= len({line.split()[0] for line in vectors(folder)}), "more releases than charged"
    return hits


def weights(folder):
    saved = torch.load(folder / "checkpoint.pt", weights_only=True)
    return saved["model"], saved["step"], saved["lost_steps"]


def soak(kills, chance, root):
    """Half of the kills for seeded runs, half for secure ones."""
    torch.set_num_threads(1)
    began = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):  # in this process: all that is loaded and cached, children inherit
        assert fodp(["train", "--quiet", "--out", str(root / "warm"), *WORDS]) == 0
    seconds = time.perf_counter()
    finish(root / "whole", ["--seed", "0"])
    seconds = time.perf_counter() - seconds
    expected, steps, _ = weights(root / "whole")
    print(f"one run of {steps} steps takes {seconds:.1f} s here; killing {kills} times", flush=True)
    for kind, extra in (("seeded", ["--seed", "0"]), ("secure", [])):
        runs, hit, lost, repeated = 0, {"before the first step": 0, "in training": 0}, 0, 0
        while sum(hit.values()) < (kills + 1) // 2:
            folder = root / f"{kind}{runs}"
            found = harass(folder, extra, (kills + 1) // 2 - sum(hit.values()), seconds / 2, chance)
            hit = {key: hit[key] + found[key] for key in hit}
            finish(folder, extra)
            drawn, (model, step, lost_here) = vectors(folder), weights(folder)
            runs, lost = runs + 1, lost + lost_here
            assert not list(folder.glob("*.part")), "litter"
            repeated += len(drawn) - len(set(drawn))
            assert step == charged(folder) == steps
            if kind == "seeded":
                assert all(torch.equal(model[name], expected[name]) for name in expected), "other weights"
                assert len(set(drawn)) == steps, "a replay was another release"
            else:
                assert len(set(drawn)) == len(drawn), "noise repeats"
                assert len(drawn) <= charged(folder), "more releases than charged"
        print(
            f"{kind}: {sum(hit.values())} kills ({hit['in training']} in training) in {runs} runs, {lost} steps lost "
            f"and charged, {repeated} steps replayed",
            flush=True,
        )
    print(f"all is well after {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6), help="of the moments")
    chosen = parser.parse_args()
    print(f"moments drawn with --seed {chosen.seed}")
    with tempfile.TemporaryDirectory(prefix="fodp-soak-") as scratch:
        soak(chosen.kills, random.Random(chosen.seed), Path(scratch))
    sys.exit(0)
