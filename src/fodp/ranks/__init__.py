"""Several processes, one model: who owns which record, one sum of all parts, one release for everybody."""

from fodp.ranks.group import ALONE, Alone, Disagreement, Group, RankLost, Turn, here, refuse_group, refuse_other_group

__all__ = ["ALONE", "Alone", "Disagreement", "Group", "RankLost", "Turn", "here", "refuse_group", "refuse_other_group"]
