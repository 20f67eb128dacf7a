"""`grain_shard.rehearse`: what a host sees, who is blamed for a failure, what is left behind."""

import contextlib
import importlib.util
import io
import os
import select
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from multiprocessing.shared_memory import SharedMemory
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

from grain_shard import rehearse
from grain_shard.errors import GrainShardError
from grain_shard.tools.rehearse import host_process, rehearsal
from tests.conftest import HANG_S, HOSTS_S
from tests.programs import command, without_grains_warning

pytestmark = pytest.mark.slow

COMMAND_LINE = """
import signal, sys
from grain_shard.tools.command import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background may
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignore both, and its children would, too
sys.exit(main(["rehearse", *sys.argv[1:]]))
"""


@pytest.fixture
def script(tmp_path):
    """Writes a script, in which `host` is the host's number; most tests need no JAX in it."""

    def write(text):
        path = tmp_path / "train.py"
        path.write_text(
            "import os, signal, subprocess, sys, time\n"
            "host = int(os.environ['SLURM_PROCID'])\n" + textwrap.dedent(text)
        )
        return str(path)

    return write


def has_ended(pid):
    """Whether a process that is not our child ends, or has."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    with open(handle):
        return bool(select.select([handle], [], [], HANG_S)[0])


# What a host sees.


def place_of_this_host():
    indices = multihost_utils.process_allgather(np.array([jax.process_index()]))
    return {
        "process": (jax.process_index(), jax.process_count()),
        "devices": (jax.local_device_count(), jax.device_count()),
        "platform": jax.default_backend(),
        "gathered": indices.ravel().tolist(),
    }


def test_every_host_has_its_place_and_collectives_cross_hosts():
    assert rehearse.run(place_of_this_host, hosts=3, devices_per_host=2) == [
        {"process": (host, 3), "devices": (2, 6), "platform": "cpu", "gathered": [0, 1, 2]}
        for host in range(3)
    ]


def test_one_host_amid_the_variables_of_a_real_cluster(monkeypatch):
    monkeypatch.setenv("SLURM_NTASKS", "64")
    monkeypatch.setenv("OMPI_MCA_orte_hnp_uri", "1531576320.0;tcp://192.0.2.1:34911")
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "192.0.2.1:1234")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    assert rehearse.run(place_of_this_host, hosts=1, timeout_s=HOSTS_S) == [
        {"process": (0, 1), "devices": (1, 1), "platform": "cpu", "gathered": [0]}
    ]


@pytest.mark.long
def test_a_script_that_waits_for_no_result_ends_when_its_devices_have_finished(script):
    path = script("""
        import jax
        jax.distributed.initialize()
        rows = jax.NamedSharding(jax.make_mesh((8,), ("data",)), jax.P("data"))
        x = jax.numpy.ones(8000, device=rows)
        for _ in range(10):
            x.sum()
    """)
    for _ in range(5):
        result = rehearse.run_script([path], hosts=2, devices_per_host=4, timeout_s=HOSTS_S)
        assert result.exit_code == 0


def test_a_function_is_sent_with_its_closure_and_returns_any_value():
    class Row:
        def __init__(self, host):
            self.host = host

    factor = 10
    rows = rehearse.run(lambda offset: Row(offset + factor * jax.process_index()), 5, hosts=2)
    assert [type(row) for row in rows] == [Row, Row]
    assert [row.host for row in rows] == [5, 15]


def test_a_librarys_function_is_sent_by_name():
    # A copy would have globals of its own, in which no host has joined the others.
    assert rehearse.run(jax.process_index, "cpu", hosts=2) == [0, 1]


def test_the_hosts_need_not_find_the_functions_module(tmp_path, monkeypatch):
    path = tmp_path / "far_away.py"
    path.write_text("def inner(): return 'inner'\n\ndef outer(): return 'outer', inner()\n")
    spec = importlib.util.spec_from_file_location("far_away", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "far_away", module)
    spec.loader.exec_module(module)
    assert rehearse.run(module.outer, hosts=1) == [("outer", "inner")]


# The command line.


def test_the_command_line_prefixes_whole_lines_of_both_streams(script):
    path = script("""
        import jax
        jax.distributed.initialize()
        print(sys.argv[1:], "on", jax.process_index(), end=" ")
        print("on", "stderr", file=sys.stderr)
        os.write(2, b"of C++\\n")
        print("with", jax.device_count(), "devices\\nno newline", end="")
    """)
    command = [sys.executable, "-c", COMMAND_LINE, "--hosts", "2", "--devices-per-host", "3", path]
    ended = subprocess.run(
        [*command, "--steps", "7"], capture_output=True, text=True, timeout=HOSTS_S
    )
    assert (ended.returncode, without_grains_warning(ended.stderr)) == (0, "")
    others = ["no newline", "of C++", "on stderr"]
    assert sorted(ended.stdout.splitlines()) == [
        f"[host {host}] {line}"
        for host in range(2)
        for line in (f"['--steps', '7'] on {host} with 6 devices", *others)
    ]


RAN_ALONE = (
    " ran alone: its call of jax.distributed.initialize() is missing, failed, or comes after"
    " another use of JAX. Processes that have not joined the others run the whole job, and may"
    " disturb each other, for example in a folder that all of them write to. Remedy: call"
    " jax.distributed.initialize(), without arguments, before any other use of JAX."
)
NEVER_JOINED = f"rehearse: each host{RAN_ALONE}\n"


@pytest.mark.parametrize(("hosts", "code", "complaint"), [(1, 0, ""), (2, 1, NEVER_JOINED)])
def test_hosts_that_never_join_are_a_failure_that_says_so(hosts, code, complaint, script, capsys):
    path = script("import jax.numpy as jnp; print(float(jnp.ones(3).sum()))")
    assert command(f"rehearse --hosts {hosts} {path}") == code
    shown, said = capsys.readouterr()
    assert sorted(shown.splitlines()) == [f"[host {host}] 3.0" for host in range(hosts)]
    assert said == complaint


JOIN = "import jax; jax.distributed.initialize()"
EXISTS = "FileExistsError: checkpoint/0"
NOT_JOINED = f"host 1{RAN_ALONE}"


@pytest.mark.parametrize(
    ("before", "error", "says_so"),
    [
        ("", EXISTS, False),  # JAX has nothing to do with it
        ("import jax", EXISTS, True),
        (JOIN, EXISTS, False),
        (f"{JOIN}; jax.devices(); jax.distributed.shutdown()", EXISTS, False),
        (f"import jax; host and jax.devices(); {JOIN}", "RuntimeError: jax.distributed", True),
    ],
)
def test_a_host_that_fails_without_having_joined_is_told_so(before, error, says_so, script, capsys):
    path = script(f"""
        {before}
        if host == 1:
            raise FileExistsError("checkpoint/0")
        signal.pause()
    """)
    assert command(f"rehearse --hosts 2 {path}") == 1
    shown, complaint = capsys.readouterr()
    assert shown.count(error) == 1
    head = "rehearse: host 1 failed first, with exit code 1\n"
    assert complaint == head + (f"{NOT_JOINED}\n" if says_so else "")


def test_the_summary_has_the_last_lines_between_the_failure_and_the_remedy():
    result = rehearse.RehearsalResult([-15, 1], ["", "one\ntwo\n"], 1, [], not_joined=True)
    assert result.summary().splitlines() == [
        "host 1 failed first, with exit code 1",
        "[host 1] one",
        "[host 1] two",
        NOT_JOINED,
    ]


# JAX ends the other hosts when host 0, its coordinator, leaves without a word. So host 0 goes last.
UNTIL_HOST_1_IS_GONE = "open(sys.argv[1]).read(); os._exit(0)"
WITHOUT_A_WORD = "held = open(sys.argv[1], 'w'); os._exit(0)"


@pytest.mark.parametrize(
    "ends",
    [
        ["", "jax.distributed.shutdown()", "sys.exit()"],
        [UNTIL_HOST_1_IS_GONE, WITHOUT_A_WORD],
    ],
    ids=["as JAX ends", "os._exit"],
)
def test_hosts_that_joined_may_end_as_they_like_and_gloo_says_nothing(ends, script, tmp_path):
    os.mkfifo(tmp_path / "held")
    path = script(f"""
        import jax
        import numpy as np
        jax.distributed.initialize()
        from jax.experimental import multihost_utils
        print(multihost_utils.process_allgather(np.array([1])).sum())
        exec({ends}[host])
    """)
    result = rehearse.run_script([path, str(tmp_path / "held")], hosts=len(ends))
    assert (result.exit_code, result.not_joined) == (0, False)
    assert all(str(len(ends)) in output.splitlines() for output in result.outputs)
    assert not any("Gloo" in output for output in result.outputs)


def test_a_module_gets_all_options_that_follow_it(script, tmp_path, monkeypatch, capsys):
    script("print(__name__, sys.argv[1:], sys.path[0] == os.getcwd())")
    monkeypatch.chdir(tmp_path)
    assert command("rehearse --hosts 1 -m train --hosts 9 -m") == 0
    assert capsys.readouterr().out == "[host 0] __main__ ['--hosts', '9', '-m'] True\n"


# Failures.


@pytest.mark.parametrize(
    ("failure", "exit_code", "head", "last_line"),
    [
        ("raise ValueError('boom')", 1, "exit code 1", "ValueError: boom"),
        ("sys.exit('no data')", 1, "exit code 1", "no data"),
        ("sys.exit(3)", 3, "exit code 3", "started"),
        ("os._exit(4)", 4, "exit code 4", "started"),
        ("os.kill(os.getpid(), 9)", 137, "exit code 137 (signal 9: Killed)", "started"),
    ],
)
def test_the_first_failure_is_told_and_ends_the_others(script, failure, exit_code, head, last_line):
    path = script(f"""
        print("started")
        if host == 1:
            {failure}
        signal.pause()
    """)
    result = rehearse.run_script([path], hosts=2, timeout_s=HOSTS_S)
    assert (result.failed_host, result.exit_code) == (1, exit_code)
    assert result.returncodes[0] == -signal.SIGTERM
    assert result.summary().splitlines()[0] == f"host 1 failed first, with {head}"
    assert result.summary().splitlines()[-1] == f"[host 1] {last_line}"


def test_a_traceback_begins_in_the_script(script):
    path = script("def divide(): 1 / 0\ndivide()")
    result = rehearse.run_script([path], hosts=1)
    assert [line for line in result.outputs[0].splitlines() if "File" in line] == [
        f'  File "{path}", line 4, in <module>',
        f'  File "{path}", line 3, in divide',
    ]


def test_a_host_that_ignores_sigterm_is_killed(script, tmp_path):
    os.mkfifo(tmp_path / "host_0_is_ready")
    path = script("""
        if host == 1:
            open(sys.argv[1]).close()  # blocks until host 0 opens it too
            sys.exit(1)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open(sys.argv[1], "w").close()
        signal.pause()
    """)
    result = rehearse.run_script(
        [path, str(tmp_path / "host_0_is_ready")], hosts=2, timeout_s=HOSTS_S
    )
    assert result.returncodes == [-signal.SIGKILL, 1]
    assert result.failed_host == 1


@pytest.mark.parametrize("failure", ["raise", "kill"])
def test_a_failure_caused_by_the_first_is_not_reported_in_its_place(failure):
    def train():
        for step in range(1000):
            if step == 3 and jax.process_index() == 1:
                if failure == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise ValueError("boom")
            multihost_utils.process_allgather(np.array([step]))

    with pytest.raises(rehearse.RehearsalError) as caught:
        rehearse.run(train, hosts=3, timeout_s=HOSTS_S)
    assert isinstance(caught.value, GrainShardError)
    assert caught.value.result.failed_host == 1
    assert caught.value.result.exit_code == {"raise": 1, "kill": 137}[failure]
    assert "host 1 failed first" in str(caught.value)
    assert ("ValueError: boom" in caught.value.result.outputs[1]) == (failure == "raise")


FATAL = "Terminating process because the JAX distributed service detected fatal errors"


@pytest.mark.parametrize(
    ("said", "notices"),
    [
        ("ConnectionError: lost host 1", 'raise ConnectionError("lost host 1")'),
        (FATAL, f"print({FATAL!r}); os._exit(1)"),
    ],
    ids=["in Python", "in JAX"],
)
def test_a_crash_is_reported_even_if_another_host_notices_it_first(notices, said, script, tmp_path):
    os.mkfifo(tmp_path / "connection")
    path = script(f"""
        if host == 0:
            open(sys.argv[1]).read()
            {notices}
        open(sys.argv[1], "w").close()
        time.sleep(0.1)  # a crash, in slow motion: the connections go before the process does
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    result = rehearse.run_script([path, str(tmp_path / "connection")], hosts=2, timeout_s=HOSTS_S)
    assert said in result.outputs[0]
    assert result.failed_host == 1


STACK = "*** Check failure stack trace: ***", "    @     0x7f6cf3040634  absl::LogMessage::Flush()"


def test_the_stack_with_which_jax_ends_a_host_that_lost_another_is_not_shown(script):
    shown = io.StringIO()
    path = script("""
        import jax
        jax.distributed.initialize()
        if host == 0:
            raise ValueError("boom")
        signal.pause()
    """)
    result = rehearse.run_script([path], hosts=2, timeout_s=HOSTS_S, end_others=False, echo=shown)
    prints_it = STACK[0] in result.outputs[1]  # JAX 0.9 ends the host without it
    code = -signal.SIGABRT if prints_it else 1
    assert (result.failed_host, result.returncodes) == (0, [1, code])
    of_host_1 = [line for line in shown.getvalue().splitlines() if line.startswith("[host 1]")]
    said = "Terminating process because the JAX distributed service"
    assert len([line for line in of_host_1 if said in line]) == 1
    assert not [line for line in of_host_1 if STACK[0] in line or "    @     0x" in line]
    assert shown.getvalue().count("ValueError: boom") == 1


def test_any_other_stack_is_shown(script):
    shown = io.StringIO()
    path = script(f"print({STACK[0]!r}); print({STACK[1]!r}); os.abort()")
    rehearse.run_script([path], hosts=1, timeout_s=HOSTS_S, echo=shown)
    assert shown.getvalue().splitlines() == [f"[host 0] {line}" for line in STACK]


def test_a_timeout_names_the_hosts_that_still_ran_and_where_they_stood(
    script, tmp_path, monkeypatch
):
    """The rehearsal's clock goes on when host 0 has gone and both others say that they wait."""
    path = script("""
        def wait_for_the_others():
            print("waiting")
            time.sleep(1000)
        if host == 0:
            with open(sys.argv[1], "w") as file:
                file.write(str(os.getpid()))
            os.replace(sys.argv[1], sys.argv[2])
            sys.exit()
        while not os.path.exists(sys.argv[2]):
            time.sleep(0.01)
        with open(sys.argv[2]) as file:
            host_0 = int(file.read())
        try:
            while True:  # until the rehearsal knows of its end
                os.kill(host_0, 0)
                time.sleep(0.01)
        except ProcessLookupError:
            wait_for_the_others()
    """)
    shown = io.StringIO()

    def clock():
        return time.monotonic() + 3600 * (shown.getvalue().count("waiting\n") == 2)

    monkeypatch.setattr(rehearsal, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(host_process, "_SAY_S", 3.0)
    words = [path, *(str(tmp_path / name) for name in ("host_0_writes", "host_0"))]
    result = rehearse.run_script(words, hosts=3, timeout_s=HOSTS_S, echo=shown)
    assert (result.timed_out_hosts, result.failed_host, result.exit_code) == ([1, 2], None, 124)
    head, *of_hosts = result.summary().splitlines()
    assert head.startswith("timed out, still running: host 1, host 2. ")
    for host in (1, 2):
        said = [line for line in of_hosts if line.startswith(f"[host {host}]")]
        assert said[0] == f"[host {host}] waiting"
        assert any("train.py" in line and "in wait_for_the_others" in line for line in said)


def test_a_failure_shows_which_batch_the_loop_of_each_host_got_last(script):
    path = script("""
        import jax
        jax.distributed.initialize()
        import grain, grain_shard
        from jax.experimental import multihost_utils
        mesh = jax.make_mesh((1,), ("data",), devices=jax.local_devices())
        ds = grain.MapDataset.range(12).map(lambda i: {"x": i}).batch(4).shard_to(mesh)
        list(ds)
        batches = iter(ds)
        next(batches), next(batches)
        if host == 1:
            next(batches), next(batches, None)
        multihost_utils.sync_global_devices("all have got theirs")
        if host == 0:
            raise ValueError("mine")
        time.sleep(1000)
    """)
    result = rehearse.run_script([path], hosts=2, timeout_s=HOSTS_S)
    assert result.verdict() == [
        "host 0 failed first, with exit code 1",
        "host 0 got batch 2 of iterator 2, and its script has ended",
        "host 1 got batch 3 of iterator 2",
    ]


def test_a_host_that_only_hears_of_a_failure_is_not_the_first(script, tmp_path):
    """Although it ends sooner than the one that has failed, whose `finally` takes a while."""
    os.mkfifo(tmp_path / "message")
    path = script("""
        from grain_shard import AgreementError
        if host == 0:
            open(sys.argv[1]).close()  # blocks until host 1 opens it too
            raise AgreementError("host 1 failed: OSError: the bucket is gone")
        try:
            open(sys.argv[1], "w").close()
            raise OSError("the bucket is gone")
        finally:
            time.sleep(1)
    """)
    result = rehearse.run_script([path, str(tmp_path / "message")], hosts=2, timeout_s=HOSTS_S)
    assert result.failed_host == 1


def test_no_hosts_are_refused():
    with pytest.raises(ValueError, match="hosts=0, devices_per_host=1: each must be at least 1"):
        rehearse.run_script(["train.py"], hosts=0)


# What is left behind.


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_rehearsal_leaves_no_process(script, number):
    path = script("""
        worker = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        print(os.getpid(), worker.pid)
        signal.pause()
    """)
    command = [sys.executable, "-c", COMMAND_LINE, "--hosts", "2", path]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as rehearsal:
        try:
            lines = [rehearsal.stdout.readline() for _ in range(2)]
            rehearsal.send_signal(number)
            assert rehearsal.wait(HANG_S) == 128 + number
            name = {signal.SIGINT: "Ctrl-C"}.get(number, number.name)
            said = f"rehearse: stopped by {name}; no host runs any more\n"
            assert without_grains_warning(rehearsal.stderr.read()) == said
        finally:
            rehearsal.kill()  # or a failure would wait for it
    pids = [int(pid) for line in lines for pid in line.split("]")[1].split()]
    assert len(pids) == 4
    assert all(has_ended(pid) for pid in pids)


@pytest.mark.parametrize("has_waitid", [True, False])  # macOS has it from Python 3.13 on
def test_the_workers_of_a_host_end_with_it(has_waitid, script, monkeypatch):
    if not has_waitid:
        monkeypatch.delattr(os, "waitid")
    path = script("""
        worker = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        print(worker.pid)
        os._exit(0)
    """)
    result = rehearse.run_script([path], hosts=1, timeout_s=HOSTS_S)
    assert result.exit_code == 0
    assert has_ended(int(result.outputs[0]))


def test_a_killed_hosts_shared_memory_is_freed(script):
    path = script("""
        from multiprocessing.shared_memory import SharedMemory
        print(SharedMemory(create=True, size=8).name)
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    result = rehearse.run_script([path], hosts=1, timeout_s=HOSTS_S)
    with pytest.raises(FileNotFoundError):
        SharedMemory(result.outputs[0].split()[0])


def test_nothing_is_left_in_this_process(tmp_path, monkeypatch):
    def state():
        return sorted(os.listdir("/proc/self/fd")), threading.enumerate(), os.listdir(tmp_path)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = state()
    with pytest.raises(rehearse.RehearsalError):
        rehearse.run(lambda: 1 / 0, hosts=1)
    assert state() == before
    with contextlib.suppress(ChildProcessError):  # raised when there is no child at all
        zombie = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        assert zombie is None


def test_an_output_that_is_closed_ends_the_rehearsal(script):
    class Pager(io.StringIO):
        def flush(self):
            raise BrokenPipeError

    pager = Pager()
    path = script("print(os.getpid()); signal.pause()")
    with pytest.raises(BrokenPipeError):
        rehearse.run_script([path], hosts=1, echo=pager)
    assert has_ended(int(pager.getvalue().removeprefix("[host 0] ")))
