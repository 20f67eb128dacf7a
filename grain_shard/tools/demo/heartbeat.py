"""What goes on and for how long already, for steps that show nothing of their own."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

_EVERY_S = 2.0


@contextlib.contextmanager
def heartbeat(what: str, silent: bool = False) -> Iterator[None]:
    """Says at once what begins, and every two seconds that it goes on.

    Args:
        what: In a few words: "training".
        silent: Say nothing, as all hosts but the first do.
    """
    if silent:
        yield
        return
    began, over = time.monotonic(), threading.Event()

    def beat() -> None:
        while not over.wait(_EVERY_S):
            _say(f"  {what}: {time.monotonic() - began:.0f} s")

    _say(f"{what} ...")
    thread = threading.Thread(target=beat, name="grain-shard-heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _say(line: str) -> None:
    from tqdm import tqdm  # an extra; it writes above its bar, where there is one

    tqdm.write(line)
