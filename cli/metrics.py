"""`agentctl metrics`: numbers for Prometheus, once, as a textfile, or over HTTP on this machine.

The client library is an extra (`agentctl[metrics]`). Every number is read when it is asked for, in one short snapshot,
so nothing is counted twice and nothing has to be kept by anybody.
"""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from agentctl.store.errors import AgentctlError, EnvironmentFault, PrerequisiteError

from .amounts import Duration
from .documents import put_file
from .main import Settings, VerbGroup, pass_settings
from .run import open_store

if TYPE_CHECKING:
    from http.server import BaseHTTPRequestHandler

    from agentctl.store.clock import Clock
    from agentctl.store.database import Database

ENDED_MS = 600_000
"""Workers that ended longer ago are not shown: their last counts were read long since, and names should not pile up."""

_LOOPBACK = re.compile(r"(?:(127(?:\.\d{1,3}){3}|localhost):|\[(::1)\]:|)(\d{1,5})")


@click.group(cls=VerbGroup)
def metrics() -> None:
    """Numbers for Prometheus: show, write, serve."""


@metrics.command("show")
@pass_settings
def show(settings: Settings) -> None:
    """Print all numbers once, in the text format of Prometheus."""
    with closing(open_store(settings)) as store:
        click.echo(render(store.database, store.clock).decode(), nl=False)


@metrics.command("write")
@click.argument("path", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--every", type=Duration(), metavar="TIME", help="Again and again, until a signal: 15s.")
@pass_settings
def write(settings: Settings, path: Path, every: float | None) -> None:
    """Write all numbers to FILE, for the textfile collector of a node exporter. It is replaced whole or not at all."""
    stop = _stop_event() if every is not None else None
    with closing(open_store(settings)) as store:
        while True:
            store.database.require_place()
            _replace(path, render(store.database, store.clock))
            if stop is None or every is None or stop.wait(every):
                return


@metrics.command("serve")
@click.option(
    "--listen",
    default="127.0.0.1:9464",
    metavar="HOST:PORT",
    help="An address of this machine (127.0.0.1:9464).",
)
@pass_settings
def serve(settings: Settings, listen: str) -> None:
    """Serve /metrics, and the probes /livez and /readyz (200 or 503), on this machine until a signal.

    There is no password, so other addresses than those of the machine itself are refused.
    """
    found = _LOOPBACK.fullmatch(listen)
    if found is None or int(found[3]) > 65_535:
        raise click.BadParameter(
            f"{listen!r} is no address of this machine; give 127.0.0.1:PORT or [::1]:PORT.", param_hint="--listen"
        )
    _require_client()
    stop = _stop_event()
    open_store(settings).close()
    server = _server(settings, found[1] or found[2] or "127.0.0.1", int(found[3]))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
    thread.start()
    host, port = server.server_address[:2]
    shown = f"[{host}]" if ":" in str(host) else host
    click.echo(f"http://{shown}:{port}/metrics")
    stop.wait()
    server.shutdown()
    server.server_close()


def _stop_event() -> threading.Event:
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    return stop


def _server(settings: Settings, host: str, port: int) -> Any:
    import socket
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            _answer(settings, self)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:
            return

    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        daemon_threads = True

    try:
        return Server((host, port), Handler)
    except OSError as error:
        raise EnvironmentFault(
            f"cannot listen on {host}:{port}: {error.strerror}", remedy="choose another port with --listen"
        ) from error


def _answer(settings: Settings, request: BaseHTTPRequestHandler) -> None:
    """One request, with a connection of its own: SQLite's belong to one thread."""
    from agentctl.store.clock import SystemClock
    from agentctl.store.doctor import LIVE, READY, examine, worst

    path = request.path.partition("?")[0]
    status, kind, body = 404, "text/plain; charset=utf-8", b"only /metrics, /livez and /readyz are here\n"
    try:
        if path == "/metrics":
            with closing(open_store(settings)) as store:
                body = render(store.database, store.clock)
            status, kind = 200, _content_type()
        elif path in ("/livez", "/readyz"):
            checks = examine(settings.database, SystemClock(), LIVE if path == "/livez" else READY)
            status = 503 if worst(checks) == "fail" else 200
            body = "".join(f"{check.status} {check.id}: {check.message}\n" for check in checks).encode()
    except AgentctlError as error:
        status, body = 503, f"{error.message}\n".encode()
    with suppress(OSError):  # whoever asked is gone
        request.send_response(status)
        request.send_header("Content-Type", kind)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(body)


def _replace(path: Path, body: bytes) -> None:
    """Readable for everybody: the exporter is another user."""
    try:
        put_file(path, body, mode=0o644)
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> EnvironmentFault:
    """A person has named the file, and nobody the one that becomes it."""
    folder = path.absolute().parent
    if not folder.is_dir():
        return EnvironmentFault(f"cannot write {path}: there is no folder {folder}", remedy="make it first")
    return EnvironmentFault(
        f"cannot write {path}: {error.strerror}", remedy="name a file in a folder where you may write"
    )


def _require_client() -> None:
    try:
        import prometheus_client  # noqa: F401
    except ImportError as error:
        raise PrerequisiteError(
            "metrics need the package prometheus-client", remedy="pip install 'agentctl[metrics]'"
        ) from error


def _content_type() -> str:
    from prometheus_client import CONTENT_TYPE_LATEST

    return CONTENT_TYPE_LATEST


def render(database: Database, clock: Clock) -> bytes:
    """All numbers in the text format. Raises `EnvironmentFault` without the client library."""
    _require_client()
    from prometheus_client import generate_latest
    from prometheus_client.registry import Collector, CollectorRegistry

    families = list(_families(database, clock))

    class Once(Collector):
        def collect(self) -> Iterator[Any]:
            yield from families

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Once())
    return generate_latest(registry)


def _families(database: Database, clock: Clock) -> Iterator[Any]:
    from agentctl.store.facts import gather, liveness
    from agentctl.store.migrate import LATEST
    from agentctl.store.process_identity import Liveness
    from agentctl.store.version import VERSION
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    found = gather(database)
    now = clock.now()

    def gauge(name: str, text: str, value: float) -> Any:
        return GaugeMetricFamily(f"agentctl_{name}", text, value=value)

    def by(name: str, text: str, label: str, values: dict[str, float], always: tuple[str, ...] = ()) -> Any:
        family = GaugeMetricFamily(f"agentctl_{name}", text, labels=[label])
        for word, value in {**dict.fromkeys(always, 0.0), **values}.items():
            family.add_metric([word], value)
        return family

    def age(moment: int | None) -> float:
        return 0.0 if moment is None else max(0, now - moment) / 1000

    yield by("build_info", "The version that answers; always 1.", "version", {VERSION: 1})
    yield gauge("schema_version", "Schema of the database.", LATEST)
    states = ("running", "paused", "succeeded", "failed", "cancelled")
    yield by("runs", "Runs that are kept, by state.", "state", dict(found.runs), states)
    yield by(
        "attempts",
        "Live attempts, by place in the queue.",
        "queue",
        dict(found.queue),
        ("ready", "claimed", "finished"),
    )
    yield by(
        "attempts_held", "Attempts that wait, by reason.", "hold", dict(found.held), ("approval", "budget", "place")
    )
    yield gauge(
        "oldest_ready_seconds", "How long the first attempt in the queue has waited.", age(found.oldest_ready_at)
    )
    yield gauge(
        "oldest_result_seconds", "How long the first result has waited for its commit.", age(found.oldest_finished_at)
    )
    yield gauge("runs_without_driver", "Open runs that nobody drives.", sum(d is None for d in found.drivers.values()))
    yield gauge("uncertain_effects", "Effects that a person has to reconcile.", found.uncertain_effects)
    yield gauge("pending_approvals", "Approvals that a person has to decide.", found.pending_approvals)

    alive: dict[str, float] = {}
    silence: dict[str, float] = {}
    counts = CounterMetricFamily(
        "agentctl_worker_attempts", "Attempts that a worker has ended.", labels=["worker", "name", "outcome"]
    )
    memory = GaugeMetricFamily(
        "agentctl_worker_memory_bytes", "Resident memory of a worker.", labels=["worker", "name"]
    )
    died = 0
    for row in found.processes:
        lives = liveness(row) is not Liveness.DEAD
        if lives:
            alive[row.kind] = alive.get(row.kind, 0) + 1
            silence[row.kind] = max(silence.get(row.kind, 0.0), age(row.heartbeat_at))
        died += row.state == "dead" or (row.stopped_at is None and not lives)
        if row.kind == "worker" and (row.stopped_at is None or now - row.stopped_at < ENDED_MS):
            counts.add_metric([row.process_id, row.name, "succeeded"], row.done)
            counts.add_metric([row.process_id, row.name, "failed"], row.failed)
            if lives:
                memory.add_metric([row.process_id, row.name], row.rss_bytes)
    yield by("processes", "Live processes, by kind.", "kind", alive, ("worker", "coordinator", "supervisor", "run"))
    yield by("heartbeat_age_seconds", "The longest silence of a live process, by kind.", "kind", silence)
    yield gauge("processes_died", "Processes of the last week that died without a word.", died)
    yield counts
    yield memory
    yield from _sizes(database, gauge)


def _sizes(database: Database, gauge: Any) -> Iterator[Any]:
    for name, text, end in (("database_bytes", "Size of the database.", ""), ("wal_bytes", "Size of its log.", "-wal")):
        try:
            size = os.stat(f"{database.path}{end}").st_size
        except FileNotFoundError:
            size = 0
        yield gauge(name, text, size)
    disk = os.statvfs(database.path.parent)
    yield gauge("disk_free_bytes", "Room on the disk of the database.", disk.f_bavail * disk.f_frsize)
