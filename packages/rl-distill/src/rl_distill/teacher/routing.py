"""Routing of prompts to teachers."""

from collections import Counter
from collections.abc import Iterable, Iterator

from rl_core.data import Prompt
from rl_core.errors import DataError, SettingsError
from rl_core.registry import nearest_name
from rl_distill.teacher.options import DistillationOptions

DATA_SOURCE = "data_source"


class TeacherRouter:
    """Selects the teacher of a prompt by its data source or another column.

    Values that are not strings are converted with `str`: 3 in the column `level` becomes "3".
    """

    def __init__(self, options: DistillationOptions) -> None:
        """Read the routes.

        Raises:
            SettingsError: Two teachers have the same value, or a teacher has none.
        """
        if found := list(route_problems(options)):
            raise SettingsError("\n".join(found))
        self._options = options
        self._teachers = {source: name for name, teacher in options.teachers.items() for source in teacher.data_sources}

    def value_of(self, prompt: Prompt) -> str:
        """Return the value by which a prompt is routed.

        Raises:
            DataError: The column is missing or empty.
        """
        route_by = self._options.route_by
        if route_by == DATA_SOURCE:
            return prompt.data_source
        value = prompt.columns.get(route_by)
        if value is None or isinstance(value, list | dict):
            there = ", ".join(map(repr, sorted(prompt.columns))) or "none"
            found = f"it has {value!r} there" if route_by in prompt.columns else f"its columns: {there}"
            raise DataError(
                f"distillation.route_by = {route_by!r} must be a column with one value in every prompt; prompt "
                f"{prompt.uid!r} has none: {found}. Add it to the problems, or route by another column."
            )
        return str(value)

    def teacher_of(self, prompt: Prompt) -> str:
        """Return the name of the teacher that scores a prompt's trajectories.

        Raises:
            DataError: No teacher has the prompt's value.
        """
        value = self.value_of(prompt)
        name = self._teachers.get(value, self._options.fallback)
        if name is None:
            raise DataError(
                f"no teacher scores prompt {prompt.uid!r}, whose {self._options.route_by} is {value!r}; "
                f"{self._describe()}. Add {value!r} to the data_sources of a teacher, or set "
                "distillation.default_teacher."
            )
        return name

    def problems(self, prompts: Iterable[Prompt]) -> Iterator[str]:
        """Yield the problems of the routes for these training prompts, each once with all of its values.

        A teacher or a value without prompts is a problem: with a default teacher, a misspelt value would silently send
        prompts to the wrong teacher.
        """
        counts: Counter[str] = Counter()
        try:
            for prompt in prompts:
                counts[self.value_of(prompt)] += 1
        except DataError as error:
            yield str(error)
            return
        route_by, default = self._options.route_by, self._options.fallback
        unknown = [value for value in counts if value not in self._teachers]
        if unknown and default is None:
            yield (
                f"no teacher scores prompts whose {route_by} is {_listed(unknown)}; {self._describe()}. Add these "
                "values to the data_sources of a teacher, or set distillation.default_teacher."
            )
        for source, name in self._teachers.items():
            if source not in counts:
                yield (
                    f"distillation.teachers.{name}.data_sources has {source!r}, but no prompt has it as its "
                    f"{route_by}; found {_listed(counts)}.{nearest_name(source, counts)}"
                )
        if default is not None and not unknown and default not in self._teachers.values():
            yield (
                f"distillation.default_teacher = {default!r} would score nothing, since the other teachers score "
                f"every {route_by} of the prompts, {_listed(counts)}. Omit it."
            )

    def _describe(self) -> str:
        return "; ".join(
            f"{name!r} scores {_listed(teacher.data_sources)}" for name, teacher in self._options.teachers.items()
        )


def route_problems(options: DistillationOptions) -> Iterator[str]:
    """Yield the problems of the routes: a value with two teachers, a teacher without values, an unknown default."""
    owners: dict[str, str] = {}
    for name, teacher in options.teachers.items():
        for source in teacher.data_sources:
            owner = owners.setdefault(source, name)
            if owner != name:
                yield (
                    f"distillation.teachers.{owner} and distillation.teachers.{name} both score {source!r}. Keep it "
                    "in the data_sources of one."
                )
        doubled = sorted(source for source, count in Counter(teacher.data_sources).items() if count > 1)
        if doubled:
            yield f"distillation.teachers.{name}.data_sources has {_listed(doubled)} twice."
        if not teacher.data_sources and name != options.fallback:
            yield (
                f"distillation.teachers.{name} scores nothing: set its data_sources, or distillation.default_teacher "
                f"= {name!r}."
            )
    if options.default_teacher is not None and options.default_teacher not in options.teachers:
        yield (
            f"distillation.default_teacher = {options.default_teacher!r} is not a teacher; teachers: "
            f"{_listed(options.teachers)}.{nearest_name(options.default_teacher, options.teachers)}"
        )


def _listed(values: Iterable[str]) -> str:
    return ", ".join(map(repr, values)) or "nothing"
