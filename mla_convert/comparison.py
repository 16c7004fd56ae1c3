"""What comparing stored weights with a model's finds."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The worst place found: ``error`` is relative there, ``bound`` the most that the roundings can explain there.

    ``where`` says which part and which head. ``excess`` is error over bound, 0 where both are 0.
    """

    error: float
    bound: float
    where: str

    @property
    def fits(self) -> bool:
        """Whether rounding explains the difference, which has to be finite."""
        return self.error <= self.bound and math.isfinite(self.error)

    @property
    def excess(self) -> float:
        """Error over bound: how far beyond what rounding explains; infinite where the error is not a number."""
        if self.error == 0:
            return 0.0
        return math.inf if math.isnan(self.error) or not self.bound else self.error / self.bound
