"""How long a tree all-reduce takes beside a pair, and how long peers wait at a barrier beside pairs
(NoLoCo, 2506.10911). Hops and steps are log-normal."""

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]
TREE_TO_PAIR = {
    0.1: {8: 5.7, 16: 7.6, 64: 11.3, 256: 15.1, 1024: 18.9},
    0.5: {8: 5.0, 16: 6.8, 64: 10.7, 256: 14.8, 1024: 19.1},
    1.0: {8: 5.1, 16: 7.7, 64: 13.7, 256: 21.7, 1024: 31.0},
}
"""By sigma of the log-normal hops, and by peers: how many times as long a tree all-reduce takes as
a pair with one hop."""
BARRIER_TO_PAIRS = {16: 1.078, 64: 1.111, 256: 1.157, 1024: 1.198}
"""Time of a run in which all wait for all by one in which pairs wait for each other."""
DRAWS = 150_000
"""Trees of eight that are drawn; fewer of larger ones."""
ROUNDS, STEPS = 50, 100
MU, VARIANCE = 1.0, 0.5
"""Of the logarithm of an inner step."""
REPEATS = 4


def tree(random: np.random.Generator, sigma: float, peers: int) -> float:
    """Mean time of a reduction along a binomial tree and of the broadcast back: a parent waits for
    its child."""
    count = max(300, DRAWS // peers)
    ready = np.zeros((count, peers))
    while ready.shape[1] > 1:
        stays, sends = ready[:, 0::2], ready[:, 1::2]
        ready = np.maximum(stays, sends + random.lognormal(0.0, sigma, sends.shape))
    while ready.shape[1] < peers:
        arrives = ready + random.lognormal(0.0, sigma, ready.shape)
        ready = np.concatenate([ready, arrives], axis=1)
    return float(ready.max(axis=1).mean())


def pair(random: np.random.Generator, sigma: float, hops: int) -> float:
    """Mean time until both have what the other sent: one hop at once, or there and back."""
    ways = random.lognormal(0.0, sigma, (DRAWS, 2))
    return float((ways.max(axis=1) if hops == 1 else ways.sum(axis=1)).mean())


def barrier(random: np.random.Generator, peers: int) -> float:
    """Time of a run in which all wait for all every `STEPS` steps, by that of a mean peer in pairs
    that are drawn again each time."""
    together, alone = 0.0, np.zeros(peers)
    for _ in range(ROUNDS):
        taken = random.lognormal(MU, VARIANCE**0.5, (peers, STEPS)).sum(axis=1)
        together += float(taken.max())
        met = random.permutation(peers).reshape(-1, 2)
        alone = alone + taken
        alone[met] = alone[met].max(axis=1, keepdims=True)
    return together / float(alone.mean())


def measure() -> dict[str, dict[str, list[float]]]:
    """By table and row: our figure, and that of the paper where there is one."""
    random = np.random.default_rng(0)
    found: dict[str, dict[str, list[float]]] = {"tree": {}, "barrier": {}}
    for sigma, row in TREE_TO_PAIR.items():
        one_hop, two_hops = pair(random, sigma, 1), pair(random, sigma, 2)
        for peers, theirs in row.items():
            took = tree(random, sigma, peers)
            found["tree"][f"{sigma}/{peers}"] = [took / one_hop, took / two_hops, theirs]
    for peers, theirs in BARRIER_TO_PAIRS.items():
        ours = np.mean([barrier(random, peers) for _ in range(REPEATS)])
        found["barrier"][str(peers)] = [float(ours), theirs]
    return found
