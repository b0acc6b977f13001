"""The doctor and the speed model: what fits, how fast, from headers alone."""

import contextlib
import json
import threading
import time
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import huggingface_hub
import huggingface_hub.constants as hub_constants
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from test_cli import smoe
from test_plan import make_layout, make_shape, plan_of

import smoe_mlx
from smoe_mlx import doctor, speed
from smoe_mlx.bench import bench
from smoe_mlx.config import StreamingConfig
from smoe_mlx.doctor import diagnose
from smoe_mlx.errors import CheckpointError, ModelNotFoundError, TraceError
from smoe_mlx.hub import find_model
from smoe_mlx.load import open_weights
from smoe_mlx.plan import format_bytes
from smoe_mlx.replay import replay
from smoe_mlx.search import Setting
from smoe_mlx.skeleton import build_skeleton
from smoe_mlx.speed import Compute, default_hit_rate, forecast
from smoe_mlx.store.probe import DiskProbe
from smoe_mlx.trace import load_trace
from smoe_mlx.tuned import Tuned, remember

DEMO = Path(smoe_mlx.__file__).parent / "demo"
COMPUTE = Compute(token=0.020, syncs=0.004, prompt_token=0.001)
LAYOUTS = [make_layout(64, (1_000_000,))] * 10
SHAPE = make_shape(LAYOUTS, top_k=4)
DISK = DiskProbe(2e9, 1_000_000, "direct", 0.0001)


@pytest.fixture(autouse=True)
def own_cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(doctor, "available_nbytes", lambda: 20 * 10**9)


# ---- the speed model -----------------------------------------------------------------------------


def told(slots, disk=DISK, **options):
    config = StreamingConfig(**{"decode": "exact", "lookahead": False, **options})
    return forecast(plan_of(LAYOUTS, SHAPE, slots=slots), config, COMPUTE, disk)


def test_the_parts_of_a_forecast_add_up():
    f = told(160)  # a quarter: half of the lookups hit
    assert f.hit_rate == pytest.approx(0.5)
    assert f.nbytes == pytest.approx(40 * 0.5 * 1e6)
    reading = 20e6 / 2e9 + 10 * (1 - 0.5**4) * 0.0001
    assert f.reading == pytest.approx(reading)
    assert f.token.likely == pytest.approx(0.020 + 0.004 + reading)
    assert f.token.low < f.token.likely < f.token.high
    assert f.prompt.low < f.prompt.likely < f.prompt.high


def test_with_everything_in_memory_there_is_compute_and_nothing_else():
    f = told(1.0)
    assert (f.hit_rate, f.syncs, f.reading) == (1, 0, 0)
    assert f.token.likely == pytest.approx(0.020)


def test_fewer_slots_than_a_token_s_experts_get_no_hits():
    assert default_hit_rate(plan_of(LAYOUTS, SHAPE, slots=39)) == 0
    assert default_hit_rate(plan_of(LAYOUTS, SHAPE, slots=40)) == pytest.approx(0.25)
    assert told(39).nbytes == 40e6


def test_a_hit_rate_that_is_given_is_taken():
    f = forecast(plan_of(LAYOUTS, SHAPE, slots=160), StreamingConfig(), COMPUTE, DISK, hit_rate=0.9)
    assert (f.hit_rate, f.traced, f.nbytes) == (0.9, False, pytest.approx(40 * 0.1 * 1e6))


def test_more_slots_and_a_faster_disk_are_never_slower():
    times = [told(n).token.likely for n in (20, 40, 80, 160, 320, 639, 1.0)]
    assert times == sorted(times, reverse=True)
    assert told(160, replace(DISK, bytes_per_second=4e9)).token.likely < told(160).token.likely


def test_reading_ahead_hides_reads_of_a_slow_disk_only():
    ahead = told(160, lookahead=True)
    assert ahead.hidden == pytest.approx(speed.OVERLAP * 0.020)
    assert ahead.token.likely == pytest.approx(told(160).token.likely - ahead.hidden)
    assert told(160, DiskProbe(1e12, 1_000_000, "pread", 0), lookahead=True).hidden == 0


def test_the_hit_rate_is_a_trace_s_if_there_is_one(tmp_path):
    smoe("trace", "demo", "--slots", "1.0", "-m", "12", "-q", "-o", str(tmp_path / "t.npz"))
    trace = load_trace(tmp_path / "t.npz")
    plan = smoe_mlx.plan("demo", slots=0.25)
    f = forecast(plan, StreamingConfig(), COMPUTE, DISK, trace)
    assert f.traced
    assert f.hit_rate == pytest.approx(replay(trace, "lru", 128).decode.hit_rate)
    with pytest.raises(TraceError, match="640"):
        forecast(plan_of(LAYOUTS, SHAPE, slots=160), StreamingConfig(), COMPUTE, DISK, trace)


def test_bench_measures_what_it_foretells():
    result = bench(DEMO, list(range(30, 50)), StreamingConfig(), (0.25, 1.0), tokens=6)
    assert [r.slots for r in result.runs] == [128, 512]
    for r in result.runs:
        assert r.token > 0
        assert r.forecast.token.likely > 0
        assert r.error == pytest.approx(r.token / r.forecast.token.likely - 1)
        assert r.error_with_hits == pytest.approx(r.token / r.hits_known - 1)
    assert result.runs[1].error_with_hits == result.runs[1].error  # all in memory
    # The same tokens pass in the run that records and in the one that counts.
    assert result.runs[0].hit_rate == pytest.approx(result.runs[0].forecast.hit_rate, abs=0.12)
    assert "decoding forecasts are within 25 %" in str(result)


# ---- the doctor ----------------------------------------------------------------------------------


def test_a_model_that_fits(tmp_path):
    d = diagnose("demo", StreamingConfig(memory="25MB"))
    assert d.problem == ""
    assert d.plan.total <= 25_000_000
    assert d.command == "smoe-mlx generate demo --memory 25MB"
    text = str(d)
    for words in ("demo: fits", "tok/s likely", "to the first token", d.command):
        assert words in text
    json.dumps(d.as_dict())


@pytest.mark.parametrize(
    ("options", "sim", "words"),
    [
        ({"memory": "1MB"}, {}, ["'1MB' is too small", "this model needs at least"]),
        ({}, {"sim_ram": "2GB"}, ["can be used on this machine", "8 GB"]),
    ],
)
def test_a_model_that_does_not_fit_says_why_and_what_would_do(options, sim, words):
    text = str(diagnose("demo", StreamingConfig(**options), **sim))
    for word in words:
        assert word in text
    assert "demo: does not fit" in text
    useful = format_bytes(smoe_mlx.plan("demo", slots=1.0).useful, up=True)
    assert f"smoe-mlx generate demo --memory {useful.replace(' ', '')}" in text


def test_what_was_tuned_is_said():
    options = Setting(1, io="direct").options
    remember(DEMO, Tuned(None, options, None, "2026-11-30"))
    assert "as tuned: io=direct (smoe-mlx tune" in str(diagnose("demo", StreamingConfig()))
    assert "as tuned" not in str(diagnose("demo", StreamingConfig(slots=0.5)))


def test_more_memory_than_there_is_is_a_problem(monkeypatch):
    monkeypatch.setattr(doctor, "available_nbytes", lambda: 280_000_000)
    d = diagnose("demo", StreamingConfig(memory="25MB"))
    assert "25 MB are asked for, but only 280 MB" in d.problem


def test_what_lies_in_swap_is_said(monkeypatch):
    for swap, said in ((3_000_000_000, True), (0, False)):
        monkeypatch.setattr(doctor, "used_swap", lambda: swap)  # noqa: B023
        assert ("3 GB lie in swap" in str(diagnose("demo", StreamingConfig(slots=8)))) is said


def test_too_few_slots_are_called_so():
    assert "8 slots are fewer than the 64 experts" in str(
        diagnose("demo", StreamingConfig(slots=8))
    )


def test_a_machine_that_one_does_not_have():
    d = diagnose("demo", StreamingConfig(slots=0.25), sim_ram="16GB", sim_disk="3GB/s")
    assert d.total == 16 * 10**9
    assert d.available == pytest.approx(0.7 * 16e9)
    assert (d.disk.bytes_per_second, d.disk_source) == (3e9, "simulated")
    slow = diagnose("demo", StreamingConfig(slots=0.25), sim_disk="1MB/s")
    assert slow.forecast.token.likely > d.forecast.token.likely
    assert "a faster disk" in str(slow)


def test_a_disk_is_measured_once(tmp_path, monkeypatch):
    assert diagnose("demo", StreamingConfig(slots=0.25)).disk_source.startswith("measured")
    monkeypatch.setattr(doctor, "probe_disk", None)
    assert diagnose("demo", StreamingConfig(slots=0.25)).disk_source == "measured here lately"
    store = doctor.DISKS.path
    assert store == tmp_path / "cache" / "smoe-mlx" / "disks.json"
    known = json.loads(store.read_text())
    for change in ({"time": time.time() - 31 * 86400}, {"time": "now"}, {"probe": {}}):
        monkeypatch.setattr(doctor, "probe_disk", lambda *_: DISK)
        (key,) = known["entries"]
        changed = {key: {**known["entries"][key], **change}}
        store.write_text(json.dumps({**known, "entries": changed}))
        assert diagnose("demo", StreamingConfig(slots=0.25)).disk == DISK
        monkeypatch.setattr(doctor, "probe_disk", None)
        assert diagnose("demo", StreamingConfig(slots=0.25)).disk == DISK


# ---- a repository on the Hub ---------------------------------------------------------------------


class Hub(BaseHTTPRequestHandler):
    """The two things that are asked of the Hub: what a file is, and a range of it."""

    files: ClassVar[dict[str, Path]] = {}
    sent = 0
    whole: ClassVar[tuple[str, ...]] = ()  # are sent as a whole, whatever was asked for

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, body):
        path = self.files.get(self.path.removeprefix("/owner/model/resolve/main/"))
        if path is None:
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        data, size = path.read_bytes(), path.stat().st_size
        status, part = 200, ""
        if body and path.name not in self.whole and (wanted := self.headers.get("Range")):
            first, last = wanted.removeprefix("bytes=").split("-")
            data = data[int(first) : int(last) + 1]
            status, part = 206, f"bytes {first}-{int(first) + len(data) - 1}/{size}"
        self.send_response(status)
        self.send_header("Content-Length", str(len(data) if body else size))
        if part:
            self.send_header("Content-Range", part)
        self.send_header("ETag", f'"{path.name}"')
        self.send_header("X-Repo-Commit", "0" * 40)
        self.end_headers()
        if body:
            with contextlib.suppress(ConnectionError):  # who asked has seen enough
                self.wfile.write(data)
                type(self).sent += len(data)

    def log_message(self, *args):
        pass


@pytest.fixture
def hub(tmp_path, monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    api = partial(huggingface_hub.HfApi, endpoint=f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(huggingface_hub, "HfApi", api)
    monkeypatch.setattr(hub_constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(Hub, "files", {p.name: p for p in DEMO.iterdir()})
    monkeypatch.setattr(Hub, "sent", 0)
    yield Hub
    server.shutdown()
    server.server_close()


def test_of_a_hub_repository_only_headers_are_read(hub, tmp_path):
    config = StreamingConfig(slots=0.25)
    d = diagnose("owner/model", config)
    local = diagnose("demo", config)
    assert d.plan == local.plan
    assert d.needs == local.needs
    assert d.command == "smoe-mlx generate owner/model --slots 0.25"
    size = (DEMO / "model.safetensors").stat().st_size
    assert d.download_nbytes == pytest.approx(size, rel=0.01)
    assert "assumed" in d.disk_source
    assert 0 < hub.sent < size / 10
    assert not list((tmp_path / "hub").rglob("*.safetensors"))


@pytest.fixture(scope="module")
def vault(tmp_path_factory):
    return smoe_mlx.shatter("demo", tmp_path_factory.mktemp("vault") / "demo")


def test_of_a_vault_on_the_hub_only_its_table_is_read(hub, vault, tmp_path, monkeypatch):
    monkeypatch.setattr(Hub, "files", {p.name: p for p in vault.iterdir()})
    config = StreamingConfig(slots=0.25)
    d = diagnose("owner/model", config)
    assert d.plan == diagnose(str(vault), config).plan
    size = sum(p.stat().st_size for p in vault.iterdir() if p.suffix in (".smoe", ".safetensors"))
    assert d.download_nbytes == pytest.approx(size, rel=0.01)
    assert 0 < hub.sent < size / 10
    assert not list((tmp_path / "hub").rglob("*.smoe"))


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (lambda data: b"<html>" + data[6:], "not a vault"),
        (lambda data: data[:8] + b"\xff" * 40 + data[48:], "newer"),
        (lambda data: data[:100] + b"!" + data[101:], "damaged"),
        (lambda data: data[:-4096], "truncated"),
        (lambda data: b"", "not a vault|parts of a file"),
        (None, "owner/model"),
    ],
    ids=["page", "numbers", "header", "short", "empty", "missing"],
)
def test_a_damaged_vault_on_the_hub_is_refused(damage, word, hub, vault, tmp_path, monkeypatch):
    files = {p.name: p for p in vault.iterdir()}
    whole = files.pop("experts.smoe")
    if damage is not None:
        files["experts.smoe"] = tmp_path / "damaged"
        files["experts.smoe"].write_bytes(damage(whole.read_bytes()))
    monkeypatch.setattr(Hub, "files", files)
    with pytest.raises(CheckpointError, match=word):
        diagnose("owner/model", StreamingConfig(slots=0.25))
    assert hub.sent < whole.stat().st_size / 4  # nor is more than that fetched to find out


def test_a_server_that_sends_no_parts_is_not_asked_for_a_whole_vault(hub, vault, monkeypatch):
    monkeypatch.setattr(Hub, "files", {p.name: p for p in vault.iterdir()})
    monkeypatch.setattr(Hub, "whole", ("experts.smoe",))
    with pytest.raises(CheckpointError, match="does not send parts"):
        diagnose("owner/model", StreamingConfig(slots=0.25))


def test_a_repository_without_safetensors_is_named(hub, monkeypatch):
    monkeypatch.setattr(Hub, "files", {"config.json": DEMO / "config.json"})
    with pytest.raises(CheckpointError, match="owner/model"):
        diagnose("owner/model", StreamingConfig())


@pytest.mark.parametrize("at", ["hf_hub_download", "get_safetensors_metadata"])
def test_no_connection_is_said(hub, at, monkeypatch):
    error = {"hf_hub_download": LocalEntryNotFoundError("offline")}.get(
        at, smoe_mlx.hub.HTTPX_ERRORS[0]("offline")
    )

    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(huggingface_hub.HfApi.func, at, fail)
    with pytest.raises(ModelNotFoundError, match="cannot be reached"):
        diagnose("owner/model", StreamingConfig())


# ---- the commands --------------------------------------------------------------------------------


def test_commands():
    out = json.loads(
        smoe("doctor", "demo", "--slots", "0.25", "--sim-ram", "16GB", "--json").stdout
    )
    assert out["plan"]["slots"] == 128
    assert out["total"] == 16 * 10**9
    assert "not a memory size" in smoe("doctor", "demo", "--sim-disk", "fast", status=1).stderr
    out = json.loads(smoe("bench", "demo", "--budgets", "0.5,16", "-m", "4", "--json").stdout)
    assert [r["slots"] for r in out["runs"]] == [16, 256]


def test_a_token_that_takes_too_long_is_not_finished():
    """It is told by the layers that were done: each takes three seconds on this clock."""
    folder = find_model("demo")
    checkpoint, vault = open_weights(folder)
    try:
        skeleton = build_skeleton(folder, checkpoint, None, False, vault)
        calls = []

        def clock():
            calls.append(None)
            return 3.0 * len(calls)

        compute = speed.measure_compute(skeleton, StreamingConfig(), clock)
    finally:
        checkpoint.close()
    # 15 s have passed at the seventh layer; then the clock is asked once more.
    assert len(calls) == 8
    assert compute == Compute(token=21 * 8 / 6, syncs=0.0, prompt_token=21 * 8 / 6)
