"""Resolving paths inside allowed folders."""

import pytest

from mmrl.types import UserError
from mmrl.utils.files import resolve_inside


def test_a_known_folder_hides_no_link_out_of_the_roots(tmp_path):
    root = tmp_path.resolve() / "root"
    root.mkdir()
    (tmp_path / "alias").symlink_to(root)
    for name in ("a", "b"):
        (root / name).touch()
    (tmp_path / "outside").touch()
    (root / "link").symlink_to(tmp_path / "outside")
    (root / "loop").symlink_to(root / "loop")
    folders = {}
    for name in ("a", "b", "missing"):
        assert resolve_inside(tmp_path / "alias" / name, [root], folders) == root / name
    assert folders == {str(tmp_path / "alias"): str(root)}
    remedy = r"^/etc lies outside data\.media_roots .*`mmrl eval` and `mmrl view`: --media-root"
    with pytest.raises(UserError, match=remedy) as caught:
        resolve_inside("/etc", [root])
    assert str(caught.value).count("/etc") == 1
    too_many = r"leads nowhere \(Too many levels of symbolic links\); correct"
    for name, words in {"link": "lies outside", "loop": too_many, "..": "lies outside"}.items():
        with pytest.raises(UserError, match=words):
            resolve_inside(f"{tmp_path}/alias/{name}", [root], folders)
