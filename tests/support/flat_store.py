"""An object store as simple as S3, whose operations can be made to fail."""

from pathlib import Path
from typing import ClassVar

import fsspec
from fsspec.spec import AbstractFileSystem


class FlatStore(AbstractFileSystem):
    """Objects by name, without folders, renaming or open files; listings may include the prefix itself."""

    protocol = "flat"
    cachable = False
    objects: ClassVar[dict[str, bytes]] = {}
    markers: ClassVar[set[str]] = set()
    """Empty objects that stand for folders; names end with a slash."""
    sizes_unknown: ClassVar[set[str]] = set()
    failing: ClassVar[dict[str, Exception]] = {}
    """Errors of operations by name."""
    calls: ClassVar[list[str]] = []

    @classmethod
    def reset(cls) -> None:
        """Forget everything."""
        cls.objects, cls.markers, cls.sizes_unknown = {}, set(), set()
        cls.failing, cls.calls = {}, []

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.removeprefix("flat://").strip("/")

    def _begin(self, operation: str) -> None:
        type(self).calls.append(operation)
        if operation in self.failing:
            raise self.failing[operation]

    def ls(self, path, detail=True, **kwargs):
        self._begin("ls")
        if path in self.objects:
            return [self._described(path)] if detail else [path]
        found = {}
        for name in (*self.objects, *self.markers):
            if name.startswith(f"{path}/"):
                below, _, rest = name.removeprefix(f"{path}/").partition("/")
                child = f"{path}/{below}" if below else f"{path}/"  # a marker of the folder itself
                is_object = child in self.objects and not rest
                found[child] = self._described(child) if is_object else {"name": child, "size": 0, "type": "directory"}
        if not found:
            raise FileNotFoundError(path)
        return list(found.values()) if detail else list(found)

    def info(self, path, **kwargs):
        self._begin("info")
        if path in self.objects:
            return self._described(path)
        if any(name.startswith(f"{path}/") for name in self.objects):
            return {"name": path, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    def cat_file(self, path, start=None, end=None, **kwargs):
        self._begin("cat_file")
        if path not in self.objects:
            raise FileNotFoundError(path)
        return self.objects[path][start:end]

    def put_file(self, lpath, rpath, **kwargs):
        self._begin("put_file")
        self.objects[rpath] = Path(lpath).read_bytes()

    def pipe_file(self, path, value, **kwargs):
        self._begin("pipe_file")
        self.objects[path] = bytes(value)

    def cp_file(self, path1, path2, **kwargs):
        self._begin("cp_file")
        if path1 not in self.objects:
            raise FileNotFoundError(path1)
        self.objects[path2] = self.objects[path1]

    def rm_file(self, path):
        self._begin("rm_file")
        self.objects.pop(path, None)  # like S3, without an error for a missing object

    def makedirs(self, path, exist_ok=False):
        raise AssertionError("an object store makes no folders")

    def _described(self, name):
        size = None if name in self.sizes_unknown else len(self.objects[name])
        return {"name": name, "size": size, "type": "file"}


fsspec.register_implementation("flat", FlatStore, clobber=True)
