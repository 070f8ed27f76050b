"""`torchrun -m fodp train --sharded`: the same files and numbers, and a folder of slices beside the checkpoint."""

import json

import pytest

from fodp.cli.main import main
from test_faults import TRAIN, command


def test_the_command_line_trains_in_slices_and_resumes_without(tmp_path, capsys):
    pytest.importorskip("sklearn", reason="the embedded digits come with it")
    short = [*TRAIN, "--method", "fo-dp-sgd", "--epochs", "0.5", "--seed", "3", "--json"]
    alone = command(1, [*short, "--out", str(tmp_path / "1")])[0]
    both = command(2, [*short, "--sharded", "--out", str(tmp_path / "2")])
    assert [code for code, _, _ in [alone, *both]] == [0, 0, 0], both
    assert both[1][1:] == ("", "")  # the second rank says nothing
    one, two = (json.loads(out.splitlines()[-1]) for _, out, _ in (alone, both[0]))
    for result in (one, two):
        del result["out"], result["seconds"]
    assert one.pop("final_loss") == pytest.approx(two.pop("final_loss"), rel=1e-5)
    assert one == two
    names = [sorted(f.name for f in (tmp_path / n).iterdir() if ".slices-" not in f.name) for n in "12"]
    assert names[0] == names[1]
    assert main(["export", str(tmp_path / "2"), str(tmp_path / "w.safetensors")]) == 0
    assert (
        main(["train", "--resume", "--quiet", "--out", str(tmp_path / "2")]) == 0
    )  # it is done: nothing is left to do


def test_one_process_has_nothing_to_divide(capsys, tmp_path):
    pytest.importorskip("sklearn", reason="the embedded digits come with it")
    assert main([*TRAIN, "--sharded", "--out", str(tmp_path / "run")]) == 2
    assert "--sharded divides the model among ranks" in capsys.readouterr().err
