"""What the site's search knows: the sections of the pages, and words that readers type for them.

An extension of Sphinx. `static/search.js` ranks what it writes.
"""

import json
from pathlib import Path

from docutils import nodes
from sphinx.errors import ExtensionError

# What a reader may type for a section that has other words for it, by page and heading. The section
# comes first if a whole entry is typed, and before most others if some of its words are typed.
FOUND_BY = {
    ("saving", "Save, stop and resume"): [
        *("checkpoints", "resume", "restart", "continue", "crash", "restore model", "stopping"),
        *(
            "states",
            "orbax",
            "CheckpointManager",
            "different number of hosts",
            "dropout rng resume",
        ),
    ],
    ("changing_runs", "A run that changes"): ["more data", "added files", "grown dataset"],
    ("changing_runs", "Another batch size"): ["change batch size"],
    ("changing_runs", "Epochs"): [
        *("epochs", "seeds", "shuffle", "missing seed", "steps per epoch", "reshuffle"),
    ],
    ("contract", "The contract"): [
        *("number of steps", "reproducible", "deterministic", "recompiles", "recompilation"),
    ],
    ("contract", "C1, C4: which rows a host reads"): ["global batch size"],
    ("contract", "C2, C3, C6: padding and the mask"): [
        *("padding", "valid_mask", "batch size", "last batch"),
    ],
    ("contract", "C5: resuming on another number of hosts"): [
        "fewer hosts",
        "more hosts",
        "elastic training",
    ],
    ("contract", "C7: errors, not hangs"): ["hosts read different records at the same index"],
    ("contract", "Limits"): ["strings", "string leaves"],
    ("contract", "C13: the same record for every reader"): [
        "threads",
        "lock",
        "thread safety",
        "cannot pickle",
        "__getstate__",
    ],
    ("examples/README", "Examples"): [
        *("flax nnx", "partitioning", "model axis", "tensor parallel", "model parallel"),
        *("sharded parameters", "losses differ", "random crop augmentation", "optimizer"),
    ],
    ("evaluation", "Evaluation with a mask"): [
        *(
            "evaluation",
            "masks",
            "validation",
            "validation set",
            "validation during training",
            "held-out",
        ),
        *("exact accuracy", "train and eval together"),
    ],
    ("evaluation", "Hosts and iterators"): [
        "print one row of a batch on host 0",
        "train test split",
        "random split of dataset",
    ],
    ("evaluation", "Metrics"): [
        "loss divides by padding",
        "pad tokens loss mask",
        "spans non-addressable devices",
    ],
    ("troubleshooting", "Troubleshooting"): ["hang"],
    ("troubleshooting", "It hangs"): [
        "save only on host 0",
        "save only on process 0",
        "hang in save",
        "deadlock",
        "stuck",
        "freeze",
        "Barrier timed out",
    ],
    ("troubleshooting", "An error of JAX or Python"): [
        "holds text, which stays on the host",
        "Received data size doesn't match: collective mismatch",
        *("OOM", "out of memory", "has no attribute", "incarnation", "explicit sharding"),
        *("ShardingTypeError", "out sharding could not be resolved"),
        "Dtype is not a valid JAX array type",
    ],
    ("troubleshooting", "A pipeline or its data is refused"): [
        "wrong spec",
        "max_length",
        "ShardingError",
    ],
    ("troubleshooting", "Hosts disagree"): ["AgreementError", "HostTimeoutError"],
    ("troubleshooting", "It does not resume"): [
        "state was saved by another pipeline",
        "restore fails",
        "cannot restore checkpoint",
        "checkpoint does not match",
        "StateError",
    ],
    ("coming_from", "Grain alone"): ["batch size per host"],
    ("coming_from", "PyTorch"): [
        "another read of a record gave another value",
        "missing argument: 'rng'",
        *(
            "map-style dataset",
            "collate_fn",
            "DistributedSampler",
            "random_map",
            "random augmentation",
        ),
        "np.random in __getitem__",
        "worker_init_fn",
        "persistent_workers",
    ],
    ("coming_from", "An old loader, as it is"): [
        "WebDataset",
        "IterableDataset",
        "tar shards",
        "accelerate prepare dataloader",
        "lightning",
    ],
    ("coming_from", "tf.data"): ["TensorFlow"],
    ("data", "Data of every kind"): [
        *("Dataset", "padding sequences", "variable length tokens", "bucketing by length"),
        "different sizes",
    ],
    ("data", "Arrays"): [
        *("numpy arrays", "dict source", "bfloat16", "mixed precision", "normalize images"),
    ],
    ("data", "Images"): ["JPEG", "PNG"],
    ("data", "Parquet"): ["Parquet"],
    ("data", "Hugging Face"): ["huggingface"],
    ("many_hosts", "Many hosts"): [
        *("multi-host", "multi host", "two hosts", "jax.distributed.initialize", "distributed"),
        *("shared folder", "several hosts"),
        "FileNotFoundError",
        "shared filesystem",
    ],
    ("many_hosts", "Rehearse"): [
        *("rehearse", "simulate hosts", "virtual devices", "CPU hosts", "localhost", "laptop"),
        "two processes by hand",
    ],
    ("many_hosts", "Launch"): [
        *("TPU", "SLURM", "kubernetes", "coordinator_address", "JAX_COORDINATOR_ADDRESS", "mpirun"),
    ],
    ("many_hosts", "Preemption"): [
        *("SIGTERM", "killed host resume", "kill one host", "preemption", "asynchronous save"),
    ],
    ("many_hosts", "A mesh with more than a data axis"): [
        "tensor parallel hosts",
        "sequence parallel",
        "pipeline parallelism",
        "context parallel",
        "expert parallel",
    ],
    ("many_hosts", "Several slices"): ["multi slice"],
    ("many_hosts", "Errors on several hosts"): [
        *("early stopping", "connection closed by peer", "host crashed", "wait forever"),
    ],
    ("monitoring", "Watch a run"): [
        "throughput",
        "waiting for data",
        "waiting time",
        "overhead",
    ],
    ("faults", "Retries"): ["retries"],
    ("faults", "Reads that fail"): ["corrupt record"],
    ("buckets", "Reading from a bucket"): ["dataset too big to download", "huge dataset"],
    ("buckets", "A mounted bucket"): ["GCS", "S3", "Azure"],
    ("microbatches", "Microbatches"): ["gradient accumulation"],
    ("options", "Options"): [
        *("prefetch", "remainder", "drop last batch", "divisible", "timeout_s", "num_threads"),
        "axis not called data",
        "prefetch_factor",
        "asynchronous device_put",
    ],
    ("options", "The mesh in use"): ["set_mesh", "PartitionSpec"],
    ("options", "The chain by hand"): ["host_rows", "numpy batches", "own device_put"],
    ("other_machines", "More processors than this host has"): [
        *("workers", "num_workers", "worker processes", "__main__ guard", "spawn"),
        "attempt to start a new process",
        "freeze_support",
    ],
    ("other_machines", "Ray, MPI, processes"): ["Ray"],
    ("other_machines", "Failures"): ["worker crash"],
    ("mixtures", "Mixtures whose weights change"): ["mixtures"],
    ("recipes", "Keras 3"): [
        *("Keras", "model.fit", "steps_per_epoch", "validation_data", "callbacks", "fit twice"),
        *("set_random_seed", "weights.h5", "keras predict", "dropout", "RandomFlip", "batch norm"),
        *("data augmentation", "initial_epoch", "auto_shard_dataset", "ModelCheckpoint"),
        *("BackupAndRestore", "validation_steps", "save_weights", "imbalanced class_weight"),
        *(
            "ModelParallel",
            "multi-worker distribution auto-sharding tf.data.Dataset",
            "device_put is not the same on each process",
            "IndivisibleError axis is partitioned",
            "other weights",
            "unable to lock file",
        ),
        *("'NoneType' object is not callable", "'NoneType' object has no attribute 'device_mesh'"),
        *("structure of inputs doesn't match", "not the same on each process"),
        "Fetching value for jax.Array that spans non-addressable devices",
        "sample_weight",
    ],
    ("streams", "Streams that any number of hosts can continue"): [
        *("packing", "pack sequences", "packed rows", "packing documents", "pack in advance"),
    ],
    ("streams", "The end"): ["unknown length", "no len"],
    ("versions", "Before 1.0"): ["compatible checkpoint format", "upgrade"],
    ("versions", "Versions"): ["Python version", "supported"],
}


def sections(app):
    """Yields each section of each page, without the sections that it holds."""
    found_by = dict(FOUND_BY)
    for page in sorted(app.env.found_docs):
        title = app.env.titles[page].astext()
        for section in app.env.get_doctree(page).findall(nodes.section):
            own = [child for child in section if not isinstance(child, nodes.section | nodes.title)]
            heading = section.next_node(nodes.title).astext()
            is_page = not isinstance(section.parent, nodes.section)
            yield {
                "page": page,
                "name": title if is_page else f"{title} > {heading}",
                "anchor": "" if is_page else f"#{section['ids'][0]}",
                "text": " ".join(text for child in own for text in child.findall(nodes.Text)),
                "foundBy": found_by.pop((page, heading), []),
            }
    if found_by:
        raise ExtensionError(f"site_search.py: no page has these headings: {sorted(found_by)}")


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
    app.connect("html-page-context", rank_sections)
    app.connect("build-finished", write_sections)
    return {"parallel_read_safe": True}
