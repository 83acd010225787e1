"""An object store as simple as S3, whose operations can be made to fail."""

from datetime import UTC, datetime, timedelta
from typing import ClassVar

import fsspec
from fsspec.spec import AbstractFileSystem


class FlatStore(AbstractFileSystem):
    """Objects by name, without folders, renaming or files; listings include the prefix itself."""

    protocol = "flat"
    cachable = False
    objects: ClassVar[dict[str, tuple[bytes, datetime]]] = {}
    markers: ClassVar[set[str]] = set()
    """Empty objects that stand for folders; names end with a slash."""
    sizes_unknown: ClassVar[set[str]] = set()
    failing: ClassVar[dict[str, Exception]] = {}
    """Errors of operations by name."""
    knows_create = True
    calls: ClassVar[list[str]] = []

    @classmethod
    def reset(cls) -> None:
        """Forget everything."""
        cls.objects, cls.markers, cls.sizes_unknown = {}, set(), set()
        cls.failing, cls.knows_create, cls.calls = {}, True, []

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.removeprefix("flat://").strip("/")

    def _begin(self, operation: str) -> None:
        type(self).calls.append(operation)
        if operation in self.failing:
            raise self.failing[operation]

    def find(self, path, maxdepth=None, withdirs=False, detail=False, **kwargs):
        self._begin("find")
        found = {name: self._described(name) for name in self.objects if f"{name}/".startswith(f"{path}/")}
        found |= {
            name: {"name": name, "size": 0, "type": "directory"} for name in self.markers if name.startswith(path)
        }
        return found if detail else list(found)

    def ls(self, path, detail=True, **kwargs):
        raise AssertionError("one flat listing is enough")

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
        return self.objects[path][0][start:end]

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        self._begin("pipe_file")
        if mode == "create":
            if not self.knows_create:
                raise TypeError("unknown argument: mode")
            if path in self.objects:
                raise OSError(22, "At least one of the pre-conditions you specified did not hold")
        self.objects[path] = (bytes(value), datetime.now(UTC))

    def cp_file(self, path1, path2, **kwargs):
        self._begin("cp_file")
        if path1 not in self.objects:
            raise FileNotFoundError(path1)
        self.objects[path2] = (self.objects[path1][0], datetime.now(UTC))

    def rm_file(self, path):
        self._begin("rm_file")
        self.objects.pop(path, None)  # like S3, without an error for a missing object

    def rm(self, path, recursive=False, maxdepth=None):
        self._begin("rm")
        assert recursive
        found = [name for name in self.objects if name.startswith(f"{path}/")]
        if not found:
            raise FileNotFoundError(path)
        for name in found:
            del self.objects[name]

    def makedirs(self, path, exist_ok=False):
        raise AssertionError("an object store makes no folders")

    def modified(self, path):
        return self.objects[path][1]

    def _described(self, name):
        size = None if name in self.sizes_unknown else len(self.objects[name][0])
        return {"name": name, "size": size, "type": "file"}

    def age(self, part: str, seconds: float) -> None:
        """Make objects old."""
        for name, (content, _) in list(self.objects.items()):
            if part in name:
                self.objects[name] = (content, datetime.now(UTC) - timedelta(seconds=seconds))


fsspec.register_implementation("flat", FlatStore, clobber=True)
