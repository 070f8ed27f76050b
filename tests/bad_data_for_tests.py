"""Data that nobody can train on, by kind: what is wrong with record 17, or with all, and what must be said of it."""

import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

SIZE, WIDTH, CLASSES, BAD = 40, 4, 3, 17
INPUTS = torch.randn(SIZE, WIDTH, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(SIZE) % CLASSES


class Rows(Dataset):
    """Records that are read one by one, as from a disk."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        if self.rows[index] is ZeroDivisionError:
            raise ZeroDivisionError("the secret of the record")
        return self.rows[index]


def rows(bad=None):
    found = [(INPUTS[i], int(LABELS[i])) for i in range(SIZE)]
    return found if bad is None else [*found[:BAD], bad, *found[BAD + 1 :]]


def labelled(value):
    labels = LABELS.clone()
    labels[BAD] = value
    return TensorDataset(INPUTS, labels)


OUTSIDE = "record 17 of the data set has a label outside of 0 to 2.*mend or drop that record"

# Of data in memory: refused before anything is charged, in every door. name -> (data set, what is said)
IN_MEMORY = {
    "label out of range": (labelled(7), OUTSIDE),
    "negative label": (labelled(-1), OUTSIDE),
    "labels from 1": (TensorDataset(INPUTS, LABELS + 1), "has a label outside of 0 to 2.*classes count from 0"),
    "label out of range, in columns": ((INPUTS, labelled(7).tensors[1]), OUTSIDE),
    "float labels": (TensorDataset(INPUTS, LABELS.float()), r"float32 labels.*labels\.long\(\)"),
    "double labels": (TensorDataset(INPUTS, LABELS.double()), r"float64 labels.*labels\.long\(\)"),
    "int32 labels": (TensorDataset(INPUTS, LABELS.int()), r"int32 labels.*labels\.long\(\)"),
    "one-hot labels": (TensorDataset(INPUTS, torch.eye(CLASSES).long()[LABELS]), r"labels\.argmax\(1\)"),
    "labels in a column": (TensorDataset(INPUTS, LABELS[:, None]), r"labels\.squeeze\(1\)"),
    "double inputs": (TensorDataset(INPUTS.double(), LABELS), r"float64 numbers.*inputs\.to\(torch\.float32\)"),
    "whole inputs": (TensorDataset(INPUTS.to(torch.uint8), LABELS), r"uint8 numbers.*inputs\.to\(torch\.float32\)"),
    "another width": (TensorDataset(INPUTS[:, :3], LABELS), "than the 4 that a linear layer"),
    "ragged list": (rows((torch.zeros(9), 0)), "record 17 of the data set has another form"),
    "None in a list": (rows(), None),  # below
    "numpy columns": ((INPUTS.numpy(), LABELS.numpy()), r"TensorDataset\(X, y\)"),
    "list of columns": ([INPUTS, LABELS], r"TensorDataset\(X, y\)"),
    "dict of columns": (dict(x=INPUTS, y=LABELS), "TensorDataset"),
    "columns of two lengths": ((INPUTS, LABELS[:30]), "leading dimension"),
    "a file's name": ("patients.csv", "from_table"),
}
IN_MEMORY["None in a list"] = (rows((INPUTS[0], None)), "record 17 of the data set has None")
# Only a Trainer knows the loss before the first lot.
WITH_A_LOSS = {
    "label out of range, in a Subset": (
        Subset(labelled(7), range(10, 40)),
        "record 7 of the data set has a label outside",
    ),
    "label out of range, in a ConcatDataset": (
        ConcatDataset([TensorDataset(INPUTS[:1] + 1, LABELS[:1]), labelled(9)]),
        "record 18",
    ),
    "label out of range, in a list": (rows((INPUTS[0], 7)), OUTSIDE),
}
# Of data that is read record by record: refused when the record is drawn, which costs that step.
READ = {
    "label out of range": (Rows(rows((INPUTS[0], 7))), OUTSIDE),
    "ragged": (Rows(rows((torch.zeros(9), 0))), "record 17 of the data set has another"),
    "None": (Rows([*rows()[:BAD], None, *rows()[BAD + 1 :]]), "record 17 of the data set has None"),
    "None for a label": (Rows(rows((INPUTS[0], None))), "record 17 of the data set has None"),
    "another width": (Rows(rows((torch.zeros(9), 0))), "record 17"),
    "raises": (Rows(rows(ZeroDivisionError)), "record 17 of the data set cannot be read.*ZeroDivisionError"),
}  # fmt: skip
# What honest people train on.
GOOD = {
    "TensorDataset": TensorDataset(INPUTS, LABELS),
    "columns": (INPUTS, LABELS),
    "bytes as labels": TensorDataset(INPUTS, LABELS.to(torch.uint8)),
    "ignored labels": labelled(-100),
    "list": rows(),
    "list of lists": [[list(map(float, x)), int(y)] for x, y in zip(INPUTS, LABELS, strict=True)],
    "rows": Rows(rows()),
    "Subset": Subset(TensorDataset(INPUTS, LABELS), range(30)),
}
