"""Work beside the model: on a thread that ends with the interpreter."""

import atexit
import threading
from collections.abc import Callable


def in_background(name: str, work: Callable[[threading.Event], object]) -> bool:
    """Call `work(stop)` on a thread of its own. At exit `stop` is set, and the thread waited for.

    Returns whether it will be done: there may be no more threads to be had.
    """
    stop = threading.Event()

    def run() -> None:
        try:
            work(stop)
        finally:
            atexit.unregister(end)

    def end() -> None:
        stop.set()
        thread.join()

    thread = threading.Thread(target=run, name=name, daemon=True)
    atexit.register(end)
    try:
        thread.start()
    except RuntimeError:
        atexit.unregister(end)
        return False
    return True
