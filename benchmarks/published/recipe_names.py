"""The rows of docs/methods.md about other systems, and beside which each is to be read."""

ALL, GROUPS, PAIRS, GOSSIP = "all-reduce", "`streaming-diloco`", "`lowcomm`", "`gossip`"
SLOW_PAIRS = "`lowcomm`, two slow lines"
HALF = "`streaming-diloco`, two of half speed"
FIXED = "two stages, fixed routing"
BACKUP = "backup workers: close on the three fastest"
DROP = "DropCompute: steps above 1.6 s are dropped"
SELSYNC = "SelSync: average where gradients change by 2 %"
SAPS = "SAPS: partners by bandwidth"
A2CID2 = "A2CiD2: a second copy that pulls"
ROUTED = "NoLoCo: two stages, random routing"
PROPORTION = "work in proportion to speed"
DILOCOX = "DiLoCoX: merged an interval later, in 4 bits"

BESIDE = {
    ALL: "",
    BACKUP: ALL,
    GROUPS: "",
    DROP: GROUPS,
    SELSYNC: ALL,
    SLOW_PAIRS: "",
    SAPS: SLOW_PAIRS,
    GOSSIP: "",
    A2CID2: GOSSIP,
    FIXED: "",
    ROUTED: FIXED,
    HALF: "",
    PROPORTION: HALF,
    DILOCOX: GROUPS,
    PAIRS: "",
}
"""In the order in which they are measured; empty: read on its own."""
