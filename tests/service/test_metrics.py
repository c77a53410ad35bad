"""Numbers for Prometheus: right, readable by its own parser, only on this machine, and never half a file."""

from __future__ import annotations

import signal
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.children import wait_until
from support.field import Field, Started


def samples(text: str) -> dict[tuple[str, tuple[str, ...]], float]:
    """(name, label values) -> value, as Prometheus reads it."""
    return {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def fetch(url: str) -> tuple[int, str, str]:
    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers["Content-Type"], error.read().decode()


@pytest.fixture
def served(field: Field) -> Iterator[tuple[Started, str]]:
    field("init", "hello.yaml")
    assert field("run", "hello.yaml").code == 0
    server = field.start("metrics", "serve", "--listen", "0")
    wait_until(lambda: "/metrics\n" in server._out.read_text(), "it listens", seconds=20)
    yield server, server._out.read_text().strip().removesuffix("/metrics")
    field.stop(server)


def test_what_a_pool_does_is_counted(field: Field) -> None:
    pool = field.pool(2)
    tasks = [field.tick_fan("t", 5, 0, idempotent=False), field.tick_task("slow", 600, idempotent=False)]
    run_id = field.submit(field.workflow("w", tasks))
    wait_until(lambda: len(field.lines()) == 6, "they have begun")

    def counted() -> bool:
        found = samples(field("metrics", "show").out)
        done = sum(
            value
            for (name, labels), value in found.items()
            if name.endswith("attempts_total") and "succeeded" in labels
        )
        return done == 5

    wait_until(counted, "the heartbeats have brought the counts", seconds=30)
    found = samples(field("metrics", "show").out)
    assert found["agentctl_runs", ("running",)] == 1
    assert found["agentctl_runs", ("failed",)] == 0
    assert found["agentctl_attempts", ("claimed",)] == 1
    assert found["agentctl_processes", ("worker",)] == 2
    assert found["agentctl_processes", ("coordinator",)] == 1
    assert found["agentctl_runs_without_driver", ()] == 0
    assert found["agentctl_database_bytes", ()] > 0
    assert found["agentctl_disk_free_bytes", ()] > 0
    assert sum(1 for name, _ in found if name == "agentctl_worker_memory_bytes") == 2
    assert field("cancel", run_id).code == 0
    field.stop(pool)
    found = samples(field("metrics", "show").out)
    assert found["agentctl_processes", ("worker",)] == 0
    assert found["agentctl_uncertain_effects", ()] == 1  # cancelled in the middle: nobody knows how far it came
    assert len(field.json("effects", "list", "--uncertain").data["effects"]) == 1


def test_over_http_with_probes(field: Field, served: tuple[Started, str]) -> None:
    _, url = served
    assert url.startswith("http://127.0.0.1:")
    status, kind, text = fetch(f"{url}/metrics")
    assert (status, kind.split(";")[0]) == (200, "text/plain")
    assert samples(text)["agentctl_runs", ("succeeded",)] == 1
    assert fetch(f"{url}/livez")[0] == 200
    status, _, text = fetch(f"{url}/readyz")
    assert status == 503
    assert "fail workers" in text
    pool = field.pool(1)
    wait_until(lambda: fetch(f"{url}/readyz")[0] == 200, "its coordinator is there as well", seconds=20)
    assert fetch(f"{url}/anything")[0] == 404
    field.stop(pool)
    field.database.rename(field.database.with_name("away"))
    assert fetch(f"{url}/metrics")[0] == 503
    assert fetch(f"{url}/livez")[0] == 503
    field.database.with_name("away").rename(field.database)
    assert fetch(f"{url}/livez")[0] == 200


@pytest.mark.parametrize(
    "address", ["0.0.0.0:9464", "192.168.1.1:80", "example.org:80", "[::]:80", "127.0.0.1:70000", ""]
)
def test_no_other_machine_is_served(field: Field, address: str) -> None:
    result = field.json("metrics", "serve", "--listen", address)
    assert result.code == 2
    assert "--listen" in result.error["message"]


def test_a_port_that_is_taken(field: Field, served: tuple[Started, str]) -> None:
    port = served[1].rpartition(":")[2]
    result = field.json("metrics", "serve", "--listen", f"127.0.0.1:{port}")
    assert (result.code, result.error["code"]) == (5, "environment")


def test_a_textfile_is_whole_and_readable(field: Field) -> None:
    field("init", "hello.yaml")
    assert field("run", "hello.yaml").code == 0
    place = field.folder / "agentctl.prom"
    assert field("metrics", "write", place).code == 0
    assert samples(place.read_text())["agentctl_runs", ("succeeded",)] == 1
    assert place.stat().st_mode & 0o777 == 0o644
    writer = field.start("metrics", "write", place, "--every", "0.05")
    assert field("run", "hello.yaml").code == 0
    wait_until(
        lambda: samples(place.read_text())["agentctl_runs", ("succeeded",)] == 2, "it is written again", seconds=20
    )
    writer.signal(signal.SIGTERM)
    assert writer.wait(20).code == 0
    assert [path.name for path in field.folder.glob(".agentctl.prom*")] == []
    result = field.json("metrics", "write", field.folder / "no" / "where")
    assert (result.code, result.error["code"]) == (5, "environment")
    assert f"cannot write {field.folder / 'no' / 'where'}: there is no folder" in result.error["message"]
    result = field.json("metrics", "write", "/proc/agentctl.prom")
    assert result.code == 5
    assert "cannot write /proc/agentctl.prom: " in result.error["message"]


def test_without_the_extra_a_remedy_is_named(field: Field) -> None:
    field("init", "hello.yaml")
    assert field("run", "hello.yaml").code == 0
    blocked = field.tool("prometheus_client.py", "raise ImportError('not here')\n")
    result = field.json("metrics", "show", env={"PYTHONPATH": str(blocked.parent)})
    assert (result.code, result.error["code"]) == (6, "environment")
    assert "agentctl[metrics]" in result.error["remedy"]
