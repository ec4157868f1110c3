"""Figure 2 and equations 2 to 7: energy of K and V by frequency, and the tokens that the scores choose."""

from __future__ import annotations

from typing import Any

import torch
from cachetune import pictures
from cachetune.arms import RATIO
from cachetune.measure import case_of, load_model
from cachetune.questions import read_questions
from comparators.offline import HighFrequency

from canopy_documents.fuse.cache import dense_cache
from canopy_documents.fuse.encode import Encoder, capture
from canopy_documents.fuse.rows import prefill
from canopy_documents.fuse.selectors.base import top_positions
from canopy_documents.fuse.selectors.frequency import FrequencySelector, layer_scores
from canopy_documents.store.chunk import Chunk
from question import Question, QuestionRun

QUESTION_COUNT = 3
BANDS = 20
"""Bands of equal width; the lowest four are the paper's lowest 20 %."""
FIRST_TOKENS = 16
ALPHAS = (0.3, 0.4, 0.5, 0.6, 0.7)


def measure(run: QuestionRun) -> dict[str, Any]:
    """Measure energy by band on two data sets, and the stability and positions of the chosen tokens."""
    model, _ = load_model()
    spectra, overlaps = {}, []  # type: ignore[var-annotated]
    for data in ("musique", "hotpotqa"):
        bands = []
        for example in read_questions(run.data_folder, data, QUESTION_COUNT):
            case = case_of(example)
            cache = dense_cache(model, len(case.token_ids))
            prefill(model, torch.tensor(case.token_ids), cache)
            bands.append(_band_shares(capture(model, cache, case.token_ids, 0)))
            encoder = Encoder(model)
            overlaps += [_selection_overlap(encoder.encode(d)) for d in case.documents[:3]]
        spectra[data] = torch.stack(bands).mean(0)
    curves = {data: shares.tolist() for data, shares in spectra.items()}
    pictures.draw_spectrum(run.figure_path(), curves)
    return {
        "questions": QUESTION_COUNT,
        "energy": {data: _shares(shares) for data, shares in spectra.items()},
        "chunks": len(overlaps),
        "chosen": {
            key: round(sum(o[key] for o in overlaps) / len(overlaps), 4) for key in overlaps[0]
        },
    }


def _band_shares(chunk: Chunk) -> torch.Tensor:
    """``[4, BANDS]`` energy shares: of K and V (keys before RoPE), then both without the mean.

    Energy is the squared magnitude of the one-sided spectrum along the tokens, over layers, heads
    and channels; the bins but the first count twice, since they stand for two.
    """
    shares = []
    for tensor in (chunk.raw_k, chunk.v):
        power = torch.fft.rfft(tensor.flatten(2), dim=1).abs().square().sum(dim=(0, 2))
        power[1:] *= 2
        for skipped in (0, 1):
            energies = power.clone()
            energies[:skipped] = 0
            band = torch.arange(len(energies)) * BANDS // len(energies)
            shares.append(torch.zeros(BANDS).index_add(0, band, energies) / energies.sum())
    return torch.stack([shares[0], shares[2], shares[1], shares[3]])


def _shares(shares: torch.Tensor) -> dict[str, Any]:
    names = ("K", "V", "K without its mean", "V without its mean")
    lowest_bands = BANDS // 5
    return {
        name: {
            "lowest_20": round(float(row[:lowest_bands].sum()), 4),
            "falls_with_every_band": bool((row[1:] <= row[:-1]).all()),
            "bands": [round(float(x), 4) for x in row],
        }
        for name, row in zip(names, shares)
    }


def _selection_overlap(chunk: Chunk) -> dict[str, float]:
    """Return, of the tokens chosen at r = 0.15, the share equal between variants of the score, and the
    share among the chunk's first 16."""
    count = int(RATIO * len(chunk))

    def best_tokens(score: torch.Tensor) -> set[int]:
        return set(top_positions(score, count).tolist())

    def chosen_at(alpha: float) -> set[int]:
        return best_tokens(layer_scores(chunk, alpha=alpha).mean(dim=0))

    paper_tokens = best_tokens(FrequencySelector().scores(chunk))
    high_tokens = best_tokens(HighFrequency().scores(chunk))
    norms = 0.5 * (chunk.raw_k.flatten(2).norm(dim=2) + chunk.v.flatten(2).norm(dim=2))
    norm_tokens = best_tokens((norms / norms.sum(1, keepdim=True)).mean(0))
    tokens_by_layer = [best_tokens(score) for score in layer_scores(chunk)]
    first_tokens = set(range(FIRST_TOKENS))
    return {
        **{
            f"same as alpha 0.5, alpha {alpha:g}": len(paper_tokens & chosen_at(alpha)) / count
            for alpha in ALPHAS
        },
        "same as alpha 0.5, plain norms": len(paper_tokens & norm_tokens) / count,
        "same as alpha 0.5, high frequencies": len(paper_tokens & high_tokens) / count,
        "same as alpha 0.5, mean over layers of each layer's own": sum(
            len(paper_tokens & layer_tokens) for layer_tokens in tokens_by_layer
        )
        / count
        / len(tokens_by_layer),
        "union of all layers' own, of the chunk": len(set().union(*tokens_by_layer)) / len(chunk),
        "among the first 16, low frequencies": len(paper_tokens & first_tokens) / count,
        "among the first 16, high frequencies": len(high_tokens & first_tokens) / count,
        "among the first 16, by chance": FIRST_TOKENS / len(chunk),
        "first token chosen, low frequencies": float(0 in paper_tokens),
        "first token chosen, high frequencies": float(0 in high_tokens),
    }


QUESTIONS = (
    Question(
        "figure-2",
        "the spectrum of K and V, and which tokens equations 2 to 7 choose",
        measure,
        1.5,
    ),
)
