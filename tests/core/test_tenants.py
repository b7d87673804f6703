from __future__ import annotations

from services.core.config import parse
from services.core.settings import MeshConfig
from services.core.tenants import Tenants, hash_key, new_key


def test_a_key_is_its_tenants_and_no_one_elses() -> None:
    acme, old, bee = new_key(), new_key(), new_key()
    tenants = Tenants(
        parse(
            {
                "tenants": {
                    "acme": {"key_hashes": f"{hash_key(acme)} {hash_key(old)}"},
                    "bee": {"key_hashes": hash_key(bee), "max_class": "batch"},
                }
            }
        )
    )

    found = [tenants.by_key(key) for key in (acme, old, bee)]

    assert [tenant and tenant.name for tenant in found] == ["acme", "acme", "bee"]
    assert found[2] is not None
    assert found[2].settings.max_class == "batch"
    assert tenants.by_key(new_key()) is None
    assert tenants.by_key("") is None
    assert tenants.required


def test_a_certificate_is_a_tenant_by_any_of_its_names() -> None:
    tenants = Tenants(parse({"tenants": {"acme": {"identities": "spiffe://acme/web acme.test"}}}))

    found = [tenants.by_identity(name) for name in ("spiffe://acme/web", "acme.test")]

    assert [tenant and tenant.name for tenant in found] == ["acme", "acme"]
    assert tenants.by_identity("other.test") is None


def test_the_hash_of_a_key_in_a_certificate_is_no_key() -> None:
    key = new_key()
    tenants = Tenants(parse({"tenants": {"acme": {"key_hashes": hash_key(key)}}}))

    assert tenants.by_identity(hash_key(key)) is None
    assert tenants.by_key(hash_key(key)) is None


def test_the_hash_of_nothing_lets_nobody_in() -> None:
    tenants = Tenants(parse({"tenants": {"acme": {"key_hashes": hash_key("")}}}))

    assert tenants.by_key("") is None


def test_without_tenants_nobody_is_asked() -> None:
    assert not Tenants(MeshConfig()).required


def test_a_mesh_that_requires_credentials_asks_also_without_tenants() -> None:
    tenants = Tenants(parse({"router": {"require_credentials": True}}))

    assert tenants.required
    assert tenants.by_key("") is None
