"""What `torch.compile` does for plain training here: eager and compiled steps in turns, on one thread."""

import statistics
import time

import torch
from torch.nn import functional as F

from fodp_lab.bench.contenders import Step
from fodp_lab.bench.workloads import WORKLOADS, Workload

ROUNDS, BURST = 15, {"mlp": 20, "transformer": 1}


def plain(workload: Workload, compiled: bool) -> Step:
    """A step of plain SGD."""
    inputs, labels = workload.data()
    model = workload.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    forward = torch.compile(model) if compiled else model

    def step() -> None:
        rows = torch.randint(workload.examples, (workload.batch,))
        optimizer.zero_grad()
        F.cross_entropy(forward(inputs[rows]), labels[rows]).backward()
        optimizer.step()

    return step


def main() -> None:
    """Print the ratio for each workload."""
    torch.set_num_threads(1)
    for name, burst in BURST.items():
        steps = [plain(WORKLOADS[name], compiled) for compiled in (False, True)]
        ratios = []
        for number in range(ROUNDS + 1):
            seconds = []
            for step in steps:
                start = time.process_time()
                for _ in range(burst):
                    step()
                seconds.append(time.process_time() - start)
            if number:  # the first round compiles
                ratios.append(seconds[1] / seconds[0])
        print(f"{name}: compiled / eager {statistics.median(ratios):.3f} [{min(ratios):.3f}, {max(ratios):.3f}]")


if __name__ == "__main__":
    main()
