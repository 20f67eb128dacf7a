"""``python -m grain_shard plan``: text and JSON."""

import dataclasses
import json
import subprocess
import sys

import pytest
from jax.sharding import PartitionSpec as P
from rich.console import Console

from tests.programs import command
from tests.test_plan import needs_libtpu, planned


class TestCommand:
    ARGUMENTS = (
        "plan --hosts 8 --devices-per-host 2 --mesh data=4,model=4 --batch 64 --records 1000"
    )

    def test_a_chip_that_is_given_is_named(self, capsys):
        assert command(f"{self.ARGUMENTS} --hardware h100") == 0
        assert "16 x h100 on 8 hosts" in capsys.readouterr().out

    def test_text(self, capsys):
        assert command(f"{self.ARGUMENTS} --record-bytes 3000") == 0
        shown = capsys.readouterr().out
        for words in (
            "16 x unknown device on 8 hosts",
            "data=4, model=4; batch P('data')",
            "64 rows; 16 on each device",
            "each row on 2 hosts; at most 16 rows of a host in a step, 48.0 kB",
            "48.0 kB a batch, 96.0 kB for two that wait",
            "16 steps for 1,000 records; 24 rows of padding",
            "4 groups of hosts, the first: 0, 1",
            "warning: ",
        ):
            assert words in shown
        lines = [line.split() for line in shown.splitlines()]
        assert ["6,", "7", "48:64", "16", "48.0", "kB", "240"] in lines

    def test_many_hosts_are_shortened_and_json_has_them_all(self, capsys):
        words = "plan --hosts 100 --devices-per-host 1 --mesh data=100 --batch 100 --records 999"
        assert command(words) == 0
        assert "84 more" in capsys.readouterr().out
        assert command(f"{words} --json") == 0
        hosts = json.loads(capsys.readouterr().out)["reads"]["hosts"]
        assert [host["rows"] for host in hosts] == [[[row, row + 1]] for row in range(100)]

    @pytest.mark.parametrize("width", [120, 80, 60, 50, 40])
    def test_no_word_and_no_number_is_broken(self, width, capsys):
        plan = planned({"data": 4, "model": 4}, 8, 2, global_batch_size=4096, num_records=10**6)
        Console(width=width, force_terminal=True, color_system=None).print(plan, highlight=False)
        shown = capsys.readouterr().out
        assert max(map(len, shown.splitlines())) <= width
        words, whole = (set(text.replace("─", "").split()) for text in (shown, str(plan)))
        assert words == whole
        for cell in ("0:1024", "250,432"):
            assert any(cell in line for line in shown.splitlines())

    def test_json_is_the_plan(self, capsys):
        assert command(f"{self.ARGUMENTS} --json") == 0
        plan = planned({"data": 4, "model": 4}, 8, 2, global_batch_size=64, num_records=1000)
        shown = json.loads(capsys.readouterr().out)
        assert shown == plan.to_dict()
        assert {field.name for field in dataclasses.fields(plan)} == set(shown)
        assert shown["mesh"] == {"data": 4, "model": 4}
        assert "64 rows; 16 on each device" in str(plan)

    @pytest.mark.parametrize(
        ("text", "spec"),
        [
            ("data", P("data")),
            ("data,seq", P("data", "seq")),
            ("data+fsdp", P(("data", "fsdp"))),
            ("data+fsdp,-,seq", P(("data", "fsdp"), None, "seq")),
            ("-", P(None)),
        ],
    )
    def test_specs(self, text, spec, capsys):
        words = "plan --hosts 2 --devices-per-host 4 --mesh data=2,fsdp=2,seq=2 --batch 8"
        assert command(f"{words} --records 80 --spec {text} --json") == 0
        axes = {"data": 2, "fsdp": 2, "seq": 2}
        plan = planned(axes, 2, 4, spec, global_batch_size=8, num_records=80)
        assert json.loads(capsys.readouterr().out) == plan.to_dict()

    @needs_libtpu
    def test_several_slices(self, capsys):
        words = "plan --topology v5e:4x4 --slices 2 --mesh data=8,model=4 --batch 64 --records 600"
        assert command(words) == 0
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
        (line,) = [line for line in lines if line[:1] == ["devices"]]
        assert " ".join(line) == "devices 32 x TPU v5 lite on 8 hosts"

    @needs_libtpu
    def test_a_slice_of_tpus_in_a_process_of_its_own_that_starts_no_backend(self):
        arguments = "plan --topology v5e:16x16 --mesh data=32,model=8 --spec data --batch 4096"
        # No such backend: whoever starts one fails.
        program = f"""
import sys
from grain_shard.tools.command import main
assert main({arguments.split()!r} + ["--records", "1281167", "--json"]) == 0
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
"""
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        plan = json.loads(done.stdout)
        assert (plan["num_devices"], plan["num_hosts"]) == (256, 64)
        assert (plan["steps_per_epoch"], plan["padded_rows_per_epoch"]) == (313, 881)
        assert plan["reads"]["amplification"] == 4
        assert plan["hosts_with_the_same_rows"][0] == [0, 1, 2, 3]
