"""The runner on a local Ray with two workers: the same records, written by the driver alone, resumed after any end."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fodp_lab.paper.execute import execute
from fodp_lab.paper.records import Records
from fodp_lab.paper.runner import Runner
from test_experiments import lines, tiny
from workers_for_tests import everything_ended

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


RUNS = 30  # enough that on a busy machine too some are left when the first have been seen


def without_time(records):
    """Records by their keys, without what a clock says."""
    return {record["key"]: {k: v for k, v in record.items() if k not in ("seconds", "at")} for record in records}


def start(script, path, environment):
    """A driver in a process group of its own."""
    script.write_text(
        "import sys\n"
        "from fodp_lab.paper.runner import Runner\n"
        "from test_experiments import tiny\n"
        "if __name__ == '__main__':\n"
        "    with Runner(sys.argv[1], 2, quiet=True, ray='local') as runner:\n"
        f"        runner.run([tiny(seed=seed, steps=100) for seed in range({RUNS})], 'on ray')\n"
    )
    places = [os.path.dirname(__file__), *filter(None, sys.path)]
    environment = {**environment, "PYTHONPATH": os.pathsep.join(places)}
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


@pytest.mark.usefixtures("table_of_methods")
@pytest.mark.timeout(900)  # beside other work Ray takes minutes to start
def test_the_same_records_as_here_and_a_module_of_the_users_own(tmp_path, monkeypatch):
    (tmp_path / "seen").mkdir()
    (tmp_path / "method_for_ray.py").write_text(MODULE)
    monkeypatch.setenv("SEEN_BY", str(tmp_path / "seen"))
    monkeypatch.syspath_prepend(str(tmp_path))
    import method_for_ray  # noqa: F401  the driver knows it too, as `fodp reproduce fair --import` sees to

    specs = [tiny(seed=0), tiny(seed=1), tiny("fo-dp-sgd"), tiny("mine-on-ray")]
    appended = []
    append = Records.append
    monkeypatch.setattr(Records, "append", lambda self, record: (appended.append(os.getpid()), append(self, record)))
    path = tmp_path / "ray.jsonl"
    with Runner(path, 2, quiet=True, modules=["method_for_ray"], ray="local") as there:
        there.run(specs, "on Ray")
    here = {spec.key: json.loads(json.dumps(execute(spec))) for spec in specs}
    assert without_time(lines(path)) == without_time(here.values())
    assert appended == [os.getpid()] * len(specs)
    assert {int(file.name) for file in (tmp_path / "seen").iterdir()} > {os.getpid()}  # workers have imported it


@pytest.fixture
def environment():
    with everything_ended() as found:
        yield found


@pytest.mark.timeout(900)  # Ray starts three times
def test_stopped_killed_and_a_worker_killed(tmp_path, environment):
    """Three drivers, one after the other: what ends before its time costs nothing but time."""
    path, script = tmp_path / "r.jsonl", tmp_path / "go.py"
    written = ""
    for how in (signal.SIGINT, signal.SIGKILL):
        process = start(script, path, environment)
        wait_for_records(process, path, written.count("\n") + 2)
        process.send_signal(how)
        code, said = process.wait(timeout=60), process.stderr.read()
        if how == signal.SIGKILL:
            assert code == -signal.SIGKILL
        else:  # Ray itself may fail a check of its own on the interrupt, before Python tells of it
            assert code != 0
            assert "KeyboardInterrupt" in said or "task_manager.cc" in said, said
        before, written = written, path.read_text()
        assert written.startswith(whole_lines(before))  # nothing lost or rewritten
        assert 2 <= len(Records(path)) < RUNS, "it came too late to show anything"
    process = start(script, path, environment)
    wait_for_records(process, path, written.count("\n") + 1)
    os.kill(a_worker_of(process.pid), signal.SIGKILL)
    assert process.wait(timeout=240) == 0, process.stderr.read()
    assert path.read_text().startswith(whole_lines(written))
    keys = [json.loads(line)["key"] for line in path.read_text().splitlines() if line.endswith("}")]
    assert sorted(keys) == sorted(tiny(seed=seed, steps=100).key for seed in range(RUNS))


def whole_lines(text):
    return text[: text.rfind("\n") + 1]


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
