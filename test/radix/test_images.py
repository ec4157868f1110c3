"""Prompts with different images are different prompts, though their text is the same."""

from array import array
from types import SimpleNamespace

from sglang.srt.managers.mm_utils import (
    MultiModalityDataPaddingPatternMultimodalTokens,
    duplicate_pad_mm_input_ids,
)
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, MultimodalInputs

from sglang_canopy.server.scheduler import arrivals
from support.live_tree import LiveTree, fake_req

IMAGE_TOKEN = 7
"""Token of any image, until SGLang replaces it by the image's own."""


def policy_request(tree: LiveTree, time: float, image_hash: int | None):
    """Return the policy's request of a new prompt."""
    return create_req(tree, time, image_hash).canopy.request


def create_req(tree: LiveTree, time: float, image_hash: int | None):
    """Return a prompt of 8 tokens and an image of 8, after the scheduler's steps."""
    tokens = array("q", [1, 2, 3, 4, 5, 6, 8, 9, *[IMAGE_TOKEN] * 8])
    scheduler = SimpleNamespace(tree_cache=tree.cache, enable_lora=False)
    req = fake_req(tokens, [], {"time": time}, multimodal_inputs=None)
    images = None
    if image_hash is not None:
        item = MultimodalDataItem(modality=Modality.IMAGE, hash=image_hash, offsets=[(8, 15)])
        item.pad_value = 1_000_000 + image_hash
        images = MultimodalInputs(mm_items=[item], im_token_id=IMAGE_TOKEN)
    arrivals.register_created(req, scheduler, SimpleNamespace(mm_inputs=images))
    if images is not None:
        pad = MultiModalityDataPaddingPatternMultimodalTokens().pad_input_tokens
        req.origin_input_ids = duplicate_pad_mm_input_ids(tokens, images, pad)
        req.multimodal_inputs = images
    arrivals.register_queued(scheduler, req)
    return req


def test_prompts_with_different_images_diverge_at_the_image() -> None:
    tree = LiveTree(256, "wa", {"block_tokens": 4})
    cat, dog, repeated = (policy_request(tree, float(n), 1 + n % 2) for n in range(3))
    assert cat.path[:2] == dog.path[:2]
    assert not set(cat.path[2:]) & set(dog.path[2:])
    assert repeated.path == cat.path


def test_a_prompt_without_images_is_announced_when_it_is_created() -> None:
    tree = LiveTree(256, "wa", {"block_tokens": 4})
    assert len(policy_request(tree, 5.0, None).path) == 4
    assert tree.core.clock.now == 5.0


def test_the_kv_of_another_image_is_never_found() -> None:
    """Only the tokens before the image are found, on the device and, after demotion, on the host."""
    tree = LiveTree(32, "wa", {"block_tokens": 4}, host_tokens=96)
    cat = create_req(tree, 0.0, 1)
    dog = create_req(tree, 1.0, 2)
    tree.insert(list(cat.origin_input_ids), cat.canopy.request)
    assert tree.match(list(dog.origin_input_ids)) == 8
    assert tree.match(list(cat.origin_input_ids)) == 16
    tree.evict(16)
    tree.settle()
    assert tree.match(list(cat.origin_input_ids)) == 0
    assert tree.load_back(list(dog.origin_input_ids)) == 8
    assert tree.match(list(dog.origin_input_ids)) == 8
    assert tree.load_back(list(cat.origin_input_ids)) == 8
    assert tree.match(list(cat.origin_input_ids)) == 16
