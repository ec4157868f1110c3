"""Documents of a chat are found where the template put them, and bounded."""

import json
import re
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from canopy_chunks.server.http import entry
from canopy_chunks.server.options import Options
from canopy_chunks.text import any_order
from canopy_chunks.text.order import Orders
from sglang_canopy.errors import CanopyError


class Characters:
    """One token a character."""

    def encode(self, text, add_special_tokens=True):
        return [ord(c) for c in text]

    def decode(self, ids, **_):
        return "".join(map(chr, ids))


class Message(SimpleNamespace):
    def model_copy(self, update):
        return Message(**{**vars(self), **update})


def part(text):
    return SimpleNamespace(type="text", text=text)


def converted(
    content,
    custom=None,
    options=None,
    template_documents=None,
    shows=False,
    tp_size=1,
    role="user",
    listed=None,
):
    """Return the result for a chat with the template ``<user>CONTENT</user>``, and its manager."""
    request = SimpleNamespace(
        messages=[Message(content=content, role=role)],
        custom_params=custom,
        chat_template_kwargs={"documents": template_documents} if template_documents else None,
    )
    manager = SimpleNamespace(tokenizer=Characters(), server_args=SimpleNamespace(tp_size=tp_size))

    def original(_serving, request, _raw_request):
        text = request.messages[0].content
        if not isinstance(text, str):
            text = "".join(p.text if p.type == "text" else "<image>" for p in text)
        listed = (request.chat_template_kwargs or {}).get("documents") or []
        shown = "".join(d["text"] for d in listed) if shows else ""
        ids = Characters().encode(f"{shown}<user>{text}</user>")
        sampling = {"custom_params": dict(custom) if custom else None}
        return SimpleNamespace(
            text=None, input_ids=ids, sampling_params=sampling, extra_key=None, cache_salt=None
        ), 0

    adapted, _ = entry.convert_chat(
        original,
        SimpleNamespace(tokenizer_manager=manager),
        request,
        options or Options(),
        SimpleNamespace(_json={"documents": listed}),
    )
    return adapted, manager


def convert(*args, **kwargs):
    """The ids and bounds of a converted chat."""
    adapted, _ = converted(*args, **kwargs)
    params = adapted.sampling_params["custom_params"] or {}
    bounds = params.get("canopy_chunks", [])
    bounds = [] if bounds == "off" else bounds
    text = Characters().decode(adapted.input_ids)
    return text, [text[a:b] for a, b in zip(bounds[::2], bounds[1::2])]


def test_all_text_parts_but_the_last_are_documents() -> None:
    parts = [part("first"), part("second"), part("why?")]
    text, documents = convert(parts, {"canopy_documents": "parts"})
    assert documents == ["first", "second"]
    assert text == "<user>first\nsecond\nwhy?</user>"


def test_separators_in_a_message_bound_documents_too() -> None:
    text, documents = convert("sys##one##two##why?", None, Options(separator="##"))
    assert documents == ["one", "two"]
    assert text == "<user>sys##one##two##why?</user>"


def test_a_chat_that_declines_or_has_no_documents_is_unchanged() -> None:
    off = {"canopy_chunks": "off", "canopy_documents": "parts"}
    assert convert("a##b##c", {"canopy_chunks": "off"}, Options(separator="##"))[1] == []
    assert convert([part("a"), part("b")], off) == ("<user>ab</user>", [])
    assert convert("plain") == ("<user>plain</user>", [])


def test_documents_of_the_template_are_found_in_its_text() -> None:
    listed = [{"title": "t", "text": "one"}, {"text": "two"}]
    assert convert("why?", None, None, listed, shows=True)[1] == ["one", "two"]
    with pytest.raises(CanopyError, match="shows no documents"):
        convert("why?", None, None, listed)


def test_a_registered_document_replaces_its_mark() -> None:
    name = entry.documents.add([ord(c) for c in "fact"], None)
    try:
        text, documents = convert(f"see [[canopy:{name}]] why?")
    finally:
        entry.documents.remove(name, None)
    assert documents == ["fact"]
    assert text == "<user>see fact why?</user>"


PARTS = {"canopy_documents": "parts"}


@pytest.mark.parametrize(
    ("first", "bounded"),
    [
        pytest.param("MARK", ["fact"], id="a part that is a mark"),
        pytest.param("see MARK now", ["fact"], id="a mark inside a part"),
        pytest.param("other", ["other", "fact"], id="a mark beside parts"),
    ],
)
def test_a_mark_is_replaced_in_a_chat_of_parts(first: str, bounded: list[str]) -> None:
    name = entry.documents.add([ord(c) for c in "fact"], None)
    mark = f"[[canopy:{name}]]"
    first, last = first.replace("MARK", mark), "why?" if "MARK" in first else f"{mark} why?"
    try:
        text, found = convert([part(first), part(last)], PARTS)
    finally:
        entry.documents.remove(name, None)
    assert found == bounded
    assert text == f"<user>{first}\n{last}</user>".replace(mark, "fact")


ANY = {"canopy_order": "any"}


@pytest.fixture
def no_orders(monkeypatch) -> None:
    monkeypatch.setattr(any_order, "orders", Orders())


def test_documents_in_any_order_take_the_order_of_an_earlier_prompt(no_orders) -> None:
    def chat(*texts, **said):
        return convert([*map(part, texts), part("why?")], {**PARTS, **said})

    chat("one", "two", **ANY)
    text, documents = chat("three", "two", "one", **ANY)
    assert documents == ["one", "two", "three"]
    assert text == "<user>one\ntwo\nthree\nwhy?</user>"
    assert chat("two", "one")[1] == ["two", "one"]
    assert chat("two", "one", canopy_chunks="off", **ANY)[0] == "<user>twoonewhy?</user>"


def test_text_and_token_ids_have_their_documents_ordered_too(no_orders) -> None:
    manager = SimpleNamespace(tokenizer=Characters(), server_args=SimpleNamespace(tp_size=1))

    def prepared(text=None, ids=None, custom=None):
        obj = SimpleNamespace(
            text=text, input_ids=ids, extra_key=None, cache_salt=None,
            sampling_params={"custom_params": {**(custom or {}), **ANY}},
        )  # fmt: skip
        entry.prepare(manager, obj, Options(separator="##"))
        assert obj.text is None
        params = obj.sampling_params
        params = params if isinstance(params, list) else [params]
        bounds = [one["custom_params"]["canopy_chunks"] for one in params]
        return obj.input_ids, bounds if isinstance(text or ids[0], list) else bounds[0]

    text = Characters().encode("s##first##ab##why?")
    assert prepared("s##first##ab##why?") == (text, [3, 8, 10, 12])
    assert prepared("s##ab##first##why?") == (text, [3, 8, 10, 12])
    turned = Characters().encode("s##ab##first##why?")
    assert prepared(ids=list(turned), custom={"canopy_chunks": [3, 5, 7, 12]}) == (
        text, [3, 8, 10, 12],
    )  # fmt: skip
    assert prepared(["s##ab##first##why?", "s##first##ab##why?"]) == (
        [text, text], [[3, 8, 10, 12]] * 2,
    )  # fmt: skip
    odd = [*turned[:-1], [1]]  # SGLang refuses it
    assert prepared(ids=odd, custom={"canopy_chunks": [3, 5, 7, 12]}) == (odd, [3, 5, 7, 12])


def test_documents_are_bounded_without_sampling_params() -> None:
    """``/generate`` takes a request of text alone."""
    manager = SimpleNamespace(tokenizer=Characters(), server_args=SimpleNamespace(tp_size=1))
    text = "s##first##ab##why?"
    obj = SimpleNamespace(
        text=text, input_ids=None, extra_key=None, cache_salt=None, sampling_params=None
    )
    entry.prepare(manager, obj, Options(separator="##"))
    assert obj.sampling_params == {"custom_params": {"canopy_chunks": [3, 8, 10, 12]}}


def test_documents_in_any_order_never_change_turns(no_orders) -> None:
    def original(_serving, request, _raw):
        text = "".join(f"<{m.role}>{m.content}" for m in request.messages)
        ids = Characters().encode(text)
        sampling = {"custom_params": dict(request.custom_params)}
        return SimpleNamespace(
            text=None, input_ids=ids, sampling_params=sampling, extra_key=None, cache_salt=None
        ), 0

    def chat(*documents):
        messages = []
        for one in documents:
            messages.append(Message(role="user", content=[part(one), part("?")]))
            messages.append(Message(role="a", content="!"))
        request = SimpleNamespace(messages=messages, custom_params={**PARTS, **ANY})
        manager = SimpleNamespace(tokenizer=Characters(), server_args=SimpleNamespace(tp_size=1))
        serving = SimpleNamespace(tokenizer_manager=manager)
        adapted, _ = entry.convert_chat(original, serving, request, Options())
        return Characters().decode(adapted.input_ids)

    chat("one", "two")
    assert chat("two", "one") == "<user>two\n?<a>!<user>one\n?<a>!"


@pytest.mark.parametrize(
    "fields",
    [
        {"logprob_start_len": 4},
        {"logprob_start_len": [-1, 4]},
        {"image_data": ["an image"]},
        {"positional_embed_overrides": object()},
        {"session_params": {"id": "1"}},
    ],
)
def test_documents_stay_if_other_fields_belong_to_their_positions(no_orders, fields) -> None:
    manager = SimpleNamespace(tokenizer=Characters(), server_args=SimpleNamespace(tp_size=1))

    def prepared(text, **fields):
        obj = SimpleNamespace(
            text=text, input_ids=None, extra_key=None, cache_salt=None,
            sampling_params={"custom_params": dict(ANY)}, **fields,
        )  # fmt: skip
        entry.prepare(manager, obj, Options(separator="##"))
        return Characters().decode(obj.input_ids)

    assert prepared("s##first##ab##why?") == "s##first##ab##why?"
    assert prepared("s##ab##first##why?", logprob_start_len=-1) == "s##first##ab##why?"
    assert prepared("s##ab##first##why?", **fields) == "s##ab##first##why?"


@pytest.mark.parametrize(
    "content",
    [
        "one text",
        [part("why?")],
        [part(" "), part("why?")],
        [part("a"), SimpleNamespace(type="image_url")],
    ],
)
def test_a_retrieval_that_found_nothing_and_images_are_ordinary_prompts(content) -> None:
    """``canopy_documents`` is set once in a client, for every turn of a conversation."""
    given = converted(content, PARTS)[0]
    plain = converted(content, None)[0]
    assert given.input_ids == plain.input_ids
    assert "canopy_chunks" not in given.sampling_params["custom_params"]


def test_a_blank_part_is_not_a_document() -> None:
    text, documents = convert([part("first"), part(" "), part("why?")], PARTS)
    assert documents == ["first"]
    assert text == "<user>first\n \nwhy?</user>"


def test_the_result_of_a_tool_is_a_document() -> None:
    text, documents = convert("found text", PARTS, role="tool")
    assert (text, documents) == ("<user>found text</user>", ["found text"])
    text, documents = convert([part("one"), part("two")], PARTS, role="tool")
    assert documents == ["one", "two"]


def test_a_chats_fields_are_parsed_once(monkeypatch) -> None:
    parsed, real = [], entry.fields.parse_fields
    monkeypatch.setattr(
        entry.fields, "parse_fields", lambda given: parsed.append(given) or real(given)
    )
    adapted, manager = converted("sys##one##two##why?", None, Options(separator="##"))
    before = dict(adapted.sampling_params["custom_params"])
    entry.prepare(manager, adapted, Options(separator="##"))
    assert len(parsed) == 1
    assert adapted.sampling_params["custom_params"] == before


@pytest.mark.parametrize("path", ["/v1/responses", "/api/chat"])
def test_the_fields_of_a_chat_that_is_rendered_already_count(path: str) -> None:
    name = entry.documents.add([ord(c) for c in "fact"], None)
    text = f"<user>[[canopy:{name}]] why?</user>"

    def prepared(custom: dict) -> SimpleNamespace:
        manager = SimpleNamespace(tokenizer=Characters(), server_args=SimpleNamespace(tp_size=2))
        obj = SimpleNamespace(
            text=None, input_ids=Characters().encode(text), extra_key=None, cache_salt=None,
            sampling_params={"custom_params": custom},
        )  # fmt: skip
        entry.prepare(manager, obj, Options(), path)
        assert Characters().decode(obj.input_ids) == "<user>fact why?</user>"
        return obj.sampling_params["custom_params"]["canopy_chunks"]

    try:
        assert prepared({}) == [6, 10]
        assert prepared({"canopy_chunks": "off"}) == "off"
        with pytest.raises(CanopyError, match="--tp-size 2"):
            prepared({"canopy_selector": "frequency"})
    finally:
        entry.documents.remove(name, None)


def test_a_chats_selector_is_checked_against_the_ranks() -> None:
    with pytest.raises(CanopyError, match="--tp-size 2"):
        convert("a##b##c", {"canopy_selector": "frequency"}, Options(separator="##"), tp_size=2)


LISTED = [
    "first",
    {"text": "second"},
    {"title": "Third", "text": "it is"},
    {"id": "4", "data": {"snippet": "fourth"}},
]


@pytest.mark.parametrize("content", ["why?", [part("why?")]])
def test_documents_of_the_body_are_parts_in_front_of_the_last_users_text(content) -> None:
    pytest.importorskip("sglang")
    text, documents = convert(content, listed=LISTED)
    assert documents == ["first", "second", "Third\nit is", "fourth"]
    assert text == "<user>first\nsecond\nThird\nit is\nfourth\nwhy?</user>"


def test_documents_of_the_body_stay_in_front_of_the_first_users_text() -> None:
    """A client sends them with every turn: behind the turns before they would never be a prefix."""

    def message(role, content):
        return Message(role=role, content=content)

    first = SimpleNamespace(messages=[message("user", "why?")])
    later = SimpleNamespace(
        messages=[message("user", "why?"), message("assistant", "so"), message("user", "and?")]
    )
    for request in (first, later):
        assert entry._add_listed(request, SimpleNamespace(_json={"documents": LISTED}))
    assert first.messages[0] == later.messages[0]
    assert later.messages[2].content == "and?"


def test_documents_of_the_body_are_in_a_prompt_that_declines_reuse() -> None:
    pytest.importorskip("sglang")
    adapted, _ = converted("why?", {"canopy_chunks": "off"}, listed=["first"])
    assert Characters().decode(adapted.input_ids) == "<user>firstwhy?</user>"
    assert adapted.sampling_params["custom_params"] == {"canopy_chunks": "off"}


def test_documents_next_to_an_image_are_in_the_prompt() -> None:
    pytest.importorskip("sglang")
    image = SimpleNamespace(type="image_url")
    text, documents = convert([image, part("what is this?")], listed=["first"])
    assert documents == []
    assert text == "<user>first<image>what is this?</user>"


@pytest.mark.parametrize("nothing", [None, []])
def test_no_documents_in_the_body_are_an_ordinary_prompt(nothing) -> None:
    assert convert("why?", listed=nothing) == ("<user>why?</user>", [])


@pytest.mark.parametrize("listed", ["text", [3], [{"title": "a"}], [{"text": 5}], {"text": "a"}])
def test_documents_of_another_form_are_refused_by_name(listed) -> None:
    pytest.importorskip("sglang")
    with pytest.raises(CanopyError, match="documents must be a list of strings"):
        convert("why?", listed=listed)


def test_documents_need_a_users_message() -> None:
    pytest.importorskip("sglang")
    with pytest.raises(CanopyError, match="role 'user'"):
        convert("why?", listed=["first"], role="system")


GUIDE = (Path(__file__).parents[3] / "docs/guide/documents.md").read_text(encoding="utf-8")
BLOCKS = [textwrap.dedent(b).strip() for b in re.findall(r"(?:^    .*\n)+", GUIDE, re.M)]
SHOWN = [json.loads(b) for b in BLOCKS if b.startswith('{"model"')]


@pytest.mark.parametrize("body", SHOWN, ids=lambda body: ",".join(body))
def test_the_guides_chats_have_two_documents(body) -> None:
    (message,) = body["messages"]
    content = message["content"]
    if isinstance(content, list):
        content = [SimpleNamespace(**one) for one in content]
    custom, listed = body.get("custom_params"), body.get("documents")
    text, (paris, rome) = convert(content, custom, listed=listed)
    assert paris == "Paris is ..."
    assert rome.endswith("Rome is ...")
    assert text.endswith("Which is older?</user>")


def test_the_guides_separated_prompt_has_two_documents() -> None:
    (shown,) = [b for b in BLOCKS if b.startswith("You answer")]
    assert len(SHOWN) == 2
    assert convert(shown, options=Options(separator="\n###\n"))[1] == [
        "Paris is ...",
        "Rome is ...",
    ]
