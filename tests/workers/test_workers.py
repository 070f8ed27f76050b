"""Pools of workers: processes and a local Ray do the same; a worker that dies costs a bounded number of attempts."""

import os
import socket
import subprocess
import sys

import pytest

from fodp.cli.main import main
from fodp.errors import ConfigurationError
from fodp.support.extras import MissingExtra
from fodp.workers import WorkerDied, open_pool
from workers_for_tests import die, refuse, who


@pytest.fixture(scope="module")
def on_ray():
    pytest.importorskip("ray", reason="ray is not installed")
    pool = open_pool(2, "local")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("OMP_NUM_THREADS", raising=False)  # workers set their own number of threads
        yield pool
        pool.close(at_once=False)


@pytest.fixture(scope="module")
def by_processes():
    pool = open_pool(2)
    yield pool
    pool.close(at_once=False)


@pytest.fixture(params=["on_ray", "by_processes"])
def pool(request):
    return request.getfixturevalue(request.param)


def test_results_come_from_other_processes(pool):
    assert pool.jobs == 2
    found = [future.result() for future in [pool.submit(who, value) for value in range(6)]]
    assert [value for value, *_ in found] == list(range(6))
    assert os.getpid() not in {process for _, process, *_ in found}


def test_ray_workers_have_one_thread_and_the_folder_of_the_data(on_ray, monkeypatch, tmp_path):
    monkeypatch.setenv("FODP_DATA", str(tmp_path))
    _, _, threads, folder = on_ray.submit(who, 0).result()
    assert threads == 1
    assert folder == str(tmp_path.resolve())


def test_what_a_run_raises_is_raised_as_it_is(pool):
    with pytest.raises(ValueError, match=r"^twelve$") as refusal:
        pool.submit(refuse, "twelve").result()
    assert type(refusal.value) is ValueError


def test_a_run_whose_worker_dies_is_tried_again(on_ray, tmp_path):
    assert on_ray.submit(die, str(tmp_path), 2).result() == "done"
    assert len(list(tmp_path.iterdir())) == 3


def test_but_not_for_ever(on_ray, tmp_path):
    with pytest.raises(WorkerDied, match=r"died 3 times.*--jobs"):
        on_ray.submit(die, str(tmp_path), 100).result()
    assert len(list(tmp_path.iterdir())) == 3


def test_a_killed_process_is_said(tmp_path):
    pool = open_pool(1)
    with pytest.raises(WorkerDied, match=r"killed, perhaps for lack of memory.*--jobs"):
        pool.submit(die, str(tmp_path), 100).result()
    pool.close(at_once=True)


AT_ONCE = """
import signal, sys, time
from pathlib import Path
import ray
from fodp.workers import open_pool
from workers_for_tests import sleep
before = signal.getsignal(signal.SIGTERM)
pool = open_pool(1, "local")
under_way, waiting = pool.submit(sleep, 600), pool.submit(sleep, 600)
assert signal.getsignal(signal.SIGTERM) == before
folder = Path(pool._folder)
assert folder.exists()
pool.close(at_once=True)
assert under_way.done() and waiting.cancelled()
assert not folder.exists() and not ray.is_initialized()
"""


def test_closing_at_once_does_not_wait_and_leaves_no_file_or_signal_handler():
    pytest.importorskip("ray", reason="ray is not installed")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", AT_ONCE], env=environment, check=True, timeout=120)


def test_an_address_where_nobody_is_is_said_soon():
    pytest.importorskip("ray", reason="ray is not installed")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, and nobody listens
        pool = open_pool(1, f"127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(ConfigurationError, match=r"no Ray cluster answers at --ray 127.*or say --ray local"):
            pool.submit(who, 0)


def test_a_local_ray_has_no_dashboard_and_reports_to_nobody(on_ray):
    import ray

    on_ray.submit(who, 0).result()
    assert not ray._private.worker._global_node.webui_url
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"


@pytest.mark.parametrize("address", ["", "somewhere", "host:", ":6379", "ray://", "host:port", "ray://host:1"])
def test_an_address_that_is_none_is_refused(address):
    pytest.importorskip("ray", reason="ray is not installed")
    with pytest.raises(ConfigurationError, match=r"--ray takes local, auto or HOST:PORT"):
        open_pool(1, address)


def test_without_ray_the_extra_is_named(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtra, match=r'takes ray, which is not installed: pip install "fodp\[ray\]"'):
        open_pool(1, "local")
    assert main(["reproduce", "window", "--ray=local", f"--out={tmp_path / 'r'}"]) == 2
    assert 'pip install "fodp[ray]"' in capsys.readouterr().err
    assert not (tmp_path / "r").exists()
