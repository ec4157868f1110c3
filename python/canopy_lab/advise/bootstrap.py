"""Confidence interval of a gain: a bootstrap over whole clusters of requests."""

from __future__ import annotations

import numpy as np

from canopy_lab.advise.sample import LogSample

RESAMPLES = 1000
WINDOWS = 50
MIN_CLUSTERS = 30
MIN_WINDOWS = 10


def assign_clusters(sample: LogSample) -> tuple[np.ndarray, str]:
    """Return the cluster of each request, from 0 on, and the kind of clusters.

    Clusters are conversations with their sub-agents. If there are few, they are windows of time; if
    most requests are in a few windows, runs of requests.
    """
    cluster_numbers: dict[str, int] = {}
    conversations = [
        -1
        if r.conversation is None
        else cluster_numbers.setdefault(r.conversation.split("/", 1)[0], len(cluster_numbers))
        for r in sample.requests
    ]
    numbers = np.array(conversations, np.int64)
    if len(cluster_numbers) >= MIN_CLUSTERS and numbers.min() >= 0:
        return numbers, "conversations"
    times_s = np.array([r.time_s for r in sample.requests])
    window_s = max(float(times_s[-1] - times_s[0]) / WINDOWS, 1e-9)
    windows = np.minimum(((times_s - times_s[0]) / window_s).astype(np.int64), WINDOWS - 1)
    used_windows, windows = np.unique(windows, return_inverse=True)
    if len(used_windows) >= MIN_WINDOWS:
        return windows, "windows of time"
    count = len(numbers)
    return np.arange(count) * min(WINDOWS, count) // count, "runs of requests"


def bootstrap(
    saved_tokens: np.ndarray, tokens: np.ndarray, clusters: np.ndarray, rng: np.random.Generator
) -> tuple[float, float, float]:
    """Return the gain in points of the prompt tokens and its 95 % interval: (points, low, high).

    ``saved_tokens``, ``tokens``, ``clusters``: one entry per request. ``RESAMPLES`` times, clusters are
    drawn with replacement, each with all its requests.
    """
    count = int(clusters.max()) + 1
    saved = np.bincount(clusters, saved_tokens, count)
    prompt_tokens = np.bincount(clusters, tokens, count)
    gain_points = 100.0 * float(saved.sum()) / max(float(prompt_tokens.sum()), 1.0)
    drawn = np.empty(RESAMPLES)
    for i in range(RESAMPLES):
        weights = np.bincount(rng.integers(0, count, count), minlength=count)
        drawn[i] = 100.0 * float(weights @ saved) / max(float(weights @ prompt_tokens), 1.0)
    low, high = np.quantile(drawn, (0.025, 0.975))
    return float(gain_points), float(low), float(high)
