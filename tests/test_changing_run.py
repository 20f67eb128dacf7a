"""The example of a run that changes: its losses are those of the run that does not."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from grain_shard import rehearse

pytestmark = [pytest.mark.slow, pytest.mark.long]

SCRIPT = Path(__file__).parents[1] / "examples" / "changing_run.py"
STEPS = 10  # the mixture changes in the seventh batch, and the ninth is twice as large


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs the example in a folder, and returns the losses that it has written there."""
    directory = tmp_path_factory.mktemp("runs")

    def on(hosts, name, *options):
        folder = directory / name
        done = rehearse.run_script(
            [SCRIPT, "--distributed", "--checkpoint-dir", folder, *map(str, options)],
            hosts=hosts,
            devices_per_host=8 // hosts,
            timeout_s=300,
            echo=sys.stdout,
        )
        assert done.exit_code == 0
        return json.loads((folder / "losses.json").read_text())

    return on


def test_stopped_on_4_hosts_and_continued_on_2_the_losses_are_those_of_1_without_a_stop(
    run, tmp_path
):
    pytest.importorskip("matplotlib")
    uninterrupted = run(1, "uninterrupted", "--steps", STEPS)
    assert uninterrupted[-1] < uninterrupted[0] - 1, "it learns"
    first = run(4, "changing", "--steps", 5)
    assert len(first) == 5
    picture = tmp_path / "losses.png"
    both = run(2, "changing", "--steps", STEPS, "--picture", picture, "--against", tmp_path)
    assert both[:5] == first
    np.testing.assert_allclose(both, uninterrupted, rtol=1e-4)
    assert picture.read_bytes().startswith(b"\x89PNG")
