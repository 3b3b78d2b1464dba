"""Low-rank adapters: only they learn, and what leaves the learner is a plain model that gives the same logits."""

import copy
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from seed_async.adapters import add_adapters
from seed_async.learner.adapters import choose_parameters, plain_parameters
from seed_async.learner.checkpoint import restore, take_snapshot, trained_parameters, write_checkpoint
from seed_async.learner.export import merge_checkpoint
from seed_async.learner.ranks import Ranks
from seed_async.learner.scoring import auto_class
from seed_async.learner.step import update
from seed_async.topology import Lora, Model
from tests.unit.learner.builders import FAMILIES, LOUD, packed, random_batch, tiny_model

LORA = Lora(rank=4, alpha=8)


def trained(lora: Lora = LORA, family: str = "llama") -> tuple[PreTrainedModel, torch.optim.Optimizer]:
    """A model with adapters after two updates."""
    model = packed(tiny_model(family))
    add_adapters(model, lora, seed=1)
    optimizer = torch.optim.AdamW(trained_parameters(model).values(), lr=1e-2)
    for number in range(2):
        update(random_batch(number), LOUD, model, packed(tiny_model(family, seed=1)), optimizer)
    return model, optimizer


@pytest.mark.parametrize("family", FAMILIES)
def test_only_adapters_learn_and_the_merged_weights_give_the_same_log_probs(family: str) -> None:
    start, (model, _) = tiny_model(family), trained(family=family)
    base = dict(start.named_parameters())
    for name, parameter in model.named_parameters():
        if ".lora_" not in name:
            assert torch.equal(parameter, base[name.replace(".base_layer.", ".")])
    merged = Ranks().gather(model)
    assert merged.keys() == base.keys()
    changed = {name for name, tensor in merged.items() if not torch.equal(tensor, base[name])}
    assert any(name.endswith("layers.0.mlp.up_proj.weight") for name in changed)
    assert not any("embed" in name or "norm" in name for name in changed)
    plain = copy.deepcopy(start)
    plain.load_state_dict(merged, strict=False)
    ids = torch.arange(20)[None]
    adapted = copy.deepcopy(start)
    add_adapters(adapted, LORA, seed=1)
    adapted.load_state_dict(model.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, adapted(ids).logits, rtol=1e-4, atol=1e-5)


def test_new_adapters_change_nothing_and_the_seed_alone_decides_them() -> None:
    one, two, three = (tiny_model() for _ in range(3))
    ids = torch.arange(20)[None]
    before = one(ids).logits
    for model, seed in ((one, 5), (two, 5), (three, 6)):
        state = torch.get_rng_state()
        add_adapters(model, LORA, seed)
        assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(one(ids).logits, before)
    weights = [dict(model.named_parameters()) for model in (one, two, three)]
    name = "model.layers.0.self_attn.q_proj.lora_A.default.weight"
    assert torch.equal(weights[0][name], weights[1][name]) and not torch.equal(weights[0][name], weights[2][name])


def test_only_the_layers_that_are_named_get_one() -> None:
    model = tiny_model()
    add_adapters(model, Lora(targets=("q_proj", "v_proj")), seed=0)
    layers = {name.split(".lora_")[0].rsplit(".", 1)[1] for name in trained_parameters(model)}
    assert layers == {"q_proj", "v_proj"}
    with pytest.raises(ValueError, match="no_such_layer"):
        add_adapters(tiny_model(), Lora(targets=("no_such_layer",)), seed=0)


def test_what_is_published_as_adapters_is_what_was_trained_by_the_names_of_peft() -> None:
    model, _ = trained()
    assert choose_parameters(Model(path=Path("m"), lora=LORA)) is plain_parameters
    adapters = LORA.model_copy(update={"publish": "adapters"})
    published = Ranks().gather(model, choose_parameters(Model(path=Path("m"), lora=adapters)))
    own = trained_parameters(model)
    assert [name.removeprefix("base_model.model.") for name in published] == [
        name.replace(".default", "") for name in own
    ]
    for tensor, parameter in zip(published.values(), own.values(), strict=True):
        assert tensor.dtype == torch.float32 and torch.equal(tensor, parameter) and tensor.any()
    assert published["base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"].shape[0] == LORA.rank


def test_a_checkpoint_holds_the_adapters_resumes_exactly_and_merges_into_a_plain_model(tmp_path: Path) -> None:
    start = tiny_model()
    start.save_pretrained(tmp_path / "start")
    model, optimizer = trained()
    folder = write_checkpoint(tmp_path / "checkpoints", take_snapshot(2, 0.0, model, optimizer), keep=1)
    again, its_optimizer = packed(start), None
    add_adapters(again, LORA, seed=9)
    its_optimizer = torch.optim.AdamW(trained_parameters(again).values(), lr=1e-2)
    restore(folder, again, its_optimizer)
    for each, its in ((model, optimizer), (again, its_optimizer)):
        update(random_batch(7), LOUD, each, packed(tiny_model(seed=1)), its)
    for name, tensor in plain_parameters(model, lambda tensor: tensor):
        assert torch.equal(tensor, dict(plain_parameters(again, lambda tensor: tensor))[name])
    restore(folder, model, optimizer)
    assert merge_checkpoint(folder, tmp_path / "start", tmp_path / "merged", LORA) == 2
    merged = auto_class(tmp_path / "merged").from_pretrained(tmp_path / "merged")
    expected = Ranks().gather(model)
    assert all(torch.equal(parameter, expected[name]) for name, parameter in merged.named_parameters())


@pytest.mark.parametrize(
    ("target", "tied", "fault"),
    [
        ("embed_tokens", False, "embed_tokens is a Embedding, not a linear layer"),
        ("lm_head", True, "lm_head shares its weight with the embeddings"),
    ],
)
def test_an_adapter_that_could_not_be_merged_is_refused(target: str, tied: bool, fault: str) -> None:
    model = tiny_model("llama")
    if tied:
        model.lm_head.weight = model.get_input_embeddings().weight
    with pytest.raises(ValueError, match=fault):
        add_adapters(model, Lora(targets=("q_proj", target)), seed=0)


def test_an_adapter_of_an_output_layer_of_its_own_is_merged() -> None:
    model = tiny_model("llama")
    add_adapters(model, Lora(targets=("lm_head",)), seed=0)
    assert "lm_head.weight" in dict(plain_parameters(model, lambda tensor: tensor))
