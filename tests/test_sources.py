import errno
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled
from huggingface_hub.utils import filter_repo_objects

from jsg.errors import ModelError
from jsg.sources import resolve_model
from tests.fake_hub import fake_hub


class _Hub:
    """Stands in for `huggingface_hub.snapshot_download`; a missing snapshot or a failing hub raises what it raises."""

    def __init__(self, cached: Path | None = None, online: Path | Exception | None = None):
        self.cached = cached
        self.online = online or OfflineModeIsEnabled("offline at /home/x")
        self.calls: list[tuple[bool, dict[str, object]]] = []

    def snapshot_download(self, name: str, *, local_files_only: bool, **arguments: object) -> str:
        self.calls.append((local_files_only, {"name": name, **arguments}))
        if local_files_only:
            if self.cached is None:
                raise LocalEntryNotFoundError("nothing in /home/x/.cache")
            return str(self.cached)
        if isinstance(self.online, Exception):
            raise self.online
        return str(self.online)


@pytest.fixture
def use_hub(monkeypatch: pytest.MonkeyPatch) -> Callable[[_Hub], _Hub]:
    def use(hub: _Hub) -> _Hub:
        monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
        monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda self, name, revision: [])
        return hub

    return use


def _snapshot(directory: Path, shards: int, missing: int = 0) -> Path:
    directory.mkdir()
    names = [f"model-{i:05}.safetensors" for i in range(shards)]
    index = {"weight_map": {f"w{i}": name for i, name in enumerate(names)}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    for name in names[missing:]:
        (directory / name).touch()
    return directory


@pytest.mark.parametrize("name", ["tiny", "tiny-vision"])
def test_embedded_models_are_in_the_package(name: str) -> None:
    assert (resolve_model(name) / "config.json").is_file()


def test_a_directory_is_itself(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path


def test_the_cache_comes_first(tmp_path: Path, use_hub: Callable[[_Hub], _Hub]) -> None:
    hub = use_hub(_Hub(cached=_snapshot(tmp_path / "cached", shards=2)))
    assert resolve_model("owner/model", revision="abc") == tmp_path / "cached"
    [(from_cache, arguments)] = hub.calls
    assert from_cache
    assert (arguments["name"], arguments["revision"]) == ("owner/model", "abc")
    allowed = arguments["allow_patterns"]
    assert allowed == ["*.safetensors", "orbax/*", "*.json", "tokenizer.model", "*.jinja", "*.txt"]


def test_an_incomplete_cache_is_completed(tmp_path: Path, use_hub: Callable[[_Hub], _Hub]) -> None:
    for cached in (_snapshot(tmp_path / "half", shards=2, missing=1), tmp_path / "empty"):
        cached.mkdir(exist_ok=True)
        hub = use_hub(_Hub(cached=cached, online=tmp_path / "whole"))
        assert resolve_model("owner/model") == tmp_path / "whole"
        assert [from_cache for from_cache, _ in hub.calls] == [True, False, False]


def test_it_is_said_before_the_hub_is_asked_and_nothing_is_told_to_it(
    tmp_path: Path, use_hub: Callable[[_Hub], _Hub], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("HF_HUB_DISABLE_TELEMETRY", raising=False)
    for is_offline, said in ((False, "HF_HUB_OFFLINE=1 forbids that"), (True, "")):
        caplog.clear()
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", is_offline)
        use_hub(_Hub(online=tmp_path))
        resolve_model("owner/model")
        assert (said in caplog.text) if said else not caplog.text
    assert os.environ["HF_HUB_DISABLE_TELEMETRY"] == "1"


def _orbax(directory: Path, missing: str | None = None) -> Path:
    """A snapshot of a repository that `jsg convert` wrote: nested folders, names without an ending."""
    directory.mkdir(exist_ok=True)
    files = ["_METADATA", "model.norm.weight/zarr.json", "model.norm.weight/c/0", "model.up.weight/c/0/1"]
    (directory / "orbax.json").write_text(json.dumps({"files": dict.fromkeys(files, 0)}))
    for path in files:
        if path != missing:
            (directory / "orbax" / path).parent.mkdir(parents=True, exist_ok=True)
            (directory / "orbax" / path).touch()
    return directory


def test_an_orbax_checkpoint_comes_whole(tmp_path: Path, use_hub: Callable[[_Hub], _Hub]) -> None:
    """From the cache when all that its manifest lists is there; every file of it is asked for."""
    whole = _orbax(tmp_path / "whole")
    hub = use_hub(_Hub(cached=whole))
    assert resolve_model("owner/model") == whole
    [(from_cache, arguments)] = hub.calls
    assert from_cache
    files = [path.relative_to(whole).as_posix() for path in whole.rglob("*") if path.is_file()]
    assert set(_asked_for(files, arguments)) == set(files) and len(files) == 5
    for name, missing in (("half", "model.up.weight/c/0/1"), ("none", "_METADATA")):
        cached = _orbax(tmp_path / name, missing)
        hub = use_hub(_Hub(cached=cached, online=whole))
        assert resolve_model("owner/model") == whole
        assert [from_cache for from_cache, _ in hub.calls] == [True, False, False]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"files": null}', '{"files": []}', '{"files": {}}'])
def test_a_damaged_manifest_is_downloaded_again(tmp_path: Path, use_hub: Callable[[_Hub], _Hub], content: str) -> None:
    cached = _orbax(tmp_path / "cached")
    (cached / "orbax.json").write_text(content)
    use_hub(_Hub(cached=cached, online=tmp_path / "whole"))
    assert resolve_model("owner/model") == tmp_path / "whole"


def test_of_two_kinds_the_one_asked_for_is_downloaded(tmp_path: Path, use_hub: Callable[[_Hub], _Hub]) -> None:
    both = _orbax(_snapshot(tmp_path / "both", shards=2))
    (both / "config.json").touch()
    files = [path.relative_to(both).as_posix() for path in both.rglob("*") if path.is_file()]
    orbax = {path for path in files if path.startswith("orbax")}
    wanted = {"safetensors": set(files) - orbax, "orbax": {*orbax, "config.json"}, "auto": set(files)}
    for load_format, expected in wanted.items():
        hub = use_hub(_Hub(cached=both))
        assert resolve_model("owner/model", load_format=load_format) == both
        assert set(_asked_for(files, hub.calls[0][1])) == expected
    half = _orbax(_snapshot(tmp_path / "half", shards=2), "_METADATA")
    hub = use_hub(_Hub(cached=half, online=both))
    assert resolve_model("owner/model", load_format="safetensors") == half
    assert resolve_model("owner/model", load_format="orbax") == both


def _asked_for(files: list[str], arguments: Mapping[str, Any]) -> list[str]:
    """By the client's own filter."""
    allowed, ignored = arguments["allow_patterns"], arguments["ignore_patterns"]
    return list(filter_repo_objects(files, allow_patterns=allowed, ignore_patterns=ignored))


@pytest.mark.parametrize(
    "failure", [OfflineModeIsEnabled("at /home/x"), httpx.ConnectError("10.0.0.1 refused"), OSError("/home/x full")]
)
def test_offline_is_a_clear_error(use_hub: Callable[[_Hub], _Hub], failure: Exception) -> None:
    use_hub(_Hub(online=failure))
    pattern = rf"'owner/model'.*{type(failure).__name__}.*offline mode.*gated"
    with pytest.raises(ModelError, match=pattern) as raised:
        resolve_model("owner/model")
    assert "/home" not in str(raised.value) and "10.0.0.1" not in str(raised.value)
    assert raised.value.__cause__ is None


def test_the_real_client_offline_and_with_a_bad_name(tmp_path: Path) -> None:
    for name in ("nobody/no-such-model", "a/b/c", "../nowhere", ""):
        with pytest.raises(ModelError, match="directory or a hub name"):
            resolve_model(name)


def test_a_cache_that_cannot_be_used_is_named_with_what_to_do(
    use_hub: Callable[[_Hub], _Hub], monkeypatch: pytest.MonkeyPatch
) -> None:
    for cache, problem, said in (
        ("/a/hub", OSError(errno.EACCES, "Permission denied", "/a/hub/x"), "but /a/hub/x gave: Permission denied"),
        ("/a/hub", OSError(errno.EROFS, "Read-only file system", "/a"), "but /a gave: Read-only file system"),
        ("/a/hub", OSError(errno.ENOSPC, "No space left on device"), "but /a/hub gave: No space left on device"),
        ("~/.cache/hub", RuntimeError("Could not determine home directory"), "but this user has no home directory"),
    ):
        monkeypatch.setattr(constants, "HF_HUB_CACHE", cache)
        use_hub(_Hub(online=problem))
        with pytest.raises(ModelError, match=f"{said}; set HF_HOME to a directory that is yours and has room"):
            resolve_model("owner/model")
    use_hub(_Hub(online=OSError(errno.ECONNRESET, "Connection reset by peer")))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", "/a/hub")
    with pytest.raises(ModelError, match="the hub did not give it"):
        resolve_model("owner/model")


def test_the_real_client_says_what_is_the_matter_with_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    with fake_hub({"owner/model": {"config.json": b"{}", "model.safetensors": b"w"}}) as hub:
        template = hub.endpoint + constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants.ENDPOINT)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        for cache in ("/proc/none/hub", f"{tmp_path}/file/hub"):
            monkeypatch.setattr(constants, "HF_HUB_CACHE", cache)
            with pytest.raises(ModelError, match=f"but {Path(cache).parent}.* gave: .*; set HF_HOME"):
                resolve_model("owner/model")
        assert not hub.fetched
