"""The table of a sweep: means over seeds, the gap to hindsight, and the placebo's row."""

from canopy_lab.sim.sweep_table import group_by_cell, sweep_notes, sweep_table


def row_of(policy, seed, capacity_blocks, hit_ratio, distinct_blocks=1000, is_placebo=False):
    return {
        "policy": policy,
        "placebo": is_placebo,
        "seed": seed,
        "requests": 7,
        "distinct_blocks": distinct_blocks,
        "block_tokens": 16,
        "capacity_blocks": capacity_blocks,
        "capacity_fraction": capacity_blocks / distinct_blocks,
        "block_hit_ratio": hit_ratio,
        "token_hit_ratio": hit_ratio,
        **{f"uncached_tokens_p{percentile}": 10.0 * percentile for percentile in (50, 90, 95, 99)},
        "tel_threshold_tokens": 900.0,
        "tel_tokens": 50_000.0,
        "slo_violations": 3,
        "kv_bytes_saved": None,
        "prefill_s": 100.0 * (1 - hit_ratio),
        "prefill_profile": "llama",
        "seconds": 0.5,
    }


def test_seeds_of_one_capacity_share_a_row():
    rows = [row_of("lru", 1, 50, 0.1), row_of("lru", 2, 50, 0.3, distinct_blocks=800)]
    assert [len(group) for group in group_by_cell(rows).values()] == [2]
    cells = sweep_table(rows).splitlines()[2].split()
    assert cells[:6] == ["lru", "5.62", "%", "50", "20.00", "±10.00"]
    assert "means over 2 seeds, ± half the range" in sweep_notes(rows)


def test_the_gap_is_a_share_of_the_distance_to_hindsight():
    rows = [row_of("lru", 1, 50, 0.1), row_of("wa", 1, 50, 0.25), row_of("belady", 1, 50, 0.4)]
    gaps = [line.split()[5] for line in sweep_table(rows).splitlines()[2:]]
    assert gaps == ["0", "50", "100"]
    assert any(note.startswith("gap") for note in sweep_notes(rows))


def test_a_placebo_has_a_row_of_its_own():
    rows = [row_of("wa", 1, 50, 0.2), row_of("wa", 1, 50, 0.1, is_placebo=True)]
    assert [label for label, _ in group_by_cell(rows)] == ["wa", "wa (placebo)"]
    assert "gap %" not in sweep_table(rows)
