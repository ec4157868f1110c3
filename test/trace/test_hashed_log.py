"""Hashed logs: what is kept (who shares which prefix), and what is not (the text)."""

from __future__ import annotations

import io
import json
import os
import stat
from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st

from canopy_lab.sim.stack import lru_curve
from canopy_lab.trace.hashed import salt_of, write
from canopy_lab.trace.open import open_trace
from canopy_lab.trace.prompts import coarser
from sglang_canopy.errors import CanopyError
from support.tiny_traces import TWO_TALKS, ask

SALT = bytes(range(32))


def hashed(requests, salt=SALT, block_tokens=10):
    out = io.StringIO()
    write(out, requests, salt, block_tokens=block_tokens, method="by hand")
    return out.getvalue()


def reread(text, tmp_path):
    path = tmp_path / "hashed.jsonl"
    path.write_text(text)
    return list(open_trace(path, "hashed"))


def test_a_cache_hits_the_same_at_every_capacity(tmp_path):
    back = reread(hashed(TWO_TALKS), tmp_path)
    before, after = lru_curve(TWO_TALKS), lru_curve(back)
    assert before.token_hits_at.tolist() == after.token_hits_at.tolist()
    assert [(r.time_s, r.input_tokens, r.turn) for r in back] == [
        (r.time_s, r.input_tokens, r.turn) for r in TWO_TALKS
    ]
    talks = {r.conversation: h.conversation for r, h in zip(TWO_TALKS, back)}
    assert len(set(talks.values())) == 3


def test_names_and_categories_of_ones_own_do_not_leave():
    text = hashed([ask(0.0, [1, 2], talk="ann-and-bob", user="ann@example.org", kind="payroll")])
    assert not any(word in text for word in ("ann", "example", "payroll"))
    assert '"category":"chat-tools"' in hashed([ask(0.0, [1], kind="chat-tools")])


def test_nothing_can_be_tested_without_the_salt():
    """Not even a later block, whose predecessor's id stands in the file."""
    row = json.loads(hashed([ask(0.0, [1, 2])]).splitlines()[1])
    other = json.loads(hashed([ask(0.0, [1, 2])], salt=b"another salt of 24 bytes").splitlines()[1])
    assert not set(row["blocks"]) & set(other["blocks"])
    plain = [blake2b((i).to_bytes(8, "little"), digest_size=8).digest() for i in (1, 2)]
    chained = blake2b(plain[1], digest_size=8, key=plain[0]).digest()
    unkeyed = {int.from_bytes(d, "little") >> 11 for d in (*plain, chained)}
    assert not set(row["blocks"]) & unkeyed


def test_a_salt_file_is_made_once_for_its_owner_alone(tmp_path):
    path = tmp_path / "salt"
    salt = salt_of(path)
    assert len(salt) == 32
    assert salt_of(path) == salt
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert salt_of(None) != salt_of(None)
    path.write_text("not hex")
    with pytest.raises(CanopyError, match="hexadecimal"):
        salt_of(path)
    with pytest.raises(CanopyError, match="16 bytes"):
        hashed(TWO_TALKS, salt=b"short")


@given(st.lists(st.integers(0, 9), max_size=40), st.sampled_from([(2, 2), (2, 4), (4, 2)]))
def test_merging_twice_is_merging_once_by_the_product(path, factors):
    blocks = tuple(range(len(path)))
    first, second = factors
    assert coarser(coarser(blocks, first), second) == coarser(blocks, first * second)


def test_a_file_without_its_header_or_of_another_version_is_refused(tmp_path):
    lines = hashed(TWO_TALKS).splitlines()
    with pytest.raises(CanopyError, match="header"):
        reread("\n".join(lines[1:]), tmp_path)
    with pytest.raises(CanopyError, match="version 9"):
        reread(lines[0].replace(": 1,", ": 9,") + "\n" + lines[1], tmp_path)
