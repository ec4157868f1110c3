"""Requests with different LoRA adapters never find each other's KV, on any tier."""

from array import array
from types import SimpleNamespace
from uuid import uuid5

from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.lora.lora_registry import NAMESPACE_URL
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_canopy.radix.live_request import RequestPhase
from sglang_canopy.server.scheduler import arrivals
from sglang_canopy.tenant import isolate_adapter_keys, tenant_of, tenant_of_req
from support.disk_tree import DiskTree
from support.live_tree import LiveTree

LAW, TAX = (uuid5(NAMESPACE_URL, name).hex for name in ("law", "tax"))  # ids of SGLang
TOKENS = list(range(100, 116))
FORGED_KEYS = (LAW, f"/{LAW}", f"{LAW}/", "a", "a/", f"a{LAW}", f"a/{LAW}", f"a/{LAW}/", "", None)
"""Keys with which a client could try to match an adapter's KV."""


def make_req(
    extra_key: str | None = None, lora_id: str | None = None, salt: str | None = None, **fields
) -> Req:
    """Return SGLang's own ``Req``, as its scheduler makes it."""
    params = SamplingParams(temperature=0, max_new_tokens=1)
    req = Req("r", "", array("q", TOKENS), params, extra_key=extra_key, lora_id=lora_id, **fields)
    req.cache_salt = salt
    return req


def create_req(tree: LiveTree, adapter: str | None = None, extra_key: str | None = None) -> Req:
    req = make_req(extra_key, {"law": LAW, "tax": TAX, None: None}[adapter])
    scheduler = SimpleNamespace(tree_cache=tree.cache, enable_lora=True)
    arrivals.register_created(req, scheduler, SimpleNamespace(mm_inputs=None, lora_name=adapter))
    return req


CLIENT_KEYS = st.one_of(st.sampled_from(FORGED_KEYS), st.text(max_size=5), st.just(TAX))
KEY_AND_ADAPTER = st.tuples(CLIENT_KEYS, st.sampled_from((LAW, TAX, None)))


@given(st.lists(KEY_AND_ADAPTER, min_size=2, max_size=8))
def test_keys_are_equal_for_equal_adapters_and_tenants_alone(keys_and_adapters) -> None:
    owners, tenants_by_key = {}, {}
    for key, adapter in keys_and_adapters:
        req = make_req(key, adapter)
        isolate_adapter_keys(req)
        assert tenant_of_req(req) == tenant_of(key, None)
        owner = owners.setdefault(req.extra_key, (key or None, adapter))
        assert owner == (key or None, adapter)
        tenants_by_key.setdefault(key or None, set()).add(tenant_of_req(req))
    assert all(len(tenants) == 1 for tenants in tenants_by_key.values())


def test_sglangs_own_key_can_be_forged() -> None:
    """SGLang joins adapter and key without a separator. If this fails, SGLang has fixed it."""
    assert make_req(LAW).extra_key == make_req(None, LAW).extra_key


def test_three_tiers_separate_adapters_and_forged_keys(tmp_path) -> None:
    tree = DiskTree(tmp_path, tokens=16, host_tokens=64)
    cases = [("law", None), ("tax", None), (None, None), (None, LAW), ("law", TAX)]
    keys = []
    for time, (adapter, extra_key) in enumerate(cases):  # each evicts its predecessor to the host
        req = create_req(tree, adapter, extra_key)
        keys.append(req.extra_key)
        assert tree.match(TOKENS, extra_key=req.extra_key) == 0
        assert tree.fetch(TOKENS, req.extra_key) == 0
        assert tree.load_back(TOKENS, req.extra_key) == 0
        req.canopy.request.time = float(time)
        req.canopy.request.phase = RequestPhase.DONE
        tree.insert(TOKENS, req.canopy.request, extra_key=req.extra_key)
    assert len(set(keys)) == len(cases)
    assert tree.load_back(TOKENS, keys[-2]) == len(TOKENS)  # from the host
    tree.close()
    restarted = DiskTree(tmp_path, tokens=16, host_tokens=64)
    assert restarted.disk_tokens(TOKENS, keys[0]) == len(TOKENS)
    assert restarted.disk_tokens(TOKENS, f"{TAX}{LAW}") == 0
    restarted.close()


def test_policies_separate_adapters() -> None:
    tree = LiveTree(64, "wa", {"block_tokens": 4})
    law_path, tax_path, base_path, forged_path = (
        create_req(tree, *case).canopy.request.path
        for case in (("law",), ("tax",), (None,), (None, LAW))
    )
    assert len({law_path[0], tax_path[0], base_path[0], forged_path[0]}) == 4
    assert create_req(tree, "law").canopy.request.path == law_path


def test_a_server_without_adapters_leaves_keys_as_they_are() -> None:
    tree = LiveTree(64)
    req = make_req("a/")
    scheduler = SimpleNamespace(tree_cache=tree.cache, enable_lora=False)
    arrivals.register_created(req, scheduler, SimpleNamespace(mm_inputs=None, lora_name=None))
    assert req.extra_key == "a/"
    assert tenant_of_req(req) == tenant_of("a/", None)
