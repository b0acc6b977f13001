"""Files from strangers: understood or refused, within bounds, and nothing outside is touched."""

import json
import os
import shutil
import warnings

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import smoe_mlx
from smoe_mlx.cache.usage import MAX_WEIGHT, Usage
from smoe_mlx.doctor import diagnose
from smoe_mlx.errors import CheckpointError, RecipeError, SmoeError, TraceError
from smoe_mlx.hub import find_model
from smoe_mlx.load import load_model
from smoe_mlx.sculptor.recipe import Quantisation, Recipe
from smoe_mlx.server.session_files import SessionFiles
from smoe_mlx.store.layout import ExpertLayout, TensorSpec
from smoe_mlx.store.safetensors import Checkpoint
from smoe_mlx.trace import load_trace

EASY = settings(deadline=None, suppress_health_check=list(HealthCheck), database=None)
NUMBERS = st.one_of(
    st.integers(-2, 9), st.floats(), st.sampled_from([1 << 31, 1 << 62, 10**6, -(1 << 40), 10**400])
)
LEAVES = st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=12))
JSON = st.recursive(
    LEAVES,
    lambda x: st.lists(x, max_size=4) | st.dictionaries(st.text(max_size=8), x, max_size=4),
    max_leaves=8,
)
DEEP = "[" * 100_000


# ---- config.json ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def copies(tiny, tmp_path_factory):
    return {
        arch: shutil.copytree(tiny(arch, "affine"), tmp_path_factory.mktemp("hostile") / arch)
        for arch in ("qwen3_moe", "gpt_oss", "deepseek_v32")
    }


def paths(document, at=()):
    for name, value in document.items():
        yield (*at, name)
        if isinstance(value, dict):
            yield from paths(value, (*at, name))


@settings(EASY, max_examples=120)
@given(data=st.data())
def test_any_entry_of_a_config_is_refused_or_loads(copies, tiny, data):
    """Believed, some values end the process within MLX, and others keep it busy for ever."""
    folder = copies[data.draw(st.sampled_from(sorted(copies)))]
    document = json.loads((tiny(folder.name, "affine") / "config.json").read_text())
    place = document
    *at, name = data.draw(st.sampled_from(sorted(paths(document))))
    for part in at:
        place = place[part]
    place[name] = data.draw(JSON)
    (folder / "config.json").write_text(json.dumps(document))
    said = "config.json"
    try:
        load_model(folder, config=smoe_mlx.StreamingConfig(slots=0.5))
    except SmoeError as e:
        said = str(e)
    assert any(word in said for word in ("config.json", str(folder), "slots")), said


@pytest.mark.parametrize(
    "value", [0.5, 9.4e304, 10**400, float("nan"), [3]], ids=lambda x: f"{x!r:.9}"
)
def test_a_hostile_number_of_experts_a_token_is_refused(copies, tiny, value):
    """mlx-lm builds a model that cannot run, and the plan must not believe it."""
    config = json.loads((tiny("qwen3_moe", "affine") / "config.json").read_text())
    config["num_experts_per_tok"] = value
    (copies["qwen3_moe"] / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_model(copies["qwen3_moe"], config=smoe_mlx.StreamingConfig(slots=0.5))


CONFIGS = {
    "deep": DEEP,
    "deep in the middle": '{"a": ' + DEEP,
    "no text": b"\xff\xfe{",
    "a list": "[1]",
    "layers": '{"model_type": "qwen3_moe", "num_hidden_layers": 1000000000}',
    "layers within": '{"model_type": "x", "text_config": {"n_layers": 1000000000}}',
    "bits": '{"model_type": "qwen3_moe", "quantization": {"bits": 0, "group_size": 64}}',
    "group_size": '{"quantization": {"a.b": {"bits": 4, "group_size": 1099511627776}}}',
    "model_type": '{"model_type": "../../evil"}',
    "dotted model_type": '{"model_type": "..utils"}',
    "model_file": '{"model_type": "qwen3_moe", "model_file": "../evil.py"}',
    "no model_type": "{}",
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_hostile_config_is_refused_by_name(copies, kind):
    folder, content = copies["qwen3_moe"], CONFIGS[kind]
    path = folder / "config.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    for act in (smoe_mlx.plan, smoe_mlx.load):
        with pytest.raises(SmoeError, match=str(folder)):
            act(folder, slots=0.5)


def test_a_config_that_is_no_file_or_too_large_is_refused(copies):
    path = copies["qwen3_moe"] / "config.json"
    path.unlink()
    os.mkfifo(path)  # opening it would wait for its other end
    with pytest.raises(CheckpointError, match=r"config\.json is not a file"):
        smoe_mlx.plan(path.parent)
    path.unlink()
    with path.open("wb") as f:
        f.truncate(1 << 40)
    with pytest.raises(CheckpointError, match=r"config\.json: .* \(larger than"):
        smoe_mlx.plan(path.parent)
    path.unlink()


# ---- names of files ------------------------------------------------------------------------------


@settings(EASY, max_examples=60)
@given(
    name=st.one_of(
        st.sampled_from(
            ["../secret.safetensors", "/etc/passwd", "link/../../secret.safetensors", ".", "..", "",
             "model.safetensors/../../secret.safetensors", "\0", "a\nb", "~", "link.safetensors"]
        ),
        st.text(max_size=20),
        JSON,
    )
)  # fmt: skip
def test_an_index_names_no_file_outside_the_folder(copies, name):
    folder = copies["gpt_oss"]
    secret = folder.parent / "secret.safetensors"
    secret.write_bytes(b"\x01\0\0\0\0\0\0\0{")
    index = folder / "model.safetensors.index.json"
    before = index.read_bytes() if index.exists() else None
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
    try:
        if name == "model.safetensors":
            Checkpoint(folder).close()
        else:
            with pytest.raises(CheckpointError, match=str(folder)):
                Checkpoint(folder)
    finally:
        index.unlink() if before is None else index.write_bytes(before)


# ---- links ---------------------------------------------------------------------------------------

FILES = [
    "config.json", "model.safetensors", "model.safetensors.index.json", "experts.smoe",
    "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "model.py",
    "smoe-usage.json", "additional_chat_templates/rag.jinja",
]  # fmt: skip


@pytest.fixture
def linked(tmp_path):
    """linked(name, target, root) -> a copy of the demo whose file `name` is a link."""

    def make(name, target, root="model"):
        folder = tmp_path / root
        if not folder.exists():
            shutil.copytree(find_model("demo"), folder)
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        path.symlink_to(target)
        return folder

    return make


def refused(name, target):
    return pytest.raises(CheckpointError, match=rf"{name} is a link to {target}, .*Copy that file")


@pytest.mark.parametrize("name", FILES)
def test_a_link_to_a_file_outside_is_refused(linked, tmp_path, name):
    secret = tmp_path / "secret"
    secret.write_text("{}")
    folder = linked(name, secret)
    doors = [smoe_mlx.load, smoe_mlx.plan, smoe_mlx.verify, smoe_mlx.tune,
             lambda f: diagnose(str(f), smoe_mlx.StreamingConfig()),
             lambda f: smoe_mlx.shatter(f, tmp_path / "new"),
             lambda f: smoe_mlx.open_experts(f, ["a"], slots=1)]  # fmt: skip
    for door in doors:
        with refused(name, secret):
            door(folder)
    linked(name, os.path.relpath(secret, (folder / name).parent))
    with refused(name, secret):
        smoe_mlx.load(folder)


def test_links_by_way_of_others(linked, tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "rag.jinja").write_text("secret")
    with refused("additional_chat_templates", tmp_path / "outside"):
        smoe_mlx.load(linked("additional_chat_templates", tmp_path / "outside"))
    folder = linked("vocab.txt", "a/rag.jinja", "by way of a folder")
    (folder / "a").symlink_to(tmp_path / "outside")
    with pytest.raises(CheckpointError, match="is a link to"):
        smoe_mlx.load(folder)
    folder = linked("vocab.txt", tmp_path / "first", "by a chain")
    (tmp_path / "first").symlink_to(folder / "config.json")
    smoe_mlx.load(folder)  # it ends inside
    (tmp_path / "first").unlink()
    (tmp_path / "first").symlink_to("outside/rag.jinja")
    with refused("vocab.txt", tmp_path / "outside/rag.jinja"):
        smoe_mlx.load(folder)
    (tmp_path / "first").unlink()
    with refused("vocab.txt", tmp_path / "first"):  # dangling
        smoe_mlx.load(folder)


def test_links_that_stay_inside_are_followed(linked, tmp_path):
    folder = linked("vocab.txt", "config.json")
    (folder / "tokenizer.json").rename(folder / "real.json")
    linked("tokenizer.json", "real.json")
    (tmp_path / "to all of it").symlink_to(folder)
    smoe_mlx.load(tmp_path / "to all of it")
    for nowhere in ("gone.json", "config.json"):
        linked("config.json", nowhere)
        with pytest.raises((CheckpointError, OSError), match=r"config\.json"):
            smoe_mlx.load(folder)


def hub(tmp_path, linked, repository="models--a--b", snapshots="snapshots"):
    """A Hub download: files are links into the repository's blobs."""
    root = f"cache/{repository}/{snapshots}/0123"
    folder = linked("vocab.txt", "config.json", root)
    (folder / "vocab.txt").unlink()
    blobs = tmp_path / "cache" / repository / "blobs"
    blobs.mkdir(exist_ok=True)
    for file in list(folder.iterdir()):
        file.rename(blobs / file.name)
        linked(file.name, f"../../blobs/{file.name}", root)
    return folder


def test_hub_downloads_consist_of_links(linked, tmp_path):
    folder = hub(tmp_path, linked)
    assert (folder / "config.json").is_symlink()
    smoe_mlx.load(folder)
    smoe_mlx.load(smoe_mlx.shatter(folder, tmp_path / "vault"))
    (tmp_path / "elsewhere").symlink_to(tmp_path / "cache")
    smoe_mlx.load(tmp_path / "elsewhere" / folder.relative_to(tmp_path / "cache"))

    secret = tmp_path / "cache" / "secret"
    secret.write_text("{}")
    other = hub(tmp_path, linked, "models--a--c").parents[1] / "blobs" / "config.json"
    blob = folder.parents[1] / "blobs" / "vocab.txt"
    blob.symlink_to(secret)  # a blob that leads on
    for target, real in ((other, other), (secret, secret), (blob, secret)):
        linked("vocab.txt", target, folder.relative_to(tmp_path))
        with refused("vocab.txt", real):
            smoe_mlx.load(folder)


@pytest.mark.parametrize("layout", [("a--b", "snapshots"), ("models--a--b", "refs")])
def test_blobs_of_what_is_no_hub_download_are_outside(linked, tmp_path, layout):
    with pytest.raises(CheckpointError, match="is a link to"):
        smoe_mlx.load(hub(tmp_path, linked, *layout))


def test_a_download_with_a_link_out_of_its_repository_is_refused(linked, tmp_path, monkeypatch):
    folder = hub(tmp_path, linked)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *a, **k: str(folder))
    smoe_mlx.load("a/b")
    target = find_model("demo").resolve() / "config.json"
    linked("config.json", target, folder.relative_to(tmp_path))
    with refused("config.json", target):
        smoe_mlx.load("a/b")


def test_the_demo_may_be_installed_by_links(linked, monkeypatch):
    """As some installers do with all files of a package."""
    folder = linked("config.json", find_model("demo") / "config.json")
    monkeypatch.setattr("smoe_mlx.hub.DEMO_FOLDER", folder)
    smoe_mlx.load("demo")
    smoe_mlx.load(folder)


def test_an_adapter_with_a_link_is_refused(tmp_path):
    (tmp_path / "secret").write_text("{}")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapters.safetensors").write_bytes(b"\2" + b"\0" * 7 + b"{}")
    (tmp_path / "adapter" / "adapter_config.json").symlink_to("../secret")
    with refused("adapter_config.json", tmp_path / "secret"):
        smoe_mlx.load("demo", adapter_path=str(tmp_path / "adapter"))


@pytest.mark.parametrize("whole", [False, True])
def test_links_among_sessions_are_left_alone(tmp_path, caplog, whole):
    outside, folder = tmp_path / "outside", tmp_path / "sessions"
    outside.mkdir()
    file = outside / "01234567-a.safetensors"
    file.write_bytes(b"not a session, and larger than the limit")
    files = SessionFiles(folder, max_bytes=1)
    if whole:
        (folder / "m").symlink_to(outside)
    else:
        (folder / "m").mkdir()
        (folder / "m" / file.name).symlink_to(file)
    assert list(files.index("m")) == []
    assert f"{file.name} is not used: it is a link" in caplog.text
    files._keep_within_limit()
    assert file.exists()


# ---- recipes -------------------------------------------------------------------------------------

SETTINGS = st.one_of(
    JSON,
    st.fixed_dictionaries({}, optional={"bits": JSON, "group_size": JSON, "mode": JSON}),
    st.sampled_from(["SMOE-Q4", "smoe-q2"]),
    st.fixed_dictionaries({"mode": st.sampled_from(["affine", "mxfp4", "nvfp4"])}),
)
PATTERNS = st.text(st.sampled_from("*?[]!-.a0\\\n(|"), max_size=30)


@settings(EASY, max_examples=150)
@given(rules=st.dictionaries(PATTERNS, SETTINGS, max_size=4))
def test_a_recipe_is_understood_or_refused(tmp_path_factory, rules):
    path = tmp_path_factory.getbasetemp() / "recipe.json"
    path.write_text(json.dumps(rules))
    recipe, said = Recipe(), str(path)
    try:
        recipe = Recipe.read(path)
    except RecipeError as e:
        said = str(e)
    assert str(path) in said
    for setting in recipe.for_experts("a.0.a", "a", 5):
        assert setting is None or isinstance(setting, Quantisation)
        if setting is not None:
            assert type(setting.bits) is int
            assert type(setting.group_size) is int


@pytest.mark.parametrize(
    "text", [DEEP, '{"*": {"mode": []}}', '{"*": {"bits": 4.0}}', '{"*": {"mode": {"a": 1}}}']
)
def test_a_hostile_recipe_is_refused_by_name(tmp_path, text):
    path = tmp_path / "recipe.json"
    path.write_text(text)
    with pytest.raises(RecipeError, match=r"recipe\.json"):
        Recipe.read(path)


# ---- usage files ---------------------------------------------------------------------------------


def layouts():
    spec = TensorSpec("up_proj", "weight", "F32", (2,), 8)
    ids = np.zeros((1, 3), np.int64)
    return [ExpertLayout(f"layers.{i}", 3, (spec,), ids, ids) for i in range(2)]


@settings(EASY, max_examples=150)
@given(data=st.data())
def test_a_usage_file_is_taken_whole_or_ignored(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "usage.json"
    usage = Usage(layouts(), path)
    usage.saw([(0, 1), (1, 2)])
    usage.save()
    document = json.loads(path.read_text())
    kind = data.draw(st.sampled_from(["entry", "weight", "bytes", "anything"]))
    if kind == "entry":
        document[data.draw(st.sampled_from(sorted(document)))] = data.draw(JSON)
    elif kind == "weight":
        document["weights"][1][data.draw(st.integers(0, 2))] = data.draw(JSON)
    elif kind == "anything":
        document = data.draw(JSON)
    text = json.dumps(document).encode()
    if kind == "bytes":
        at = data.draw(st.integers(0, len(text) - 1))
        text = text[:at] + data.draw(st.binary(max_size=3)) + text[at + 1 :]
    path.write_bytes(text)
    again = Usage(layouts(), path)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        again.load()
    assert (again.path is None) == bool(told)
    assert path.read_bytes() == text
    ranked = again.ranked()
    assert sorted(ranked) == [(i, e) for i in range(2) for e in range(3)]
    assert all(0 <= again.weight(key) <= MAX_WEIGHT for key in ranked)
    path.unlink()


# ---- traces --------------------------------------------------------------------------------------


def header(**changes):
    document = {
        "format": "smoe-mlx trace", "version": 1, "model": "m", "prompt_tokens": 0,
        "prompt_calls": 0, "tokens": 1, "num_experts": [4], "top_k": [2], "expert_nbytes": [8],
        "banks": [0], **changes,
    }  # fmt: skip
    return np.frombuffer(json.dumps(document).encode(), np.uint8)


@settings(EASY, max_examples=100)
@given(
    changes=st.dictionaries(
        st.sampled_from(["num_experts", "top_k", "banks", "tokens", "prompt_calls", "version"]),
        st.one_of(JSON, st.lists(NUMBERS, max_size=3)),
        max_size=3,
    ),
    calls=st.lists(st.tuples(st.integers(-1, 2), st.integers(-1, 3)), max_size=3),
    ids=st.lists(st.integers(-1, 6), max_size=6),
)
def test_a_trace_is_consistent_or_refused(tmp_path_factory, changes, calls, ids):
    path = tmp_path_factory.getbasetemp() / "trace.npz"
    calls = np.array(calls, np.int32).reshape(-1, 2)
    np.savez(path, header=header(**changes), calls=calls, ids=np.array(ids, np.int32))
    trace, said = None, str(path)
    try:
        trace = load_trace(path)
    except TraceError as e:
        said = str(e)
    assert str(path) in said
    for layer, routed in trace or ():
        assert 0 <= layer < trace.num_layers
        assert routed.shape[1] == trace.top_k[layer]
        assert routed.min() >= 0
