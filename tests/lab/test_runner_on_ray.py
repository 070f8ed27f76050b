"""The runner on a local Ray with two workers: the same records, written by the driver alone, resumed after any end."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fodp.errors import PrivacyError
from fodp.methods import METHODS
from fodp_lab.paper import runner
from fodp_lab.paper.records import Records
from fodp_lab.paper.runner import Runner
from test_experiments import lines, tiny

pytest.importorskip("ray", reason="ray is not installed")

MODULE = """
import os
from pathlib import Path
import fodp
from fodp.methods import METHODS

Path(os.environ["SEEN_BY"], str(os.getpid())).touch()


class Mine(METHODS["dp-sgd"]):
    name = "mine-on-ray"


fodp.register(Mine)
"""


RUNS = 20  # enough that on a busy machine too some are left when the first have been seen


def without_time(path):
    """Records by their keys, without what a clock says."""
    return {line["key"]: {k: v for k, v in line.items() if k not in ("seconds", "at")} for line in lines(path)}


def start(script, path, *words):
    """A driver in a process group of its own, and its environment."""
    script.write_text(
        "import sys\n"
        "from fodp_lab.paper.runner import Runner\n"
        "from test_experiments import tiny\n"
        "if __name__ == '__main__':\n"
        "    with Runner(sys.argv[1], 2, quiet=True, ray='local') as runner:\n"
        f"        runner.run([tiny(seed=seed, steps=100) for seed in range({RUNS})], 'on ray')\n"
    )
    places = [os.path.dirname(__file__), *filter(None, sys.path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
    # A shell's background jobs ignore interrupts, and so would what they start.
    return subprocess.Popen([sys.executable, str(script), str(path)], env=environment, start_new_session=True,
                            stderr=subprocess.PIPE, text=True,
                            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # fmt: skip


def wait_for_records(process, path, count):
    end = time.monotonic() + 240
    while not (path.exists() and path.read_text().count("\n") >= count):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def table_of_methods():
    """The table is afterwards what it was: other tests must not see what this one adds."""
    before = dict(METHODS)
    yield
    for name in METHODS.keys() - before.keys():
        del METHODS[name]


@pytest.mark.usefixtures("table_of_methods")
def test_the_same_records_as_by_processes_and_a_module_of_the_users_own(tmp_path, monkeypatch):
    (tmp_path / "seen").mkdir()
    (tmp_path / "method_for_ray.py").write_text(MODULE)
    monkeypatch.setenv("SEEN_BY", str(tmp_path / "seen"))
    monkeypatch.syspath_prepend(str(tmp_path))
    import method_for_ray  # noqa: F401  the driver knows it too, as `fodp reproduce fair --import` sees to

    specs = [tiny(seed=0), tiny(seed=1), tiny("fo-dp-sgd"), tiny("mine-on-ray")]
    appended = []
    append = Records.append
    monkeypatch.setattr(Records, "append", lambda self, record: (appended.append(os.getpid()), append(self, record)))
    for path, ray in ((tmp_path / "ray.jsonl", "local"), (tmp_path / "processes.jsonl", None)):
        with Runner(path, 2, quiet=True, modules=["method_for_ray"], ray=ray) as there:
            there.run(specs, "both ways")
    assert without_time(tmp_path / "ray.jsonl") == without_time(tmp_path / "processes.jsonl")
    assert appended == [os.getpid()] * 8
    assert {int(file.name) for file in (tmp_path / "seen").iterdir()} > {os.getpid()}  # workers have imported it


def test_a_worker_killed_in_the_middle_costs_nothing_but_time(tmp_path):
    path = tmp_path / "r.jsonl"
    process = start(tmp_path / "go.py", path)
    wait_for_records(process, path, 1)
    os.kill(a_worker_of(process.pid), signal.SIGKILL)
    assert process.wait(timeout=240) == 0, process.stderr.read()
    assert sorted(record["key"] for record in lines(path)) == sorted(tiny(seed=s, steps=100).key for s in range(RUNS))


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_stopped_and_started_again(tmp_path, how):
    path = tmp_path / "r.jsonl"
    process = start(tmp_path / "go.py", path)
    wait_for_records(process, path, 2)
    process.send_signal(how)
    code, said = process.wait(timeout=60), process.stderr.read()
    if how == signal.SIGKILL:
        assert code == -signal.SIGKILL
    else:  # Ray itself may fail a check of its own on the interrupt, before Python tells of it
        assert code != 0
        assert "KeyboardInterrupt" in said or "task_manager.cc" in said, said
    before = path.read_text()
    assert 2 <= len(Records(path)) < RUNS, "it came too late to show anything"
    again = start(tmp_path / "go.py", path)
    assert again.wait(timeout=240) == 0, again.stderr.read()
    assert path.read_text().startswith(before[: before.rindex("\n") + 1])  # nothing lost or rewritten
    keys = [json.loads(line)["key"] for line in path.read_text().splitlines() if line.endswith("}")]
    assert len(keys) == len(set(keys)) == RUNS


def test_a_record_of_other_code_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "code_of", lambda spec: "other")
    with pytest.raises(PrivacyError, match="install the same fodp"), Runner(tmp_path / "r.jsonl", 1, quiet=True) as one:
        one.run([tiny()], "old workers")
    assert not (tmp_path / "r.jsonl").exists()


def a_worker_of(driver):
    """A process of Ray that computes, found by the driver among its ancestors."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal() and "_on_worker" in command_of(entry) and driver in ancestors(int(entry.name)):
                return int(entry.name)
        time.sleep(0.02)
    raise AssertionError("no worker of Ray is at work")


def command_of(entry):
    try:
        return (entry / "cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""  # it has just ended


def ancestors(process):
    while process > 1:
        try:
            process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return
        yield process
