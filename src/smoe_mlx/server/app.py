"""smoe-mlx server: from the command line to a listening socket, and down again."""

import contextlib
import logging
import signal
import socket
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import FrameType

from mlx_lm.server import get_system_fingerprint

from ..config import StreamingConfig, parse_bytes
from ..errors import SmoeError
from .errors import RequestError
from .fleet import Fleet
from .handler import LOOPBACK, Handler, Server
from .metrics import Metrics
from .session_files import SessionFiles
from .sessions import Sessions
from .worker import Generator

FINISH_SECONDS = 2.0  # that answers have to tell their clients that the server stops


def serve(args: Namespace, config: StreamingConfig) -> None:
    """Serve until SIGINT or SIGTERM.

    Raises:
        SmoeError: the port is taken, the first model does not load, or the options contradict.
    """
    logging.basicConfig(level=args.log_level, format="%(asctime)s %(levelname)s %(message)s")
    with running(args, config) as httpd:
        host = f"[{args.host}]" if ":" in args.host else args.host
        url = f"http://{host}:{httpd.server_port}/"
        print(f"{url} serves {', '.join(args.models)}", file=sys.stderr, flush=True)

        def stop(signum: int, frame: FrameType | None) -> None:
            signal.signal(signum, signal.SIG_DFL)  # the second one ends it at once
            raise KeyboardInterrupt

        signal.signal(signal.SIGINT, stop)
        signal.signal(signal.SIGTERM, stop)
        with contextlib.suppress(KeyboardInterrupt):
            httpd.serve_forever(poll_interval=0.1)


@contextlib.contextmanager
def running(args: Namespace, config: StreamingConfig) -> Iterator[Server]:
    """A server that listens, its first model loaded. Afterwards all is stopped and saved."""
    if args.host not in LOOPBACK and not args.api_key:
        raise SmoeError(f"--host {args.host}: others could use this server. Give an --api-key.")
    files = None
    if args.session_dir is not None:
        files = SessionFiles(Path(args.session_dir).expanduser(), parse_bytes(args.session_disk))
    sessions, metrics = Sessions(files), Metrics()
    fleet = Fleet(args, config, sessions)
    httpd = _listen(args.host, args.port)
    generator = Generator(fleet, sessions, metrics, args.max_queue)
    httpd.RequestHandlerClass = partial(
        Handler, generator, system_fingerprint=get_system_fingerprint()
    )
    try:
        try:
            generator.wait_ready()
        except RequestError as e:
            raise SmoeError(e.message) from e
        yield httpd
    finally:
        httpd.server_close()
        generator.stop_and_join()
        deadline = time.monotonic() + FINISH_SECONDS
        while metrics.in_flight and time.monotonic() < deadline:
            time.sleep(0.01)


def _listen(host: str, port: int) -> Server:
    class _Server(Server):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

    try:
        return _Server((host, port), Handler)
    except OSError as e:
        raise SmoeError(f"cannot listen on {host} port {port}: {e.strerror}") from e
