"""What the site's search knows: the sections of the pages, and words that readers type for them.

An extension of Sphinx. `static/search.js` ranks what it writes.
"""

import json
from pathlib import Path

from docutils import nodes
from sphinx import addnodes

# What a reader may type for a page or section that has other words for it. A whole entry that is
# typed shows its page first; a sentence with some of its words shows the page among the first.
FOUND_BY = {
    ("saving", "# Save, stop and resume"): [
        *("checkpoints", "resume", "restart", "continue", "crash", "restore model", "stopping"),
        *("states", "orbax", "CheckpointManager", "different number of hosts", "dropout rng resume"),
    ],
    ("changing_runs", "# A run that changes"): ["more data", "added files", "grown dataset"],
    ("changing_runs", "## Another batch size"): ["change batch size"],
    ("changing_runs", "## Epochs"): [
        *("epochs", "seeds", "shuffle", "missing seed", "steps per epoch", "reshuffle"),
    ],
    ("contract", "# The contract"): [
        *("number of steps", "reproducible", "deterministic", "recompiles", "recompilation"),
    ],
    ("contract", "## C1, C4: which rows a host reads"): ["global batch size"],
    ("contract", "## C2, C3, C6: padding and the mask"): [
        *("padding", "valid_mask", "batch size", "last batch"),
    ],
    ("contract", "## C7: errors, not hangs"): ["hosts read different records at the same index"],
    ("contract", "## C8, C9, C10: threads, buffers and workers"): ["memory"],
    ("contract", "## C13: the same record for every reader"): ["threads", "lock", "thread safety"],
    ("examples/README", "# Examples"): [
        *("flax nnx", "partitioning", "model axis", "tensor parallel", "model parallel"),
        *("sharded parameters", "losses differ", "random crop augmentation", "optimizer"),
    ],
    ("evaluation", "# Evaluation with a mask"): [
        *("evaluation", "masks", "validation set", "validation during training", "held-out"),
        *("exact accuracy", "train and eval together"),
    ],
    ("evaluation", "## Hosts and iterators"): ["train test split", "random split of dataset"],
    ("evaluation", "## Metrics"): ["loss divides by padding", "pad tokens loss mask"],
    ("troubleshooting", "# Troubleshooting"): ["hang"],
    ("troubleshooting", "## It hangs"): ["save only on process 0", "hang in save"],
    ("troubleshooting", "## An error of JAX or Python"): [
        *("OOM", "out of memory", "has no attribute", "incarnation", "explicit sharding"),
        *("ShardingTypeError", "out sharding could not be resolved"),
        "Dtype is not a valid JAX array type",
    ],
    ("troubleshooting", "## A pipeline or its data is refused"): ["wrong spec", "max_length"],
    ("troubleshooting", "## It does not resume"): ["state was saved by another pipeline"],
    ("coming_from", "## Grain alone"): ["batch size per host"],
    ("coming_from", "## PyTorch"): [
        *("map-style dataset", "collate_fn", "DistributedSampler", "random augmentation"),
        "np.random in __getitem__",
    ],
    ("coming_from", "## An old loader, as it is"): ["WebDataset", "IterableDataset", "tar shards"],
    ("data", "# Data of every kind"): [
        *("Dataset", "padding sequences", "variable length tokens", "bucketing by length"),
        "different sizes",
    ],
    ("data", "## Arrays"): [
        *("numpy arrays", "dict source", "bfloat16", "mixed precision", "normalize images"),
    ],
    ("data", "## Parquet"): ["Parquet"],
    ("data", "## Hugging Face"): ["huggingface"],
    ("many_hosts", "# Many hosts"): [
        *("multi-host", "multi host", "two hosts", "jax.distributed.initialize", "distributed"),
        *("shared folder", "several hosts"),
    ],
    ("many_hosts", "## Rehearse"): [
        *("rehearse", "simulate hosts", "virtual devices", "CPU hosts", "localhost", "laptop"),
        "two processes by hand",
    ],
    ("many_hosts", "## Launch"): [
        *("TPU", "SLURM", "kubernetes", "coordinator_address", "JAX_COORDINATOR_ADDRESS", "mpirun"),
    ],
    ("many_hosts", "## Preemption"): [
        *("SIGTERM", "killed host resume", "kill one host", "preemption", "asynchronous save"),
    ],
    ("many_hosts", "## Several slices"): ["multi slice"],
    ("many_hosts", "## Errors on several hosts"): [
        *("early stopping", "connection closed by peer", "host crashed", "wait forever"),
    ],
    ("monitoring", "## Watch a run"): ["throughput", "waiting for data", "waiting time"],
    ("faults", "## Retries"): ["retries"],
    ("faults", "# Reads that fail"): ["corrupt record"],
    ("microbatches", "# Microbatches"): ["gradient accumulation"],
    ("options", "# Options"): [
        *("prefetch", "remainder", "drop last batch", "divisible", "timeout_s", "num_threads"),
        "axis not called data",
    ],
    ("options", "## The mesh in use"): ["set_mesh", "PartitionSpec"],
    ("options", "## The chain by hand"): ["host_rows", "numpy batches", "own device_put"],
    ("other_machines", "# More processors than this host has"): [
        *("workers", "num_workers", "worker processes", "__main__ guard", "spawn"),
    ],
    ("other_machines", "## Ray, MPI, processes"): ["Ray"],
    ("other_machines", "## Failures"): ["worker crash"],
    ("mixtures", "# Mixtures whose weights change"): ["mixtures"],
    ("recipes", "## Keras 3"): [
        *("Keras", "model.fit", "steps_per_epoch", "validation_data", "callbacks", "fit twice"),
        *("set_random_seed", "weights.h5", "keras predict", "dropout", "RandomFlip", "batch norm"),
        *("data augmentation", "initial_epoch", "auto_shard_dataset", "ModelCheckpoint"),
        *("BackupAndRestore", "validation_steps", "save_weights", "imbalanced class_weight"),
        *("ModelParallel", "other weights", "unable to lock file"),
        *("'NoneType' object is not callable", "'NoneType' object has no attribute 'device_mesh'"),
        *("structure of inputs doesn't match", "value is not the same on each process"),
        "Fetching value for jax.Array that spans non-addressable devices",
    ],
    ("streams", "# Streams that any number of hosts can continue"): [
        *("packing", "pack sequences", "packed rows", "packing documents", "pack in advance"),
    ],
    ("versions", "# Versions"): ["Python version", "supported"],
}


def index_words(app, page, source):
    """Puts the words of `FOUND_BY` into the index, as main entries, at their headings."""
    for (name, heading), words in FOUND_BY.items():
        if name == page:
            entries = ", ".join(f"! {word}" for word in words)
            before, after = source[0].split(f"{heading}\n", 1)
            source[0] = f"{before}{heading}\n\n```{{index}} {entries}\n```\n{after}"


def sections(app):
    """Each section of each page, without the sections that it holds."""
    for page in sorted(app.env.found_docs):
        title = app.env.titles[page].astext()
        for section in app.env.get_doctree(page).findall(nodes.section):
            own = [child for child in section if not isinstance(child, nodes.section | nodes.title)]
            found = [node for child in own for node in child.findall()]
            is_page = not isinstance(section.parent, nodes.section)
            yield {
                "page": page,
                "title": title,
                "heading": "" if is_page else section.next_node(nodes.title).astext(),
                "id": "" if is_page else section["ids"][0],
                "text": " ".join(node for node in found if isinstance(node, nodes.Text)),
                "foundBy": " ".join(
                    entry[1]
                    for node in found
                    if isinstance(node, addnodes.index)
                    for entry in node["entries"]
                ),
            }


def write_sections(app, exception):
    if exception is None:
        text = json.dumps(list(sections(app)), ensure_ascii=False)
        Path(app.outdir, "_static", "sections.js").write_text(f"const SECTIONS = {text};\n")


def rank_sections(app, page, template, context, doctree):
    """The page of the search has the sections and what ranks them."""
    if page == "search":
        for script in ("sections.js", "search.js"):
            app.add_js_file(script, defer="defer")  # after Sphinx's script, and before it searches


def setup(app):
    app.connect("source-read", index_words)
    app.connect("html-page-context", rank_sections)
    app.connect("build-finished", write_sections)
    return {"parallel_read_safe": True}
