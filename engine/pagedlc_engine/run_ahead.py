"""How many steps are launched before the oldest one's tokens are looked at."""

from __future__ import annotations

__all__ = ["RunAhead"]

#: Coming late a second time within so many steps is no accident.
_NEAR_STEPS = 16
_SHRINK_STEPS = 64


class RunAhead:
    """Lets launches run further ahead of results where the device would run dry.

    A thread that competes with others for the interpreter may get it too late to launch the next step. Then twice as
    many are launched in advance, up to ``most``; while it comes in time they become fewer again, because a step that
    is launched early knows neither new requests nor the ends of old ones.

    Args:
        usual: Steps ahead at first, and at least.
        most: At most; the same for a device that is not told in advance.
    """

    def __init__(self, usual: int, most: int) -> None:
        self.usual = usual
        self.steps = usual
        self._most = most
        self._since_late = _NEAR_STEPS + 1

    @property
    def adapts(self) -> bool:
        """Whether :meth:`note` makes a difference."""
        return self._most > self.usual

    def note(self, late: bool) -> None:
        """Before a launch: whether the device has already done all that was launched."""
        if late:
            if self._since_late <= _NEAR_STEPS:
                self.steps = min(2 * self.steps + 1, self._most)
            self._since_late = 0
            return
        self._since_late += 1
        if self._since_late % _SHRINK_STEPS == 0:
            self.steps = max(self.steps - 1, self.usual)
