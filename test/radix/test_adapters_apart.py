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

LAW, TAX = (uuid5(NAMESPACE_URL, name).hex for name in ("law", "tax"))
TOKENS = list(range(100, 116))
FORGED = (LAW, f"/{LAW}", f"{LAW}/", "a", "a/", f"a{LAW}", f"a/{LAW}", f"a/{LAW}/", "", None)
"""Keys with which a client could try to match an adapter's KV."""


def make_req(
    extra_key: str | None = None, lora_id: str | None = None, salt: str | None = None, **fields
) -> Req:
    """SGLang's own ``Req``, as its scheduler makes it."""
    params = SamplingParams(temperature=0, max_new_tokens=1)
    req = Req("r", "", array("q", TOKENS), params, extra_key=extra_key, lora_id=lora_id, **fields)
    req.cache_salt = salt
    return req


def create_request(tree: LiveTree, adapter: str | None = None, extra_key: str | None = None) -> Req:
    request = make_req(extra_key, {"law": LAW, "tax": TAX, None: None}[adapter])
    scheduler = SimpleNamespace(tree_cache=tree.cache, enable_lora=True)
    received = SimpleNamespace(mm_inputs=None, lora_name=adapter)
    arrivals.register_created(request, scheduler, received)
    return request


KEYS = st.one_of(st.sampled_from(FORGED), st.text(max_size=5), st.just(TAX))


@given(st.lists(st.tuples(KEYS, st.sampled_from((LAW, TAX, None))), min_size=2, max_size=8))
def test_keys_are_equal_for_equal_adapters_and_tenants_alone(pairs) -> None:
    namespaces, tenants = {}, {}
    for key, adapter in pairs:
        request = make_req(key, adapter)
        isolate_adapter_keys(request)
        assert tenant_of_req(request) == tenant_of(key, None)
        owner = namespaces.setdefault(request.extra_key, (key or None, adapter))
        assert owner == (key or None, adapter)
        tenants.setdefault(key or None, set()).add(tenant_of_req(request))
    assert all(len(names) == 1 for names in tenants.values())


def test_sglangs_own_key_can_be_forged() -> None:
    """The reason for this file; if it fails, SGLang has fixed it."""
    assert make_req(LAW).extra_key == make_req(None, LAW).extra_key


def test_three_tiers_separate_adapters_and_forged_keys(tmp_path) -> None:
    tree = DiskTree(tmp_path, tokens=16, host_tokens=64)
    cases = [("law", None), ("tax", None), (None, None), (None, LAW), ("law", TAX)]
    keys = []
    for time, (adapter, extra_key) in enumerate(cases):  # each evicts its predecessor to the host
        request = create_request(tree, adapter, extra_key)
        keys.append(request.extra_key)
        assert tree.match(TOKENS, extra_key=request.extra_key) == 0
        assert tree.fetch(TOKENS, request.extra_key) == 0
        assert tree.load_back(TOKENS, request.extra_key) == 0
        request.canopy.request.time = float(time)
        request.canopy.request.phase = RequestPhase.DONE
        tree.insert(TOKENS, request.canopy.request, extra_key=request.extra_key)
    assert len(set(keys)) == len(cases)
    assert tree.load_back(TOKENS, keys[-2]) == len(TOKENS)  # from the host
    tree.close()
    restarted = DiskTree(tmp_path, tokens=16, host_tokens=64)
    assert restarted.disk_tokens(TOKENS, keys[0]) == len(TOKENS)
    assert restarted.disk_tokens(TOKENS, f"{TAX}{LAW}") == 0
    restarted.close()


def test_policies_separate_adapters() -> None:
    tree = LiveTree(64, "wa", {"block_tokens": 4})
    law, tax, base, forged = (
        create_request(tree, *case).canopy.request.path
        for case in (("law",), ("tax",), (None,), (None, LAW))
    )
    assert len({law[0], tax[0], base[0], forged[0]}) == 4
    assert create_request(tree, "law").canopy.request.path == law


def test_a_server_without_adapters_leaves_keys_as_they_are() -> None:
    tree = LiveTree(64)
    request = make_req("a/")
    scheduler = SimpleNamespace(tree_cache=tree.cache, enable_lora=False)
    arrivals.register_created(request, scheduler, SimpleNamespace(mm_inputs=None, lora_name=None))
    assert request.extra_key == "a/"
    assert tenant_of_req(request) == tenant_of("a/", None)
