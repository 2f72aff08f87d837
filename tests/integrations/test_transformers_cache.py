"""The packed cache in real models of transformers, against its own DynamicCache."""

import copy
import warnings
from contextlib import nullcontext
from typing import Any, ClassVar

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of importing it
    import transformers
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

from packhorse.host.kv import WorkingMemory
from packhorse.integrations.transformers.cache import PackedHostLayer
from packhorse.transformers import PackedHostCache

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "max_position_embeddings": 512,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {"head_dim": 32},
    "Gemma2": {"head_dim": 16, "sliding_window": 24},
}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "samples": {"do_sample": True, "num_return_sequences": 2},
    "looked up in the prompt": {"prompt_lookup_num_tokens": 3},
    "prefilled in chunks": {"prefill_chunk_size": 16},
}


def make_model(family: str) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**(SIZES | FAMILIES[family]))
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(torch.bfloat16).eval()
    with torch.no_grad():
        for each in model.parameters():
            if each.dim() >= 2:
                each.copy_(2 * torch.randn(each.shape) * each.shape[-1] ** -0.5)
    return model


def generate(model: Any, cache: Any, n_prompts: int = 2, **options: Any) -> Any:
    torch.manual_seed(1)
    ids = torch.randint(3, 300, (n_prompts, 36))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    return model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=24,
        past_key_values=cache,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )


def check_same(found: Any, wanted: Any) -> None:
    assert torch.equal(found.sequences, wanted.sequences)
    assert len(found.logits) == len(wanted.logits)
    assert all(map(torch.equal, found.logits, wanted.logits))


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {family: make_model(family) for family in FAMILIES}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_generated_tokens_are_the_same(models: dict[str, Any], family: str, way: str) -> None:
    model, n_prompts = models[family], 1 if "looked up" in way else 2
    cache = PackedHostCache(model.config, page_tokens=16)
    found = generate(model, cache, n_prompts, **WAYS[way])
    plain = DynamicCache(config=model.config)
    check_same(found, generate(model, plain, n_prompts, **WAYS[way]))
    assert cache.get_seq_length() == plain.get_seq_length()
    report = cache.report()
    assert report.size.n_pages > 0
    sliding = {0: "it keeps a sliding window of tokens"} if family == "Gemma2" else {}
    assert report.plain_layers == sliding
    assert report.n_packed_layers == 2 - len(sliding)


def test_with_an_assistant(models: dict[str, Any]) -> None:
    model, assistant = models["Llama"], make_model("Llama")
    with torch.no_grad():
        assistant.lm_head.weight += 0.2 * torch.randn_like(assistant.lm_head.weight)
    cache = PackedHostCache(model.config, page_tokens=16)
    found = generate(model, cache, 1, assistant_model=assistant)
    plain = DynamicCache(config=model.config)
    check_same(found, generate(model, plain, 1, assistant_model=assistant))


def test_a_prompt_is_used_again(models: dict[str, Any]) -> None:
    model = models["Qwen3"]
    ids = torch.arange(3, 60)[None]
    prompt = PackedHostCache(page_tokens=16)
    with torch.inference_mode():
        model(ids[:, :40], past_key_values=prompt)
    prompt.layers[0].prefetch()
    n_pages = prompt.report().size.n_pages
    for stop in (50, 57):
        cache = copy.deepcopy(prompt)
        found = model.generate(ids[:, :stop], past_key_values=cache, max_new_tokens=10)
        assert torch.equal(found, model.generate(ids[:, :stop], max_new_tokens=10))
        del cache
    assert prompt.report().size.n_pages == n_pages
    assert prompt.get_seq_length() == 40


def new_states(n: int, n_tokens: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 2, n_tokens, 16, generator=generator).to(torch.bfloat16)


@pytest.mark.parametrize("seed", range(4))
def test_a_layer_does_what_the_plain_layer_does(seed: int) -> None:
    """Random calls, two packed layers that share working memory, unpacked ahead or not."""
    memory = WorkingMemory(1 + seed % 2)
    packed = [PackedHostLayer(memory, page_tokens=8) for _ in range(2)]
    plain = [DynamicLayer(), DynamicLayer()]
    choose = torch.Generator().manual_seed(seed)

    def draw(n: int) -> int:
        return int(torch.randint(n, (), generator=choose))

    n_sequences = 2
    for step in range(60):
        call, number = draw(9), draw(2)
        layers = (packed[number], plain[number])
        length = plain[number].get_seq_length()
        if call < 4 or length == 0:
            n_new, results = 1 + draw(3) * draw(12), []
            n = n_sequences if plain[number].keys is None else len(plain[number].keys)
            for layer in layers:
                states = new_states(n, n_new, step), new_states(n, n_new, step + 100)
                results.append(layer.update(*states))
            assert all(map(torch.equal, *results))
        elif call == 4:
            packed[number].prefetch()
        elif call == 5:
            for layer in layers:
                layer.crop(-(length * (step % 5) // 4))
        elif call == 6:
            order = torch.randint(len(plain[number].keys), (n_sequences,), generator=choose)
            for layer in layers:
                layer.reorder_cache(order)
        elif call == 7 and len(plain[number].keys) < 5:
            for layer in layers:
                layer.batch_repeat_interleave(2)
        else:
            keep = torch.arange(len(plain[number].keys)) != 0
            chosen = keep if draw(2) and keep.any() else torch.tensor([0])
            for layer in layers:
                layer.batch_select_indices(chosen)
        same = [layer.get_seq_length() for layer in layers]
        assert same[0] == same[1]
        assert packed[number].get_mask_sizes(3) == plain[number].get_mask_sizes(3)
        if same[0]:
            assert torch.equal(packed[number].keys, plain[number].keys)
            assert torch.equal(packed[number].values, plain[number].values)
    packed[0].reset()
    assert packed[0].get_seq_length() == 0
    assert packed[0].keys is None


def test_what_was_unpacked_ahead_is_used_while_it_is_there() -> None:
    memory = WorkingMemory(2)
    layers = [PackedHostLayer(memory, page_tokens=8) for _ in range(3)]
    for layer in layers:
        layer.update(new_states(1, 20, 0), new_states(1, 20, 1))
    layers[0].prefetch()
    keys, _ = layers[0].update(new_states(1, 1, 2), new_states(1, 1, 3))
    assert memory.n_taken == 1
    assert torch.equal(keys, torch.cat([new_states(1, 20, 0), new_states(1, 1, 2)], 2))
    for layer in layers:
        layer.prefetch()
    keys, _ = layers[0].update(new_states(1, 1, 4), new_states(1, 1, 5))
    assert memory.n_taken == 5  # two others came after it, so it was unpacked again
    assert torch.equal(keys[:, :, -1:], new_states(1, 1, 4))
    layers[1].prefetch(30)  # a chunk of a prompt
    keys, _ = layers[1].update(new_states(1, 30, 6), new_states(1, 30, 7))
    assert memory.n_taken == 6
    assert torch.equal(keys, torch.cat([new_states(1, 20, 0), new_states(1, 30, 6)], 2))


class OnGPU(torch.Tensor):
    """Says that it is in the memory of a GPU."""

    is_cuda = True


class Stream:
    """A stream that notes what it waits for."""

    waits: ClassVar[list[tuple["Stream", "Stream"]]] = []

    def __init__(self, device: object = None) -> None:
        self.device = device

    def wait_stream(self, other: "Stream") -> None:
        self.waits.append((self, other))


def test_on_a_gpu_the_next_layer_is_unpacked_while_one_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With streams that do their work at once."""
    current, memory = Stream(), Stream()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: memory)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    Stream.waits.clear()
    cache, plain = PackedHostCache(page_tokens=8), DynamicCache()
    for step, n_tokens in enumerate([20, 1, 1, 3, 1]):
        for number in range(3):
            states = new_states(2, n_tokens, step), new_states(2, n_tokens, step + 50)
            found = cache.update(*(each.as_subclass(OnGPU) for each in states), number)
            assert all(map(torch.equal, found, plain.update(*states, number)))
    # The second token's first layer was not read ahead; each layer reads the next one.
    assert cache._memory.n_taken == 1 + 4 * 3
    assert Stream.waits[:4] == [(current, memory)] * 4
    assert Stream.waits[4:] == [(memory, current), (current, memory)] * 11 + [(memory, current)]

    def fail(n_new: int) -> None:
        raise RuntimeError("CUDA error")

    states = new_states(2, 1, 9).as_subclass(OnGPU)
    monkeypatch.setattr(cache.layers[1], "prefetch", fail)
    with pytest.raises(RuntimeError, match="CUDA error") as error:
        cache.update(states, states, 0)
    assert error.value.__notes__[0] == "layer 1 of the cache was unpacked ahead"
    assert error.value.__notes__[1].startswith("layer 0 of the cache, tokens 26 to 26")
    assert [layer.get_seq_length() for layer in cache.layers] == [26] * 3
    copied = copy.deepcopy(cache)
    assert copied._stream is None
    assert torch.equal(copied.layers[2].keys, plain.layers[2].keys)


def test_beams_are_fetched_from_the_device_once() -> None:
    class Beams(torch.Tensor):
        n_fetched = 0

        def cpu(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            Beams.n_fetched += 1
            return self.as_subclass(torch.Tensor)

    cache = PackedHostCache(page_tokens=8)
    for number in range(3):
        cache.update(new_states(2, 20, number), new_states(2, 20, number + 9), number)
    cache.reorder_cache(torch.tensor([1, 1]).as_subclass(Beams))
    assert Beams.n_fetched == 1
    assert torch.equal(cache.layers[2].keys, new_states(2, 20, 2)[[1, 1]])


def test_what_it_cannot_do_is_refused(models: dict[str, Any]) -> None:
    model = models["Llama"]
    cache = PackedHostCache(model.config)
    with pytest.raises(RuntimeError, match="gradients"):
        model(torch.tensor([[1, 2]]), past_key_values=cache)
    layer = PackedHostLayer()
    with pytest.raises(AttributeError, match="use update"):
        layer.keys = torch.zeros(1)
    with pytest.raises(ValueError, match="negative"):
        layer.crop(3)
    with pytest.raises(ValueError, match="page_tokens is 0"):
        PackedHostCache(page_tokens=0)
    small = PackedHostCache(model.config, page_tokens=16, room_tokens=64)
    with pytest.raises(MemoryError, match="free slots"):
        generate(model, small)
    assert small.report().room == (0, 1)
    assert "room for 0 packed and 1 plain pages more" in str(small.report())
    assert cache.report().room is None


@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
def test_tokens_that_one_layer_refuses_are_in_no_layer(models: dict[str, Any], family: str) -> None:
    model = models[family]
    wanted = generate(model, DynamicCache(config=model.config)).sequences
    cache = PackedHostCache(model.config, page_tokens=16)
    cache.layers[1] = PackedHostLayer(cache._memory, page_tokens=16, room_tokens=64)
    with pytest.raises(MemoryError, match="free slots") as refused:
        generate(model, cache)
    assert "layer 1 of the cache, tokens 47 to 47: no layer has" in refused.value.__notes__[0]
    assert [layer.get_seq_length() for layer in cache.layers] == [47, 47]
    cache.batch_select_indices(torch.tensor([1]))  # one sequence gives up, so there is room
    found = model.generate(wanted[1:, :48], past_key_values=cache, max_length=60)
    assert torch.equal(found, wanted[1:])

    prompt = PackedHostCache(model.config, page_tokens=16)
    prompt.layers[1] = PackedHostLayer(prompt._memory, page_tokens=16, room_tokens=16)
    with pytest.raises(MemoryError, match="free slots"):
        generate(model, prompt)
    assert [layer.get_seq_length() for layer in prompt.layers] == [0, 0]


def test_layers_that_lend_their_keys_stay_plain() -> None:
    config = transformers.Gemma3nTextConfig(
        num_hidden_layers=4, num_kv_shared_layers=2, layer_types=["full_attention"] * 4
    )
    cache = PackedHostCache(config)
    reasons = cache.report().plain_layers
    assert reasons[1] == "later layers use its keys and values, too"
    assert 0 not in reasons
    assert "DummyLayer" in reasons[2]
