"""A stand-in for an object store: gs://bucket/... is a folder, which is never locked or renamed.

What reaches a real one is replaced at two places: the file system of fsspec, through which epath
reads and writes, and the store that Orbax names to TensorStore.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import pytest
from etils.epath import backend
from fsspec.implementations.local import LocalFileSystem
from orbax.checkpoint._src.path import gcs_utils

from moa_jax.files import paths


def stand_in(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """From now on gs://NAME is `folder`/NAME."""

    class Folder(LocalFileSystem):
        protocol = ("gcs", "gs")
        cachable = False

        def __init__(self, **_: Any) -> None:
            super().__init__(auto_mkdir=True)

        @classmethod
        def _strip_protocol(cls, path: Any) -> str:
            path = str(path)
            if path.startswith(str(folder)):
                return path
            return str(folder / path.removeprefix("gcs://").removeprefix("gs://").strip("/"))

        def glob(self, path: str, **settings: Any) -> list[str]:
            return [found.removeprefix(f"{folder}/") for found in super().glob(path, **settings)]

        def mv(self, *_: Any, **__: Any) -> None:
            raise AssertionError("a store renames nothing")

    (folder / "bucket").mkdir(parents=True)
    patch.setattr(paths, "_is_installed", lambda package: True)
    fsspec.register_implementation("gcs", Folder, clobber=True)
    backend.fsspec_backend._get_filesystem.cache_clear()
    patch.setattr(gcs_utils, "is_hierarchical_namespace_enabled", lambda path: False)
    patch.setattr(
        gcs_utils,
        "get_kvstore_for_gcs",
        lambda path: {"driver": "file", "path": path.replace("gs://", f"{folder}/")},
    )
