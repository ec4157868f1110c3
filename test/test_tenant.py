"""A tenant is the pair of extra key and salt, and no two pairs share a name."""

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from sglang_canopy.tenant import (
    MAX_TENANT_CHARS,
    tenant_namespace,
    tenant_of,
    tenant_of_req,
    tenants_of_prompts,
)

keys_or_salts = st.one_of(st.none(), st.text(max_size=6), st.text("a/%\x00#", max_size=6))


def test_names_are_readable() -> None:
    assert tenant_of(None, "team-a") == "team-a"
    assert tenant_of("eu", None) == "eu/"
    assert tenant_of("eu", "team-a") == "eu/team-a"
    assert tenant_of("", "") is tenant_of(None, None) is None


@given(keys_or_salts, keys_or_salts, keys_or_salts, keys_or_salts)
def test_two_pairs_never_share_a_name_or_a_namespace(key, salt, other_key, other_salt):
    is_same = (key or "", salt or "") == (other_key or "", other_salt or "")
    assert (tenant_of(key, salt) == tenant_of(other_key, other_salt)) == is_same
    assert (tenant_namespace(key, salt) == tenant_namespace(other_key, other_salt)) == is_same


def test_a_long_salt_is_named_by_its_digest() -> None:
    name = tenant_of(None, "x" * 10_000)
    assert name is not None
    assert name.startswith("#")
    assert len(name) <= MAX_TENANT_CHARS
    assert name != tenant_of("x" * 10_000, None)


def test_requests_of_several_adapters_belong_to_one_tenant() -> None:
    without_adapter = SimpleNamespace(extra_key="eu", cache_salt="s", lora_id=None)
    with_adapter = SimpleNamespace(extra_key="eu9f3c", cache_salt="s", lora_id="9f3c")
    adapter_alone = SimpleNamespace(extra_key="9f3c", cache_salt=None, lora_id="9f3c")
    assert tenant_of_req(without_adapter) == tenant_of_req(with_adapter) == "eu/s"
    assert tenant_of_req(adapter_alone) is None


def test_a_batch_has_the_tenants_of_its_prompts() -> None:
    assert tenants_of_prompts(None, None) == tenants_of_prompts([""], [""]) == {None}
    assert tenants_of_prompts(None, ["a", ""]) == {"a", None}
    assert tenants_of_prompts("k", ["a", ""]) == {"k/a", "k/"}
    assert tenants_of_prompts(["k", ""], ["", "a"]) == {"k/", "a"}
    assert tenants_of_prompts([], [7]) == {None}
