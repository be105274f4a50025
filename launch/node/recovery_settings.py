"""How a node's ranks are watched and recovered, as the front side asks its zygote through the environment."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from launch.environment import RECOVERY


class RecoverySettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a run's ranks are watched and recovered.

    Args:
        tp: Ranks of a stage.
        world_size: All ranks; all of them are this zygote's.
        max_recoveries: How many faults are survived in ``window_s``; with 0 the first ends the run.
        window_s: See there.
        stall_timeout_s: How old the last sign of life of a rank that decodes may be.
        start_timeout_s: How old that of a rank that comes up may be.
    """

    tp: int
    world_size: int
    max_recoveries: int
    window_s: float
    stall_timeout_s: float
    start_timeout_s: float

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> RecoverySettings | None:
        """Returns what a rank's environment says; None when nobody asks for it, or ranks run on other nodes too."""
        text = environ.get(RECOVERY)
        if text is None:
            return None
        settings = msgspec.json.decode(text, type=cls)
        is_alone = environ.get("WORLD_SIZE") == environ.get("LOCAL_WORLD_SIZE") == str(settings.world_size)
        return settings if is_alone else None

    def variable(self) -> dict[str, str]:
        """Returns the environment variable that ``read`` reads."""
        return {RECOVERY: msgspec.json.encode(self).decode()}
