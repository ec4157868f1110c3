"""The documents of requests are bounded in SGLang's own tokens, which are never changed."""

import json
import re
import textwrap
from pathlib import Path
from types import SimpleNamespace

import jinja2
import pytest

from canopy_documents import ATTRIBUTE
from canopy_documents.plugin import hooks
from canopy_documents.server import conversion
from canopy_documents.server.options import ReuseOptions
from canopy_documents.text.fields import MAX_DOCUMENTS
from canopy_documents.text.order import Orders
from sglang_canopy.config.server_options import ATTRIBUTE as SERVER_OPTIONS
from sglang_canopy.config.server_options import RequestOptions, ServerOptions
from sglang_canopy.errors import CanopyError
from support.chat_templates import TEMPLATES
from support.words import Words

BY_PARTS, ANY_ORDER = {"canopy_documents": "parts"}, {"canopy_order": "any"}
WITH_SEPARATOR = ReuseOptions(separator="##")
ONE, TWO, THREE = "the one fact here", "the two facts here", "the three facts here"


class Message(SimpleNamespace):
    def model_copy(self, update):
        return Message(**{**vars(self), **update})


def parts(*texts):
    return [SimpleNamespace(type="text", text=text) for text in texts]


def message(content, role="user"):
    return Message(role=role, content=content)


def join_parts(content) -> str:
    """Join a message's parts as SGLang does for a template that takes text."""
    if isinstance(content, str):
        return content
    return " ".join(part.text if part.type == "text" else "<image>" for part in content)


def plain_template(message) -> str:
    return f"<{message.role}>{join_parts(message.content)}<end>"


def template_without_thoughts(message) -> str:
    """Qwen3's template shows an assistant's text from its last thought on."""
    return f"<{message.role}>{join_parts(message.content).split('</think>')[-1]}<end>"


class ChatServer:
    """The conversion of chat requests in a server with this chat template."""

    def __init__(self, options=None, template=plain_template, chat=None) -> None:
        self.options = options or ReuseOptions()
        self.chat = chat or (lambda messages: "".join(map(template, messages)))
        self.manager = SimpleNamespace(tokenizer=Words(), server_args=SimpleNamespace(tp_size=1))

    def render(self, _serving, request, _raw):
        text = self.chat(request.messages)
        params = dict(request.custom_params) if request.custom_params else None
        return SimpleNamespace(
            text=None, input_ids=self.manager.tokenizer.encode(text), extra_key=None,
            cache_salt=None, sampling_params={"custom_params": params},
        ), 0  # fmt: skip

    def convert(self, messages, params=None):
        """Return the converted request, and the token ids of a server without documents."""
        if not isinstance(messages, list) or not isinstance(messages[0], Message):
            messages = [message(messages)]
        request = SimpleNamespace(
            messages=messages, custom_params=params, input_ids=None, extra_key=None, cache_salt=None
        )
        ids = self.render(None, request, None)[0].input_ids
        serving, raw = SimpleNamespace(tokenizer_manager=self.manager), SimpleNamespace(_json=None)
        return conversion.convert_chat(self.render, serving, request, self.options, raw)[0], ids

    def documents(self, messages, params=None) -> list[str]:
        """Return the texts of the documents; without ``canopy_order`` the prompt is the plain server's."""
        request, ids = self.convert(messages, params)
        if "canopy_order" not in (params or {}):
            assert request.input_ids == ids
        return self.bounded_texts(request)

    def bounded_texts(self, request) -> list[str]:
        custom_params = request.sampling_params.get("custom_params") or {}
        bounds = custom_params.get("canopy_document_bounds", [])
        bounds = [] if bounds == "off" else bounds
        return [self.text(request.input_ids[a:b]) for a, b in zip(bounds[::2], bounds[1::2])]

    def text(self, ids) -> str:
        return self.manager.tokenizer.decode(ids)


CHAT_CASES = {
    "all text parts but the last": (parts(ONE, TWO, "why?"), BY_PARTS, [" one fact", " two facts"]),
    "a blank part is none": (parts(ONE, " ", "why?"), BY_PARTS, [" one fact"]),
    "separators": (f"system##{ONE}##{TWO}##why?", None, [" one fact", " two facts"]),
    "a tool's result": ([message(ONE, "tool")], BY_PARTS, [" one fact"]),
    "declined": (parts(ONE, "why?"), {**BY_PARTS, "canopy_document_bounds": "off"}, []),
    "parts without the field": (parts(ONE, "why?"), None, []),
    "one text": ("why is it so?", BY_PARTS, []),
    "beside an image": ([SimpleNamespace(type="image_url"), *parts(ONE, "why?")], BY_PARTS, []),
}


@pytest.mark.parametrize("case", CHAT_CASES)
def test_documents_of_a_chat(case) -> None:
    content, params, expected = CHAT_CASES[case]
    assert ChatServer(WITH_SEPARATOR).documents(content, params) == expected


def test_a_document_ends_at_its_message_and_is_no_answer() -> None:
    chat = [
        message(f"system##{ONE}##why is it?"),
        message(f"it is##{THREE}##so", "assistant"),
        message(f"and with##{TWO}##how is it?"),
    ]
    assert ChatServer(WITH_SEPARATOR).documents(chat) == [" one fact", " two facts"]


def renderer_of(family: str):
    template = jinja2.Template(TEMPLATES[family])

    def render(messages) -> str:
        template_messages = [{"role": m.role, "content": join_parts(m.content)} for m in messages]
        return template.render(messages=template_messages, add_generation_prompt=True)

    return render


@pytest.mark.parametrize("family", TEMPLATES)
def test_the_prompt_is_the_plain_servers_under_the_templates_of_eight_families(family) -> None:
    server = ChatServer(chat=renderer_of(family))
    question = message(parts(ONE, TWO, "why?"))
    chat = [question, message("so", "assistant"), message(parts(THREE, "now?"))]
    bounded = server.documents(chat, BY_PARTS)
    assert [text.split()[-2:] for text in bounded] == [
        ["one", "fact"],
        ["two", "facts"],
        ["three", "facts"],
    ]
    assert server.documents(chat, {**BY_PARTS, "canopy_document_bounds": "off"}) == []


@pytest.mark.parametrize("params", [BY_PARTS, {**BY_PARTS, "canopy_document_bounds": "off"}, None])
def test_no_field_changes_the_prompt(params) -> None:
    """The template drops a part of an answer, a document has a special token, and there are many."""
    chat = [
        message(parts(ONE, "ends in <end> a text", "why?")),
        message("<think>hm, hm</think>It is a lamp.", "assistant"),
        message(parts(*[f"{ONE} {i} of many" for i in range(MAX_DOCUMENTS + 44)], "sure?")),
    ]
    request, ids = ChatServer(template=template_without_thoughts).convert(chat, params)
    assert request.input_ids == ids
    assert request.text is None
    bounds = (request.sampling_params["custom_params"] or {}).get("canopy_document_bounds")
    assert (
        bounds == (params or {}).get("canopy_document_bounds")
        if params != BY_PARTS
        else len(bounds) > 600
    )


def test_a_part_that_a_template_drops_is_no_document() -> None:
    server = ChatServer(template=lambda m: f"<{m.role}>{join_parts(m.content).replace(ONE, '')}")
    assert server.documents(parts(ONE, TWO, "why?"), BY_PARTS) == [" two facts"]


def test_parts_of_a_text_are_refused() -> None:
    with pytest.raises(CanopyError, match="of chat messages"):
        prepare_request(text="why?", params=BY_PARTS)


def test_bounds_of_a_text_are_refused() -> None:
    with pytest.raises(CanopyError, match="input_ids"):
        ChatServer().convert("why is it?", {"canopy_document_bounds": [0, 1]})


@pytest.fixture
def fresh_orders(monkeypatch) -> None:
    monkeypatch.setattr(conversion, "orders", Orders())
    monkeypatch.setattr("canopy_documents.text.order.orders", conversion.orders)


def prepare_request(text=None, ids=None, params=None, path="", body=None, manager=None, **fields):
    manager = manager or ChatServer().manager
    obj = SimpleNamespace(
        text=text, input_ids=ids, extra_key=None, cache_salt=None,
        sampling_params={"custom_params": params} if params else None, **fields,
    )  # fmt: skip
    conversion.prepare(manager, obj, WITH_SEPARATOR, path, body)
    return obj


def test_documents_of_texts_alone_and_in_batches() -> None:
    server, text = ChatServer(WITH_SEPARATOR), f"s##{ONE}##{TWO}##why?"
    for prompts in (text, [text, "none of them"]):
        request = prepare_request(prompts, manager=server.manager)
        assert request.text is None
        sampling, ids = request.sampling_params, request.input_ids
        if isinstance(prompts, str):
            sampling, ids = [sampling], [ids]
        first_request = SimpleNamespace(input_ids=ids[0], sampling_params=sampling[0])
        assert server.bounded_texts(first_request) == [" one fact", " two facts"]
        assert [server.text(i) for i in ids] == ([prompts] if isinstance(prompts, str) else prompts)
    samples = [{}, {}, {}]  # SGLang does not read the third
    fields = {"input_ids": None, "extra_key": None, "cache_salt": None, "sampling_params": samples}
    conversion.prepare(server.manager, SimpleNamespace(text=[text, text], **fields), WITH_SEPARATOR)
    assert [bool(params) for params in samples] == [True, True, False]
    unchanged = prepare_request("none of them", manager=server.manager)
    assert (unchanged.text, unchanged.input_ids) == ("none of them", None)


@pytest.mark.parametrize("path", ["/v1/responses", "/api/chat"])
def test_documents_of_a_chat_that_is_rendered_already(path: str) -> None:
    server, text = ChatServer(WITH_SEPARATOR), f"sys##{ONE}##{TWO}##why?"
    answer = {"role": "assistant", "content": [{"type": "output_text", "text": f"a##{THREE}##b"}]}
    items = [answer, {"role": "user", "content": [{"type": "input_text", "text": text}]}]
    tool = {"type": "function_call_output", "output": f"x##{THREE}##y"}
    for body, expected in (
        ({"input": text}, [" one fact", " two facts"]),
        ({"input": items}, [" one fact", " two facts"]),
        ({"messages": [answer, {"role": "user", "content": text}]}, [" one fact", " two facts"]),
        (
            {"input": [*items, tool], "instructions": "be brief"},
            [" one fact", " two facts", " three facts"],
        ),
        ({"input": "why?"}, []),
    ):
        rendered = f"<assistant>a##{THREE}##b<user>{text}<tool>x##{THREE}##y"
        ids = server.manager.tokenizer.encode(rendered)
        request = prepare_request(ids=ids, path=path, body=body, manager=server.manager)
        assert request.input_ids is ids
        assert server.bounded_texts(request) == expected


def test_documents_in_any_order_take_the_order_of_an_earlier_prompt(fresh_orders) -> None:
    server = ChatServer()

    def chat(*texts, **fields):
        return server.documents(parts(*texts, "why?"), {**BY_PARTS, **fields})

    chat(ONE, TWO, **ANY_ORDER)
    assert chat(THREE, TWO, ONE, **ANY_ORDER) == [" one fact", " two facts", " three facts"]
    assert chat(TWO, ONE) == [" two facts", " one fact"]
    fields = {**BY_PARTS, **ANY_ORDER, "canopy_document_bounds": "off"}
    request, ids = server.convert(parts(TWO, ONE, "why?"), fields)
    assert request.input_ids == ids


def test_text_and_token_ids_have_their_documents_ordered_too(fresh_orders) -> None:
    server = ChatServer(WITH_SEPARATOR)
    encode = server.manager.tokenizer.encode
    ordered, reordered = f"s##{ONE}##{TWO}##why?", f"s##{TWO}##{ONE}##why?"
    for prompts in (ordered, reordered, [reordered, ordered]):
        request = prepare_request(prompts, params=ANY_ORDER, manager=server.manager)
        ids = request.input_ids if isinstance(prompts, list) else [request.input_ids]
        assert all(prompt_ids == encode(ordered) for prompt_ids in ids)
    ids = [1, 2, 2, 9, 3, 3, 4]
    for prompts, bounds in ((ids, [1, 3, 4, 6]), ([1, 3, 3, 9, 2, 2, 4], [1, 3, 4, 6])):
        params = {"canopy_document_bounds": bounds, **ANY_ORDER}
        request = prepare_request(ids=prompts, params=params, manager=server.manager)
        assert (request.input_ids, request.sampling_params["custom_params"]["canopy_document_bounds"]) == (
            ids, [1, 3, 4, 6],
        )  # fmt: skip
    invalid = [*ids[:-1], [1]]  # SGLang refuses it
    params = {"canopy_document_bounds": [1, 3, 4, 6], **ANY_ORDER}
    assert prepare_request(ids=invalid, params=params, manager=server.manager).input_ids == invalid


def test_documents_in_any_order_never_change_turns(fresh_orders) -> None:
    server = ChatServer()

    def chat(*texts):
        turns = [(message(parts(text, "why?")), message("so", "assistant")) for text in texts]
        request, _ = server.convert([m for turn in turns for m in turn], {**BY_PARTS, **ANY_ORDER})
        return server.bounded_texts(request)

    chat(ONE, TWO)
    assert chat(TWO, ONE) == [" two facts", " one fact"]


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
def test_documents_stay_if_other_fields_belong_to_their_positions(fresh_orders, fields) -> None:
    server = ChatServer()

    def arranged_text(prompts, **fields):
        request = prepare_request(prompts, params=ANY_ORDER, manager=server.manager, **fields)
        return server.text(request.input_ids)

    ordered, reordered = f"s##{ONE}##{TWO}##why?", f"s##{TWO}##{ONE}##why?"
    assert arranged_text(ordered) == arranged_text(reordered, logprob_start_len=-1) == ordered
    assert arranged_text(reordered, **fields) == reordered


DOCS = Path(__file__).parents[3] / "docs"
PAGES_TEXT = "".join((DOCS / part / "documents.md").read_text() for part in ("guide", "reference"))
CODE_BLOCKS = [textwrap.dedent(b).strip() for b in re.findall(r"(?:^    .*\n)+", PAGES_TEXT, re.M)]


def test_the_pages_prompts_have_two_documents() -> None:
    (body,) = [json.loads(block) for block in CODE_BLOCKS if block.startswith('{"model"')]
    (message_shown,) = body["messages"]
    content = [SimpleNamespace(**part) for part in message_shown["content"]]
    assert len(ChatServer().documents(content, body["custom_params"])) == 2
    (separated,) = [block for block in CODE_BLOCKS if block.startswith("You answer")]
    assert len(ChatServer(ReuseOptions(separator="\n###\n")).documents(separated)) == 2


def test_a_chats_documents_are_of_the_tenant_that_its_metadata_name(monkeypatch) -> None:
    """Otherwise all such tenants would share one history of ``canopy_order``."""
    arguments, tenants = SimpleNamespace(), []
    setattr(arguments, ATTRIBUTE, ReuseOptions())
    setattr(arguments, SERVER_OPTIONS, ServerOptions(RequestOptions(carriers="metadata")))
    monkeypatch.setattr(
        conversion, "convert_chat", lambda *args: tenants.append(conversion._tenant_of(args[2]))
    )
    serving = SimpleNamespace(tokenizer_manager=SimpleNamespace(server_args=arguments))

    class Raw:
        headers: dict[str, str] = {}

        async def json(self):
            return {"metadata": {"canopy_cache_salt": "s"}}

    hooks._convert_chat(None, serving, SimpleNamespace(extra_key=None, cache_salt=None), Raw())
    assert tenants == ["s"]
