from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core import config
from services.core.errors import InvalidArgument
from services.core.rules import Rule
from services.core.settings import MeshConfig, TenantSettings, WorkerSettings

RULES = dict(config.settings())
DEFAULTS = config.defaults()


def refused(document: dict[str, object]) -> dict[str, str]:
    with pytest.raises(InvalidArgument) as caught:
        config.parse(document)
    assert caught.value.reason == "INVALID_CONFIG"
    return {violation.field: violation.description for violation in caught.value.violations}


def test_an_empty_document_is_all_defaults() -> None:
    assert config.parse({}) == MeshConfig()


@pytest.mark.parametrize(("key", "rule"), RULES.items(), ids=RULES)
def test_every_default_keeps_its_own_rule(key: str, rule: Rule) -> None:
    parsed = config.parse(config.nest({key: DEFAULTS[key]}))

    assert config.flatten(parsed).items() <= DEFAULTS.items()
    assert rule.doc.endswith(".")


NUMBERS = [(key, rule) for key, rule in RULES.items() if rule.low is not None]


@pytest.mark.parametrize(("key", "rule"), NUMBERS, ids=[key for key, _ in NUMBERS])
def test_every_bound_is_inclusive_and_kept(key: str, rule: Rule) -> None:
    assert rule.low is not None
    assert rule.high is not None
    kind = type(DEFAULTS[key])
    low, high = kind(rule.low), kind(rule.high)

    assert config.flatten(config.parse(config.nest({key: low})))[key] == low
    assert config.flatten(config.parse(config.nest({key: high})))[key] == high
    assert "must be in [" in refused(config.nest({key: low - 1}))[key]
    assert "must be in [" in refused(config.nest({key: high + 1}))[key]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_none_is_refused(value: float) -> None:
    found = refused({"router": {"batch_ageing_s": value}})

    assert "must be in [0, 3600]" in found["router.batch_ageing_s"]


@pytest.mark.parametrize(
    ("document", "field", "description"),
    [
        ({"rooter": {}}, "rooter", "is no setting; did you mean router?"),
        (
            {"router": {"max_queu": 1}},
            "router.max_queu",
            "is no setting; did you mean router.max_queue?",
        ),
        (
            {"xyz": 1},
            "xyz",
            "is no setting; known here: mesh, control, tokenizer, router, worker, kvstore,"
            " gateway, telemetry, observer, tenants, debug",
        ),
        (
            {"mesh": {"xyz": 1}},
            "mesh.xyz",
            "is no setting; known here: mesh.model, mesh.block_tokens,"
            " mesh.max_channels_per_peer, mesh.streams_per_channel, mesh.unix_sockets",
        ),
        ({"router": 5}, "router", "must be a table of settings"),
        ({"router": {"max_queue": True}}, "router.max_queue", "must be a whole number; got True"),
        ({"router": {"max_queue": 1.0}}, "router.max_queue", "must be a whole number; got 1.0"),
        ({"mesh": {"model": 5}}, "mesh.model", "must be a string; got 5"),
        ({"tokenizer": {"nfc": 1}}, "tokenizer.nfc", "must be true or false; got 1"),
        (
            {"worker": {"engine": "vllm"}},
            "worker.engine",
            "must be one of llamacpp, simulated, tensorrt_llm; got 'vllm'",
        ),
        (
            {"worker": {"simulated": {"num_blocks": 0}}},
            "worker.simulated.num_blocks",
            "must be in [1, 10000000]; got 0",
        ),
    ],
    ids=str,
)
def test_what_is_wrong_is_said_with_its_fix(
    document: dict[str, object], field: str, description: str
) -> None:
    assert refused(document) == {field: description}


def test_everything_wrong_is_named_at_once() -> None:
    found = refused({"router": {"max_queue": -1, "nope": 1}, "mesh": {"model": 1}, "x": 2})

    assert sorted(found) == ["mesh.model", "router.max_queue", "router.nope", "x"]


@pytest.mark.parametrize("endpoint", ["", "http://h:1", "https://a.b-c:4317", "http://[::1]:4317"])
def test_an_endpoint_is_a_url_with_a_port_or_nothing(endpoint: str) -> None:
    document = {"telemetry": {"otlp_endpoint": endpoint}}

    assert config.parse(document).telemetry.otlp_endpoint == endpoint


@pytest.mark.parametrize(
    "endpoint",
    ["foo", "host:4317", "http://host", "ftp://h:1", "http://h:1/x", "http://h:1\n", " "],
)
def test_any_other_endpoint_is_refused(endpoint: str) -> None:
    found = refused({"telemetry": {"otlp_endpoint": endpoint}})

    assert found == {
        "telemetry.otlp_endpoint": "must be empty, http://host:port or https://host:port"
    }


def test_a_step_has_room_for_a_token_of_every_request() -> None:
    found = refused({"worker": {"num_slots": 17, "max_batch_tokens": 16}})

    assert found == {
        "worker.max_batch_tokens": "must be at least worker.num_slots, 17; got 16",
    }
    assert config.parse({"worker": {"num_slots": 16, "max_batch_tokens": 16}})
    assert "worker.num_slots" in refused({"worker": {"num_slots": 0, "max_batch_tokens": 16}})


def test_a_change_keeps_the_rules_of_several_settings() -> None:
    worker = WorkerSettings(num_slots=17, max_batch_tokens=16)

    with pytest.raises(InvalidArgument, match=r"at least worker\.num_slots"):
        config.change(MeshConfig(worker=worker), {"router.max_queue": 7})


def nested(depth: int) -> list[object]:
    value: list[object] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("value", ["x" * 10_000_000, nested(100_000)], ids=["long", "deep"])
def test_a_value_of_any_size_is_refused_in_a_few_words(value: object) -> None:
    (description,) = refused({"router": {"max_queue": value}}).values()

    assert description.startswith("must be a whole number; got ")
    assert len(description) < 200


def test_a_very_long_key_is_compared_with_nothing() -> None:
    key = "a." * 50_000

    assert refused({"router": {key: 1}}) == {f"router.{key}": "is no setting"}


def test_a_whole_number_will_do_for_a_fraction() -> None:
    value = config.parse({"router": {"batch_ageing_s": 3}}).router.batch_ageing_s

    assert value == 3.0
    assert type(value) is float


def test_a_change_leaves_the_rest_and_the_old_configuration_alone() -> None:
    old = config.parse({"router": {"max_queue": 7}})
    new = config.change(old, {"router.prefix_length": 64})

    assert (new.router.max_queue, new.router.prefix_length) == (7, 64)
    assert old.router.prefix_length == MeshConfig().router.prefix_length


def test_a_change_of_something_unknown_lists_only_its_own_section() -> None:
    with pytest.raises(InvalidArgument) as caught:
        config.change(MeshConfig(), {"telemetry.zzz": 1, "no.such.thing": 1, "worker.qqqqqqqq": 1})

    telemetry, top, worker = (each.description for each in caught.value.violations)
    assert telemetry == (
        "is no setting; known here: telemetry.otlp_endpoint, telemetry.sample_ratio,"
        " telemetry.log_level"
    )
    assert top.endswith(
        "known here: mesh, control, tokenizer, router, worker, kvstore, gateway, telemetry,"
        " observer, tenants, debug"
    )
    assert worker.endswith("worker.simulated, worker.tensorrt_llm")


@pytest.mark.parametrize("section", ["telemetry", "worker.simulated"])
def test_a_change_of_a_section_names_its_settings(section: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        config.change(MeshConfig(), {section: {}})

    keys = ", ".join(key for key in RULES if key.startswith(f"{section}."))
    assert caught.value.violations == (
        (section, f"is no setting but a section; known in it: {keys}"),
    )


def test_bad_values_and_unknown_keys_of_a_change_are_named_together() -> None:
    with pytest.raises(InvalidArgument) as caught:
        config.change(MeshConfig(), {"no.such": 1, "mesh.model": "x", "router.max_queue": -1})

    fields = [violation.field for violation in caught.value.violations]
    assert fields == ["no.such", "mesh.model", "router.max_queue"]


def test_a_setting_read_at_start_cannot_change_while_running() -> None:
    with pytest.raises(InvalidArgument, match="read at start"):
        config.change(MeshConfig(), {"worker.engine": "simulated"})

    assert config.change(MeshConfig(), {"worker.engine": "llamacpp"}) == MeshConfig()


def test_json_is_canonical_and_gives_the_same_back() -> None:
    one = config.change(MeshConfig(), {"router.max_queue": 7, "tokenizer.nfc": True})
    other = config.change(MeshConfig(), {"tokenizer.nfc": True, "router.max_queue": 7})

    assert config.to_json(one) == config.to_json(other)
    assert config.from_json(config.to_json(one)) == one


def test_json_is_canonical_in_whatever_order_tenants_came() -> None:
    tenants = {"b": {"salt": "s"}, "a": {"weight": 2}}
    one, other = (
        config.parse({"tenants": dict(each)}) for each in (tenants.items(), sorted(tenants.items()))
    )

    assert config.to_json(one) == config.to_json(other)
    assert config.from_json(config.to_json(one)) == one


@given(key=st.text(max_size=20), value=st.none() | st.booleans() | st.integers() | st.text())
def test_whatever_is_no_setting_is_refused_by_its_name(key: str, value: object) -> None:
    if key in RULES:
        return
    with pytest.raises(InvalidArgument, match="is no setting") as caught:
        config.change(MeshConfig(), {key: value})

    assert caught.value.violations[0].field == key


@given(
    key=st.sampled_from(sorted(RULES)),
    value=st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=9)
    | st.lists(st.integers(), max_size=2)
    | st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)
def test_any_value_is_taken_or_refused_with_a_reason(key: str, value: object) -> None:
    try:
        changed = config.parse(config.nest({key: value}))
    except InvalidArgument as error:
        named = [violation.field for violation in error.violations]
    else:
        named = [key]
        assert config.from_json(config.to_json(changed)) == changed

    assert named == [key]


def test_passwords_are_hidden_from_whoever_asks() -> None:
    url, shown = "redis://bob:s3cret@host:6379/0", "redis://bob:***@host:6379/0"
    settings = config.parse({"kvstore": {"redis_url": url}, "control": {"redis_url": url}})

    hidden = config.without_passwords(settings)

    assert hidden.kvstore.redis_url == hidden.control.redis_url == shown
    assert hidden.worker == settings.worker
    assert config.from_json(config.to_json(hidden)) == hidden
    assert config.without_passwords(hidden) == hidden


def test_a_hidden_password_is_none() -> None:
    pasted = {"redis_url": "redis://bob:***@host"}
    found = refused({"kvstore": pasted, "control": pasted})

    assert set(found) == {"kvstore.redis_url", "control.redis_url"}
    assert set(found.values()) == {"has *** where its password was hidden: write the password"}
    assert config.parse({"kvstore": {"redis_url": "redis://bob:%2A%2A%2A@host"}})


@pytest.mark.parametrize(
    "document",
    [
        {"kvstore": {"redis_url": "bob:s3cret@host"}},
        {"kvstore": {"redis_url": " redis://bob:s3cret@host"}},
        {"kvstore": {"redis_url": "redis://host?password=s3cret"}},
        {"kvstore": {"redis_url": ["redis://bob:s3cret@host"]}},
        {"kvstore": {"redis_url": {"password": "s3cret"}}},
        {"control": {"redis_url": "redis://:s3/cret@host"}},
        {"control": "redis://bob:s3cret@host"},
        {"control": [{"redis_url": "redis://bob:s3cret@host"}]},
        {"telemetry": {"otlp_endpoint": "http://bob:s3cret@host:4317"}},
    ],
    ids=str,
)
def test_a_refusal_shows_no_password(document: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        config.parse(document)

    assert "cret" not in str(caught.value)


ACME = {"tenants": {"acme": {"max_concurrent": 3}}}


def test_a_section_with_a_name_goes_the_way_of_every_setting() -> None:
    acme = config.parse(ACME)

    assert acme.tenants == {"acme": TenantSettings(max_concurrent=3)}
    assert config.from_json(config.to_json(acme)) == acme
    assert config.parse(config.nest(config.flatten(acme))) == acme


def test_a_change_makes_changes_and_removes_sections_with_names() -> None:
    made = config.change(MeshConfig(), {"tenants.acme.max_concurrent": 3})
    changed = config.change(made, {"tenants.acme.max_class": "batch", "tenants.bee.salt": "x"})

    assert made == config.parse(ACME)
    assert changed.tenants["acme"] == TenantSettings(max_concurrent=3, max_class="batch")
    assert list(config.change(changed, {"tenants.acme": None}).tenants) == ["bee"]


@pytest.mark.parametrize(
    ("document", "field", "description"),
    [
        ({"a b": {}}, "tenants.a b", "must be named with 1 to 64 letters, digits, - or _"),
        ({"a": 5}, "tenants.a", "must be a table of settings"),
        ({"a": {"salz": ""}}, "tenants.a.salz", "is no setting; did you mean tenants.a.salt?"),
        (
            {"a": {"identities": "x"}, "b": {"identities": "y x"}},
            "tenants.b.identities",
            "must not be another tenant's; a has it",
        ),
    ],
    ids=str,
)
def test_what_is_wrong_with_a_section_with_a_name_is_said(
    document: dict[str, object], field: str, description: str
) -> None:
    assert refused({"tenants": document}) == {field: description}


def test_an_unknown_setting_of_a_named_section_is_refused_by_its_name() -> None:
    with pytest.raises(InvalidArgument, match=r"did you mean tenants\.acme\.salt\?"):
        config.change(config.parse(ACME), {"tenants.acme.salz": "x"})
    with pytest.raises(InvalidArgument, match="is no setting"):
        config.change(MeshConfig(), {"tenants.acme": None})
