"""Fields: typed access to the fields of a config.json, with errors that name the file, the field and the value. It knows no field by its name."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from twinfer.errors import ConfigError


class Fields:
    """The fields of one JSON object.

    data      the object
    source    the file, for errors
    defaults  what an absent field stands for, where the file may leave it out
    prefix    where the object lies in the file ("" or "text_config."), for errors
    """

    def __init__(self, data: Mapping[str, Any], source: str, defaults: Mapping[str, Any], prefix: str = "") -> None:
        self.data, self.source, self.defaults, self.prefix = data, source, defaults, prefix

    def get(self, field: str) -> Any:
        """The field's value, or its default; None where neither is there."""
        return self.data.get(field, self.defaults.get(field))

    def refuse(self, field: str, value: object, why: str) -> NoReturn:
        """Raises the ConfigError "field = value why"."""
        raise ConfigError(f"{self.source}: {self.prefix}{field} = {value!r} {why}")

    def count(self, field: str, null: int | None = None, least: int = 1) -> int:
        """An integer of at least `least`; `null` where the field is null (an error if None)."""
        value = self.get(field)
        if value is None and null is not None:
            return null
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            self.refuse(field, value, f"must be an integer of at least {least}")
        return value

    def number(self, field: str) -> float:
        """A positive, finite number."""
        return self.positive(field, self.get(field))

    def positive(self, field: str, value: object) -> float:
        """`value`, which stands under the name `field`, as a positive, finite number."""
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
            self.refuse(field, value, "must be a positive number")
        return float(value)

    def flag(self, field: str) -> bool:
        """True or false."""
        value = self.get(field)
        if not isinstance(value, bool):
            self.refuse(field, value, "must be true or false")
        return value

    def only(self, field: str, *supported: object) -> None:
        """Refuses a field that is present, not null, and none of the values that are supported."""
        value = self.data.get(field)
        if value is not None and not any(value == one and type(value) is type(one) for one in supported):
            self.refuse(field, value, f"is not supported; supported: {', '.join(map(_json, supported))}")

    def each(self, field: str, values: object, count: int, supported: Sequence[str]) -> list[str]:
        """`values` as a list of `count` layers, each of them one of `supported`."""
        if not isinstance(values, list) or len(values) != count:
            raise ConfigError(f"{self.source}: {self.prefix}{field} must list {count} layers")
        for i, value in enumerate(values):
            if value not in supported:
                self.refuse(f"{field}[{i}]", value, f"is not supported; supported: {', '.join(supported)}")
        return values


def _json(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
