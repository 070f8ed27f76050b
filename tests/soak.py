"""`make soak`: break real trainings at random, again and again, and see whether anything is lost.

Processes are killed, race for one folder and one budget, and find bits of files flipped, disks full, clocks jumping.

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
import shutil
import signal
import subprocess
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


def beside(folder, kind):
    """A file about a run that does not lie on a disk that is filled, or in a folder that is copied."""
    return Path(tempfile.gettempdir()) / f"{folder.name}.{kind}"


def start(folder, extra):
    """Fork a training in the folder, new or resumed; returns its process id."""
    pid = os.fork()
    if pid:
        return pid
    log_noise(beside(folder, "noise"))
    with beside(folder, "log").open("a") as log:
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
    path = beside(folder, "noise")
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
    assert code == 0, f"exit code {code}: {beside(folder, 'log').read_text()[-2000:]}"
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
            assert code == 0, f"exit code {code}: {beside(folder, 'log').read_text()[-2000:]}"
            return hits
        hits["in training" if len(vectors(folder)) > before else "before the first step"] += 1
        assert charged(folder) >= len({line.split()[0] for line in vectors(folder)}), "more releases than charged"
    return hits


def weights(folder):
    saved = torch.load(folder / "checkpoint.pt", weights_only=True)
    return saved["model"], saved["step"], saved["lost_steps"]


def kill_at_random(kills, chance, root, seconds, expected, steps):
    """Half of the kills for seeded runs, half for secure ones."""
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
        yield (
            f"writers killed, {kind} runs",
            f"{sum(hit.values())} kills ({hit['in training']} in training) in {runs} runs, {lost} steps lost and "
            f"charged, {repeated} steps replayed, no noise on two lots, no step uncharged",
        )


def flip_bits(flips, chance, root, seconds, expected, steps):
    """A bit of every file of a run that was stopped: it is refused, or ends with the same weights."""
    stopped = root / "stopped"
    pid = start(stopped, ["--seed", "0"])
    until(lambda: len(vectors(stopped)) > steps // 3)
    os.kill(pid, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 128 + signal.SIGTERM
    files = sorted(path.name for path in stopped.iterdir() if path.stat().st_size)
    refused = dict.fromkeys(files, 0)
    for number in range(flips):
        name, folder = files[number % len(files)], root / "flipped"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(stopped, folder)
        content = bytearray((folder / name).read_bytes())
        place = chance.randrange(8 * len(content))
        content[place // 8] ^= 1 << place % 8
        (folder / name).write_bytes(content)
        code = os.waitstatus_to_exitcode(os.waitpid(start(folder, []), 0)[1])
        assert code in (0, 2), f"exit code {code} after bit {place} of {name}: {tail(folder)}"
        refused[name] += code == 2
        if code == 0:
            model, step, _ = weights(folder)
            assert step == charged(folder) == steps
            assert all(torch.equal(model[key], expected[key]) for key in expected), f"bit {place} of {name}"
    said = ", ".join(f"{name} {count}" for name, count in refused.items())
    yield (
        "bits flipped in the files of a run",
        f"{flips} flips: {sum(refused.values())} refused ({said}), all others harmless",
    )


def fill_disks(times, chance, root, seconds, expected, steps):
    """A small disk that somebody fills at a random moment, and frees again."""
    disk = root / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)], capture_output=True).returncode:
        yield "full disks", "not tried: only root can make a small disk"
        return
    ends = {0: 0, 2: 0}
    try:
        for number in range(times):
            folder, others = disk / f"r{number}", disk / "others"
            pid = start(folder, ["--seed", "0"])
            time.sleep(chance.uniform(0, seconds))
            with contextlib.suppress(OSError), others.open("wb", buffering=0) as file:
                while file.write(bytes(4096)):
                    pass
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            assert code in ends, f"exit code {code}: {tail(folder)}"
            ends[code] += 1
            others.unlink()
            finish(folder, ["--seed", "0"])
            model, step, _ = weights(folder)
            assert step == steps
            assert all(torch.equal(model[key], expected[key]) for key in expected), "other weights"
            shutil.rmtree(folder)
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)
    yield (
        "full disks",
        f"{times} filled: {ends[0]} runs ended all the same, {ends[2]} stopped with a line, all came to the same end",
    )


def race(processes, chance, root, seconds, expected, steps):
    """Processes on one folder, and on one budget that has room for a few of them."""
    short = ["--dataset", "digits", "--epochs", "2", "--noise-multiplier", "4", "--accountant", "rdp", "--threads", "1"]
    codes = together([[*short, "--quiet", "--out", str(root / "one")] for _ in range(processes)], root / "race.log")
    assert sorted(codes) == [0] + [2] * (processes - 1), codes
    yield "processes given one folder", f"{processes} at once: one trained, {processes - 1} were refused"
    book = root / "budget.sqlite"
    shared = [*short, "--quiet", "--ledger", str(book), "--dataset-name", "people", "--budget", "1.2,1e-5"]
    codes = together([[*shared, "--out", str(root / f"race{n}")] for n in range(processes)], root / "race.log")
    ledger = Ledger(book, create=False)
    assert faults(ledger) == []
    left = ledger.left("people")
    ledger.close()
    assert set(codes) <= {0, 2}
    assert codes.count(0) >= 1
    assert 0 <= left < 1, left
    yield (
        "processes on one budget",
        f"{processes} at once: {codes.count(0)} trained to their end, {codes.count(2)} were refused before they began, "
        f"{left:.0%} of the budget left, never overspent",
    )


def together(commands, log):
    """Exit codes of trainings that begin at the same moment."""
    ready, go = os.pipe()
    children = []
    for words in commands:
        pid = os.fork()
        if pid == 0:
            os.close(go)
            os.read(ready, 1)  # until the other end is closed
            handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(handle, 1)
            os.dup2(handle, 2)
            os._exit(fodp(["train", *words]))
        children.append(pid)
    os.close(ready)
    os.close(go)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]


def jump_clocks(times, chance, root, seconds, expected, steps):
    """A clock that is set forwards and backwards by up to a year at any moment; the run is killed and resumed."""
    real = time.time
    for number in range(times):
        jumps = random.Random(chance.random())
        time.time = lambda jumps=jumps: real() + jumps.uniform(-3e7, 3e7)  # children inherit it
        try:
            folder = root / f"clock{number}"
            pid = start(folder, ["--seed", "0"])
            time.sleep(chance.uniform(0, seconds))
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            finish(folder, ["--seed", "0"])
        finally:
            time.time = real
        model, step, _ = weights(folder)
        assert step == charged(folder) == steps
        assert all(torch.equal(model[key], expected[key]) for key in expected), "other weights"
    yield "clocks that jump", f"{times} runs, each killed and resumed: all came to the same end"


def until(condition):
    for _ in range(20000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("never happened")


def tail(folder):
    return beside(folder, "log").read_text()[-2000:]


def soak(kills, processes, chance, root):
    """Break trainings in every way; returns what was counted."""
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(io.StringIO()):  # in this process: all that is loaded and cached, children inherit
        assert fodp(["train", "--quiet", "--out", str(root / "warm"), *WORDS]) == 0
    seconds = time.perf_counter()
    finish(root / "whole", ["--seed", "0"])
    seconds = time.perf_counter() - seconds
    expected, steps, _ = weights(root / "whole")
    print(f"one run of {steps} steps takes {seconds:.1f} s here", flush=True)
    counts = {}
    for ordeal, number in (
        (race, processes),
        (flip_bits, kills),
        (fill_disks, max(2, kills // 6)),
        (jump_clocks, max(2, kills // 10)),
        (kill_at_random, kills),
    ):
        for what, found in ordeal(number, chance, root, seconds, expected, steps):
            counts[what] = found
            print(f"{what}: {found}", flush=True)
    return counts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=60, help="how often each thing is tried, about")
    parser.add_argument("--processes", type=int, default=50, help="how many race for one folder and one budget")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6), help="of the moments")
    parser.add_argument("--record", action="store_true", help="write tests/soak.json, for docs/reliability.md")
    chosen = parser.parse_args()
    print(f"moments drawn with --seed {chosen.seed}")
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="fodp-soak-") as scratch:
        tempfile.tempdir = f"{scratch}/files"
        os.makedirs(tempfile.tempdir)
        counted = soak(chosen.kills, chosen.processes, random.Random(chosen.seed), Path(scratch))
    took = round(time.perf_counter() - began)
    print(f"all is well after {took} s")
    if chosen.record:
        command = f"python tests/soak.py --kills {chosen.kills} --processes {chosen.processes} --seed {chosen.seed}"
        said = {"when": time.strftime("%Y-%m-%d"), "seconds": took, "command": command, "counts": counted}
        Path(__file__).with_suffix(".json").write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
    sys.exit(0)
