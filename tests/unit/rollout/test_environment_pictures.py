"""Pictures that environments draw: written once, kept while anything names them."""

import hashlib
import os
import time
from functools import partial

from mmrl.rollout.environments.pictures import delete_unused_pictures, save_picture
from mmrl.types import ImageRef

PNG, JPEG = b"\x89PNG and more", b"\xff\xd8\xff and more"


def test_picture_is_named_by_its_digest_and_written_once(tmp_path):
    folder = tmp_path / "frames"
    ref = save_picture(folder, PNG)
    sha256 = hashlib.sha256(PNG).hexdigest()
    assert ref == ImageRef(path=str(folder / f"{sha256}.png"), sha256=sha256)
    os.utime(ref.path, (0, 0))
    assert save_picture(folder, PNG) == ref
    assert os.stat(ref.path).st_mtime > time.time() - 60.0  # in use again
    assert save_picture(folder, JPEG).path.endswith(".jpg")
    assert len(list(folder.iterdir())) == 2


def test_two_machines_may_save_one_picture_at_once(tmp_path, monkeypatch):
    """The second rank may have the process id of the first, and saves the picture just before the first has done so."""
    second_ranks, rename = [partial(save_picture, tmp_path, PNG)], os.replace

    def rename_second(source, target):
        if second_ranks:
            second_ranks.pop()()
        rename(source, target)

    monkeypatch.setattr(os, "replace", rename_second)
    ref = save_picture(tmp_path, PNG)
    assert not second_ranks and [str(path) for path in tmp_path.iterdir()] == [ref.path]


def test_pictures_that_nothing_names_are_deleted_once_they_are_old(tmp_path):
    folder = tmp_path / "frames"
    named, unnamed, fresh = (save_picture(folder, PNG + bytes([number])) for number in range(3))
    for ref in (named, unnamed):
        os.utime(ref.path, (0, 0))
    record = tmp_path / "record.jsonl"
    record.write_text(f'{{"path": "data/{named.path.removeprefix(str(tmp_path) + "/")}"}}\n')
    delete_unused_pictures(folder, [record], older_than=time.time() - 3600.0)
    assert {str(path) for path in folder.iterdir()} == {named.path, fresh.path}
    os.utime(named.path, (0, 0))
    delete_unused_pictures(folder, [], older_than=time.time())
    assert {str(path) for path in folder.iterdir()} == {fresh.path}
