"""What the notebooks draw: one function a picture, in the colors of `tools/palette.py`."""

import io

import matplotlib.pyplot as plt
import numpy as np
from IPython.display import Image, display
from matplotlib.colors import ListedColormap
from matplotlib.ticker import MaxNLocator

from grain_shard.tools.palette import COLORS, EMPTY, FILLS, GRAY, GREEN, VERMILION


def show_photographs(figure):
    """Shows a figure as a JPEG, which is smaller, and not inverted on a dark page of the site."""
    file = io.BytesIO()
    figure.savefig(file, format="jpeg", bbox_inches="tight", pil_kwargs={"quality": 90})
    plt.close(figure)
    display(Image(file.getvalue()))


def fill(number):
    return FILLS[number % len(FILLS)]


def parts_of(array, dims=(0, 1)):
    """The parts that devices hold, as ((top, bottom), (left, right)), and the shards of each."""
    parts = {}
    for shard in array.addressable_shards:
        place = tuple(shard.index[dim].indices(array.shape[dim])[:2] for dim in dims)
        parts.setdefault(place, []).append(shard)
    return parts


def devices_of(shards):
    return sorted(shard.device.id for shard in shards)


def without_frame(axis):
    axis.set(xticks=[], yticks=[])
    axis.spines[:].set_visible(False)


# Arrays and meshes.


def held_by(arrays, *, dims=(0, 1), xlabel, ylabel, title=None):
    """Which devices hold which part of each array, along two of its dims."""
    figure, axes = plt.subplots(1, len(arrays), figsize=(11, 2.9), layout="constrained")
    for axis, (name, array) in zip(axes, arrays.items(), strict=True):
        for ((top, bottom), (left, right)), shards in parts_of(array, dims).items():
            devices = devices_of(shards)
            field = plt.Rectangle((left, top), right - left, bottom - top, edgecolor="white", lw=2)
            field.set_facecolor(fill(devices[0]))
            axis.add_patch(field)
            middle = (left + right) / 2, (top + bottom) / 2
            axis.text(*middle, ",".join(map(str, devices)), ha="center", va="center", fontsize=9)
        rows, columns = (array.shape[dim] for dim in dims)
        axis.set(xlim=(0, columns), ylim=(rows, 0), xticks=[0, columns], yticks=[0, rows])
        axis.set_title(name, fontsize=10, family="monospace")
        axis.set_xlabel(xlabel)
    axes[0].set_ylabel(ylabel)
    figure.suptitle(title)


def image_parts(images, *, columns=3, width=11, title=None):
    """The parts of each image apart, each with the devices that hold it."""
    lines = -(-len(images) // columns)
    height = width / columns * 0.72 * lines
    figure, axes = plt.subplots(
        lines, columns, figsize=(width, height), layout="constrained", squeeze=False
    )
    for axis, (name, array) in zip(axes.flat, images.items(), strict=True):
        for ((top, bottom), (left, right)), shards in parts_of(array).items():
            extent = left + 4, right - 4, bottom - 4, top + 4
            axis.imshow(shards[0].data, cmap="gray", vmin=0, vmax=1, extent=extent)
            devices = devices_of(shards)
            label = {"facecolor": fill(devices[0]), "edgecolor": "none"}
            middle = (left + right) / 2, (top + bottom) / 2
            text = ",".join(map(str, devices))
            axis.text(*middle, text, ha="center", va="center", fontsize=8, bbox=label)
        without_frame(axis)
        axis.set(xlim=(0, array.shape[1]), ylim=(array.shape[0], 0))
        axis.set_title(name, fontsize=9, family="monospace")
    figure.suptitle(title)
    show_photographs(figure)


def meshes(named):
    """The devices of each mesh, its first axis downwards."""
    width_ratios = [mesh.size // len(mesh.devices) for mesh in named.values()]
    _, axes = plt.subplots(
        1, len(named), figsize=(11, 3), width_ratios=width_ratios, layout="constrained"
    )
    for axis, (title, mesh) in zip(axes, named.items(), strict=True):
        ids = np.vectorize(lambda device: device.id)(mesh.devices).reshape(len(mesh.devices), -1)
        for (row, column), device in np.ndenumerate(ids):
            color = fill(device)
            axis.add_patch(plt.Rectangle((column, row), 1, 1, facecolor=color, edgecolor="white"))
            axis.text(column + 0.5, row + 0.5, str(device), ha="center", va="center")
        without_frame(axis)
        axis.set(xlim=(0, ids.shape[1]), ylim=(8, 0))
        axis.set_title(title, fontsize=8, family="monospace")
        axis.set_xlabel("\n".join(f"{name}={size}" for name, size in mesh.shape.items()))


# Batches.


def rows(batch, title):
    """Each image of a batch, in a frame with the color of the device that holds it."""
    images = np.asarray(batch["image"])
    device_of = np.zeros(len(images), int)
    for (rows, _), shards in parts_of(batch["image"]).items():
        device_of[slice(*rows)] = devices_of(shards)[0]
    lines = -(-len(images) // 16)
    figure, axes = plt.subplots(lines, 16, figsize=(11, 0.4 + 0.72 * lines), layout="constrained")
    for axis in axes.flat[len(images) :]:
        axis.set_axis_off()
    for row, axis in enumerate(axes.flat[: len(images)]):
        axis.imshow(images[row].squeeze(), cmap="gray_r", vmin=0, vmax=1)
        axis.set(xticks=[], yticks=[])
        axis.spines[:].set(color=COLORS[device_of[row] % len(COLORS)], linewidth=3)
    figure.suptitle(title)
    if images.shape[-1] == 3:
        show_photographs(figure)


def photographs(named, patch):
    """Photographs, with the lines along which they are cut into patches."""
    figure, axes = plt.subplots(1, len(named), figsize=(11, 3.9), layout="constrained")
    for axis, (name, photo) in zip(axes, named.items(), strict=True):
        height, width = photo.shape[:2]
        axis.imshow(photo)
        axis.set_xticks(range(0, width, patch), [])
        axis.set_yticks(range(0, height, patch), [])
        axis.grid(color="white", linewidth=0.5)
        axis.tick_params(length=0)
        axis.set_title(f"{name}: {height // patch} x {width // patch} records")
    show_photographs(figure)


def words(batch):
    """Where words are in padded sentences, and which device holds them."""
    tokens = batch["tokens"]
    num_rows, length = tokens.shape
    _, axis = plt.subplots(figsize=(11, 4.6), layout="constrained")
    for ((top, bottom), (left, right)), shards in parts_of(tokens).items():
        shard = shards[0]
        of_device = ListedColormap(["white", fill(shard.device.id)])
        shown = np.asarray(shard.data) > 0
        axis.imshow(shown, cmap=of_device, vmin=0, vmax=1, extent=(left, right, bottom, top))
        axis.add_patch(plt.Rectangle((left, top), right - left, bottom - top, fill=False, lw=0.8))
        name = f"device {shard.device.id}"
        axis.text(right - 0.5, top + 0.6, name, ha="right", va="top", fontsize=9)
    real = int(batch["valid_mask"].sum())
    axis.axhline(real, color="black", linestyle=":")
    axis.set(xlim=(0, length), ylim=(num_rows, 0), xlabel="position", ylabel="row", aspect="auto")
    axis.set_title(
        f"The last batch: {real} sentences, colored where words are; the last rows are padding",
        loc="left",
        fontsize=10,
    )


def documents(segments, num_feeds):
    """The documents in the rows of a packed batch, and the feeds that the rows belong to."""
    num_rows, length = segments.shape
    colors = np.where(segments == 0, np.nan, (segments - 1) % len(FILLS))
    _, axis = plt.subplots(figsize=(11, 3.6), layout="constrained")
    axis.imshow(
        colors,
        aspect="auto",
        cmap=ListedColormap(FILLS),
        vmin=-0.5,
        vmax=len(FILLS) - 0.5,
        extent=(0, length, num_rows, 0),
        interpolation="none",
    )
    of_feed = num_rows // num_feeds
    names = [f"feed {feed}" for feed in range(num_feeds)]
    axis.set_yticks(np.arange(num_feeds) * of_feed + of_feed / 2, names)
    axis.hlines(np.arange(1, num_feeds) * of_feed, 0, length, color="black", lw=0.8)
    axis.set(
        xlabel="token",
        title="The first batch. Colors: the documents of a row, in order; empty: left over",
    )


# Training.


def losses(curves, *, log=True, differences_from=None):
    """Losses by step, wide lines below narrow ones.

    Args:
        curves: By name, the first step and the losses from it on.
        log: Whether the axis of losses is logarithmic.
        differences_from: The name of a curve; how far others are from it is drawn below.
    """
    _, axes = plt.subplots(
        2 if differences_from else 1,
        figsize=(8, 4.4 if differences_from else 2.8),
        sharex=True,
        squeeze=False,
        height_ratios=[3, 1] if differences_from else [1],
        layout="constrained",
    )
    axis, below = axes[0, 0], axes[-1, 0]
    for number, (name, (start, values)) in enumerate(curves.items()):
        steps = range(start, start + len(values))
        color = GRAY if number == 0 and len(curves) > 1 else COLORS[number]
        drawn_over = sum(other == start for other, _ in list(curves.values())[number + 1 :])
        axis.plot(steps, values, label=name, color=color, lw=1.8 + 3 * drawn_over)
        if differences_from and name != differences_from:
            expected = np.array(curves[differences_from][1])[start : start + len(values)]
            below.plot(steps, np.abs(values - expected), color=COLORS[number])
    for start in {start for start, _ in curves.values()} - {0}:
        for each in axes.flat:
            each.axvline(start - 0.5, color="black", lw=0.8, ls=":")
    axis.set(ylabel="loss", yscale="log" if log else "linear")
    below.set_xlabel("step")
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    if differences_from:
        below.set_ylabel("difference")
    if len(curves) > 1:
        axis.legend(fontsize=9)
    for each in axes.flat:
        each.spines[["top", "right"]].set_visible(False)


def waits(results):
    """What a batch costs the loop, by way to the device: the step, and waiting for the batch."""
    figure, axis = plt.subplots(figsize=(10, 2.6), layout="constrained")
    names = list(results)[::-1]
    steps = np.array([results[name].step_s for name in names]) * 1e3
    waiting = np.array([results[name].wait_s for name in names]) * 1e3
    axis.barh(names, steps, color=GREEN, label="the step")
    bars = axis.barh(names, waiting, left=steps, color=VERMILION, label="waiting for the batch")
    axis.bar_label(bars, [f"{wait:.1f}" for wait in waiting], padding=3)
    axis.margins(x=0.12)
    axis.set_xlabel("ms a batch; the numbers are ms of waiting")
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper right", ncols=2, frameon=False, fontsize=9)


# Hosts.


def rows_read(rows_by_host, global_batch_size):
    """The rows of a batch that each host reads, a panel for each mesh."""
    cases = list(rows_by_host[0])
    figure, axes = plt.subplots(
        len(cases), 1, figsize=(8, 6), sharex=True, sharey=True, layout="constrained"
    )
    figure.get_layout_engine().set(hspace=0.1)
    for axis, name in zip(axes, cases, strict=True):
        for host, rows in enumerate(rows_by_host):
            fields = [(row, 1) for row in rows[name]]
            axis.broken_barh(fields, (host - 0.4, 0.8), color=fill(host), edgecolor="white", lw=0.5)
        total = sum(len(rows[name]) for rows in rows_by_host)
        title = f"{name}: {total} rows read for a batch of {global_batch_size}"
        axis.set_title(title, loc="left", fontsize=10)
        axis.set(xlim=(0, global_batch_size), xticks=range(0, global_batch_size + 1, 16))
        axis.set_yticks(range(len(rows_by_host)), [f"host {h}" for h in range(len(rows_by_host))])
        axis.tick_params(length=0)
        axis.spines[:].set_visible(False)
    axes[0].invert_yaxis()  # which all of them share
    axes[-1].set_xlabel("row of the batch")


def relay(straight, parts):
    """A hash of each batch: of one run without a stop, and of one in parts on other hosts."""
    hashes = [value for _, values in parts for value in values]
    _, axis = plt.subplots(figsize=(11, 2), layout="constrained")
    colors = [fill(number) for number, (_, values) in enumerate(parts) for _ in values]
    for line, (values, of_line) in enumerate(((straight, [EMPTY] * len(colors)), (hashes, colors))):
        for k, (value, color) in enumerate(zip(values, of_line, strict=True)):
            axis.add_patch(plt.Rectangle((k, line), 1, 1, facecolor=color, edgecolor="white"))
            text = f"{value:08x}"[:5]
            axis.text(k + 0.5, line + 0.5, text, ha="center", va="center", family="monospace")
    start = 0
    for name, values in parts:
        axis.text(start + len(values) / 2, 2.3, name, ha="center", va="center")
        start += len(values)
    axis.set(xlim=(0, len(hashes)), ylim=(2.6, 0))
    axis.set_yticks([0.5, 1.5], ["1 host, without a stop", "one after another"])
    axis.set_xticks(np.arange(len(hashes)) + 0.5, range(len(hashes)))
    axis.tick_params(length=0)
    axis.set_xlabel("batch")
    axis.set_title(f"A hash of each batch; all the same: {hashes == straight}", fontsize=10)
    axis.spines[:].set_visible(False)
