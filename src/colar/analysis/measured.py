"""The JSON form that all measurements share."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Measured:
    """A measurement. What could not be measured is None, in JSON null, and never 0."""

    def to_json(self) -> dict[str, Any]:
        """The fields by name, those of dataclasses inside it too."""
        return asdict(self)
