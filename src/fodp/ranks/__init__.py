"""Several processes, one model: who owns which record, one sum of all parts, one release for everybody."""

from fodp.processes import ALONE, Processes, Turn
from fodp.ranks.group import Disagreement, Group, RankLost, here, refuse_group, refuse_other_group

__all__ = [
    "ALONE",
    "Disagreement",
    "Group",
    "Processes",
    "RankLost",
    "Turn",
    "here",
    "refuse_group",
    "refuse_other_group",
]
