"""The site: `sphinx-build -W docs build/site`."""

import os
import re

import sphinx.util.logging
from docutils import nodes
from sphinx import addnodes

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # importing the package for its docstrings

import grain_shard

project = "grain_shard"
author = "the authors of grain_shard"
release = grain_shard.__version__
html_title = f"grain_shard {release}"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
# benchmarks.md includes the pages of benchmarks/.
exclude_patterns = ["**/.ipynb_checkpoints", "benchmarks/*"]
templates_path = ["templates"]
html_theme = "furo"
pygments_dark_style = "github-dark"  # furo's own underlines names as if they were links
html_show_copyright = False
html_theme_options = {"navigation_with_keys": True}
if "GITHUB_REPOSITORY" in os.environ:  # GitHub's name of the repository that builds the site
    link = {"name": "GitHub", "html": "Source on GitHub", "class": ""}
    link["url"] = f"https://github.com/{os.environ['GITHUB_REPOSITORY']}"
    html_theme_options["footer_icons"] = [link]
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = [("pictures.js", {"defer": "defer"})]
html_search_scorer = f"{os.path.dirname(__file__)}/scorer.js"  # Sphinx looks in the working folder
nb_ipywidgets_js = {}  # nothing is loaded from elsewhere

nb_execution_mode = "off"  # notebooks/run.py runs them; the site shows the outputs that they have
nb_merge_streams = True
myst_heading_anchors = 4
suppress_warnings = ["myst.header", "config.cache", "mystnb.unknown_mime_type"]

default_role = "py:obj"  # `shard_to` in a docstring is a link, where there is such a name
autosummary_generate = True
autosummary_ignore_module_all = False
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
maximum_signature_line_length = 80
napoleon_numpy_docstring = False
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

logger = sphinx.util.logging.getLogger(__name__)
PUBLIC = {name: f"grain_shard.{name}" for name in grain_shard.__all__}
# The words that a reader searches for, by the page and heading at which the search begins. An entry
# of the index counts more than any title, and its first half is found, too.
FOUND_BY = {
    ("saving", "# Save, stop and resume"): [
        *("checkpoints", "resume", "restart", "states", "checkpoint orbax", "orbax"),
        *("resume training", "restore model", "stopping", "different number of hosts"),
        *("resume other number of hosts", "restore on one host", "restart on fewer hosts"),
        *("CheckpointManager", "dropout rng resume"),
    ],
    ("changing_runs", "## Another batch size"): ["change batch size"],
    ("changing_runs", "## Epochs"): [
        *("epochs", "seeds", "shuffle", "shuffle seed", "shuffle without seed"),
        *("missing seed", "seed missing", "shuffle requires a seed"),
        *("steps per epoch", "reshuffle each epoch", "current epoch", "order each epoch"),
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
    ("contract", "## C13: the same record for every reader"): [
        *("threads", "lock", "thread safe", "thread safety"),
    ],
    ("examples/README", "# Examples"): [
        *("nnx", "partitioning", "model axis", "tensor parallel", "model parallel"),
        *("sharded parameters", "losses differ", "augmentation", "flax nnx"),
        *(
            "random crop",
            "random crop augmentation",
            "nnx.Optimizer checkpoint",
            "sharded over model axis",
        ),
    ],
    ("evaluation", "# Evaluation with a mask"): [
        *("evaluation", "masks", "validation", "validation set", "exact evaluation"),
        *("validation during training", "train and eval together"),
        *("interleave evaluation with training", "eval set not divisible", "held-out evaluation"),
    ],
    ("evaluation", "## Hosts and iterators"): [
        *("train test split", "validation split", "random split of dataset"),
    ],
    ("evaluation", "## Metrics"): ["loss divides by padding", "pad tokens loss mask"],
    ("troubleshooting", "# Troubleshooting"): ["hang"],
    ("troubleshooting", "## It hangs"): ["save only on process 0", "hang in save"],
    ("troubleshooting", "## An error of JAX or Python"): [
        *("OOM", "out of memory", "has no attribute", "incarnation", "explicit axes"),
        *(
            "explicit sharding",
            "ShardingTypeError",
            "out sharding could not be resolved",
            "Dtype is not a valid JAX array type",
        ),
    ],
    ("troubleshooting", "## A pipeline or its data is refused"): [
        *("wrong batch size", "wrong spec", "max_length"),
    ],
    ("troubleshooting", "## It does not resume"): ["state was saved by another pipeline"],
    ("coming_from", "## Grain alone"): [
        "batch per host",
        "batch size per host",
        "per host batch size",
    ],
    ("coming_from", "## PyTorch"): [
        *("map-style dataset", "collate_fn", "DistributedSampler", "random_map", "np.random"),
        *("random augmentation", "augmentation random", "random_map augmentation"),
        "np.random in __getitem__",
    ],
    ("coming_from", "## An old loader, as it is"): ["WebDataset", "IterableDataset"],
    ("data", "# Data of every kind"): [
        *("Dataset", "pad sequences", "padding sequences", "variable length sequences"),
        *("variable length tokens", "bucketing by length"),
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
        *("rehearse", "simulate hosts", "virtual devices", "CPU hosts", "localhost"),
        *("two processes", "start processes by hand"),
    ],
    ("many_hosts", "## Launch"): [
        *("TPU", "SLURM", "kubernetes", "coordinator_address", "JAX_COORDINATOR_ADDRESS", "mpirun"),
    ],
    ("many_hosts", "## Preemption"): [
        *(
            "SIGTERM",
            "killed",
            "kill one host",
            "preemption",
            "asynchronous save",
            "killed host resume",
            "kill resume",
        ),
    ],
    ("many_hosts", "## Several slices"): ["multi slice"],
    ("many_hosts", "## Errors on several hosts"): ["early stopping", "connection closed by peer"],
    ("faults", "## Retries"): ["retries"],
    ("faults", "# Reads that fail"): ["corrupt record"],
    ("microbatches", "# Microbatches"): ["microbatches", "gradient accumulation"],
    ("options", "# Options"): [
        *(
            "prefetch",
            "remainder",
            "drop last batch",
            "divisible",
            "timeout_s",
            "num_threads",
            "axis not called data",
            "model axis spec name",
        ),
    ],
    ("options", "## The mesh in use"): ["set_mesh", "PartitionSpec"],
    ("options", "## The chain by hand"): ["host_rows", "numpy batches", "own device_put"],
    ("other_machines", "# More processors than this host has"): [
        *("workers", "num_workers", "worker processes", "__main__", "__main__ guard"),
        *("main guard", "spawn main guard"),
    ],
    ("other_machines", "## Ray, MPI, processes"): ["Ray"],
    ("other_machines", "## Failures"): ["worker crash"],
    ("mixtures", "# Mixtures whose weights change"): ["mixtures"],
    ("recipes", "## Keras 3"): [
        *("Keras", "fit", "model.fit", "steps_per_epoch", "validation_data", "callbacks"),
        *("set_random_seed", "weights.h5", "keras predict", "keras two hosts", "dropout"),
        *("keras augmentation", "initial_epoch", "auto_shard_dataset", "ModelCheckpoint"),
        *("BackupAndRestore", "validation_steps", "model predict", "save_weights", "RandomFlip"),
        *("keras validation", "keras callback", "multi-host keras", "class_weight", "keras seed"),
        *("keras jax backend", "imbalanced classes", "batch norm", "keras data augmentation"),
        *("ModelParallel", "keras ModelParallel", "keras model parallel", "auto_shard_dataset"),
        *("'NoneType' object is not callable", "keras model.fit validation", "fit twice"),
        *(
            "'NoneType' object has no attribute 'device_mesh'",
            "other weights",
            "unable to lock file",
        ),
        *("structure of inputs doesn't match", "value is not the same on each process"),
        *("spans non-addressable devices", "Fetching value for jax.Array that spans"),
    ],
    ("streams", "# Streams that any number of hosts can continue"): [
        *("packing", "packed sequences", "pack sequences", "packed rows", "packing documents"),
        "pack in advance",
    ],
    ("versions", "# Versions"): ["Python version"],
}
SHORT = 20  # characters of code that are not broken over two lines
LONG = 100  # characters beyond which a line of output is wrapped


def index_words(app, page, source):
    """Puts the words of `FOUND_BY` into the index, as main entries, at their headings."""
    for (name, heading), words in FOUND_BY.items():
        if name == page:
            entries = ", ".join(f"! {word}" for word in words)
            before, after = source[0].split(f"{heading}\n", 1)
            source[0] = f"{before}{heading}\n\n```{{index}} {entries}\n```\n{after}"


def link_pages_of_other_folders(app, doctree):
    """Names pages beside docs/, to which its links to folders lead."""
    for node in doctree.findall(addnodes.pending_xref):
        if os.path.isabs(node["reftarget"]):
            page = os.path.relpath(node["reftarget"], app.srcdir.parent)
            node["reftarget"] = "benchmarks" if page.startswith("benchmarks/") else page


def docstring_as_rst(app, what, name, obj, options, lines):
    """Lets a letter follow a backtick, as in "`jax.Array`s", which Sphinx does not.

    Words before a colon, in the first line of a property or of what is returned, Sphinx has taken
    for a type by now. No docstring names one in that way, so that is a mistake.
    """
    for line in lines:
        if re.match(r":r?type:", line):
            logger.warning("taken for the type of %s, by a colon: %s", name, line)
    lines[:] = [re.sub(r"(?<!`)(`[^`]+`)(?=\w)", r"\1\\ ", line) for line in lines]


def keep_short_code_in_one_line(app, doctree):
    """Tells the style sheet what is short."""
    for node in doctree.findall(nodes.literal):
        if len(node.astext()) <= SHORT:
            node["classes"].append("short")


def end_code_with_its_last_line(app, doctree):
    """Takes away the empty line that a doctest in a page needs before its closing fence."""
    for node in doctree.findall(nodes.literal_block):
        text = node.astext()
        if node.rawsource == text:  # it is no output of a notebook, in colors
            node.rawsource = text.rstrip()
            node.children = [nodes.Text(node.rawsource)]
        if max(map(len, text.splitlines()), default=0) > LONG:
            node["classes"].append("long")


def link_public_names(app, doctree):
    """Makes a link of every `shard_to` and `grain_shard.feeds` in a page: to the reference."""
    for node in list(doctree.findall(nodes.literal)):
        name = node.astext()
        if name in PUBLIC and not isinstance(
            node.parent, nodes.reference | nodes.title | addnodes.pending_xref
        ):
            xref = addnodes.pending_xref(
                "", refdomain="py", reftype="obj", reftarget=PUBLIC[name], refwarn=False
            )
            node.replace_self(xref)
            xref += node


def setup(app):
    app.connect("source-read", index_words)
    app.connect("autodoc-process-docstring", docstring_as_rst)
    app.connect("doctree-read", link_pages_of_other_folders)
    app.connect("doctree-read", keep_short_code_in_one_line)
    app.connect("doctree-read", end_code_with_its_last_line)
    app.connect("doctree-read", link_public_names)
