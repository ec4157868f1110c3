"""Confidence interval of a gain: a bootstrap over whole clusters of requests."""

from __future__ import annotations

import numpy as np

from canopy_lab.advise.sample import LogSample

RESAMPLES = 1000
WINDOWS = 50
MIN_CLUSTERS = 30
MIN_WINDOWS = 10


def clusters(sample: LogSample) -> tuple[np.ndarray, str]:
    """Return the cluster of each request, from 0 on, and the kind of clusters.

    Clusters are conversations with their sub-agents. If there are few, they are windows of time; if
    most requests are in a few windows, runs of requests.
    """
    names: dict[str, int] = {}
    conversations = [
        -1
        if r.conversation is None
        else names.setdefault(r.conversation.split("/", 1)[0], len(names))
        for r in sample.requests
    ]
    numbers = np.array(conversations, np.int64)
    if len(names) >= MIN_CLUSTERS and numbers.min() >= 0:
        return numbers, "conversations"
    times = np.array([r.time_s for r in sample.requests])
    width = max(float(times[-1] - times[0]) / WINDOWS, 1e-9)
    window = np.minimum(((times - times[0]) / width).astype(np.int64), WINDOWS - 1)
    used, window = np.unique(window, return_inverse=True)
    if len(used) >= MIN_WINDOWS:
        return window, "windows of time"
    count = len(numbers)
    return np.arange(count) * min(WINDOWS, count) // count, "runs of requests"


def bootstrap(
    won: np.ndarray, tokens: np.ndarray, cluster: np.ndarray, rng: np.random.Generator
) -> tuple[float, float, float]:
    """Return the gain in points of the prompt tokens and its 95 % interval: (points, low, high).

    ``won``, ``tokens`` and ``cluster`` have one entry per request. ``RESAMPLES`` times, clusters are
    drawn with replacement, each with all its requests.
    """
    count = int(cluster.max()) + 1
    gained = np.bincount(cluster, won, count)
    prompt_tokens = np.bincount(cluster, tokens, count)
    point = 100.0 * float(gained.sum()) / max(float(prompt_tokens.sum()), 1.0)
    draws = np.empty(RESAMPLES)
    for i in range(RESAMPLES):
        weight = np.bincount(rng.integers(0, count, count), minlength=count)
        draws[i] = 100.0 * float(weight @ gained) / max(float(weight @ prompt_tokens), 1.0)
    low, high = np.quantile(draws, (0.025, 0.975))
    return float(point), float(low), float(high)
