"""The default folders of each platform for data, state and caches."""

from pathlib import Path

import pytest

from edgeinfer.user_folders import Kind, user_folder

HOME = Path("/home/eva")


@pytest.mark.parametrize(
    ("platform", "kind", "folder"),
    [
        ("linux", "data", "/home/eva/.local/share/edgeinfer"),
        ("linux", "config", "/home/eva/.config/edgeinfer"),
        ("linux", "state", "/home/eva/.local/state/edgeinfer"),
        ("linux", "cache", "/home/eva/.cache/edgeinfer"),
        ("darwin", "data", "/home/eva/Library/Application Support/edgeinfer"),
        ("darwin", "config", "/home/eva/Library/Application Support/edgeinfer"),
        ("darwin", "cache", "/home/eva/Library/Caches/edgeinfer"),
        ("win32", "state", "/home/eva/AppData/Local/edgeinfer/state"),
    ],
)
def test_the_default_folders(platform: str, kind: Kind, folder: str) -> None:
    assert user_folder(kind, platform=platform, environment={}, home=HOME) == Path(folder)


@pytest.mark.parametrize("platform", ["linux", "darwin", "win32"])
def test_xdg_variables_are_followed_if_absolute(platform: str, tmp_path: Path) -> None:
    def data(given: str) -> Path:
        return user_folder("data", platform=platform, environment={"XDG_DATA_HOME": given}, home=HOME)

    assert data(str(tmp_path)) == tmp_path / "edgeinfer"
    assert data("srv") == data("")
    assert HOME in data("").parents
