"""Adapters in the vLLM engine: tokens come from the adapters that it says it used, on the weights below them."""

from typing import get_args

import numpy as np
import pytest
import torch

from seed_async.actors.engines.opening import prepare_vllm
from seed_async.topology import MAX_VLLM_LORA_RANK, Lora
from tests.reference.engines import needs_vllm
from tests.reference.generate_reference import (
    VOCABULARY,
    add_random_adapters,
    plain_twin,
    score_reference,
    weights_of,
)
from tests.reference.vllm_checks import CANARY, TOLERANCE, model, update_in_flight

pytestmark = needs_vllm


@pytest.mark.parametrize("lora", [Lora(rank=5, alpha=10), Lora(rank=8, targets=("q_proj", "down_proj"))])
def test_tokens_around_new_adapters_match_those_of_their_version(open_vllm, lora):
    """All linear layers, or one of three that vLLM packs; a rank that vLLM has no room of the size for."""
    engine = open_vllm(tied=True, max_slots=8, lora=lora)
    before, after = update_in_flight(engine, tied=True, lora=lora, num_slots=8)
    assert before < TOLERANCE and after < TOLERANCE
    twin = plain_twin(model(tied=True))
    engine.load_weights(engine.health().version + 1, add_random_adapters(twin, lora, seed=2))
    assert np.abs(engine.score(*CANARY) - score_reference(twin, *CANARY)).max() < TOLERANCE
    with pytest.raises(KeyError, match=r"lora_A.*embed_tokens"):
        engine.load_weights(9, weights_of(model(tied=True)))


@pytest.mark.parametrize("adapters", [(1, 1, 1, 1, 1), (2, 2, 2, 2, 2), (1, 1, 1, 2, 2)])
def test_tokens_of_one_adapter_and_of_two_get_what_vllms_own_products_give_them(adapters):
    prepare_vllm(threads=1)
    from vllm.lora.layers import LoRAMapping
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    from seed_async.actors.engines.vllm_cpu import OneAdapterWrapper

    torch.manual_seed(0)
    x, y = torch.randn(5, 6), torch.randn(5, 7)
    down, up = [torch.randn(2, 1, 3, 6) for _ in range(2)], [torch.randn(2, 1, size, 3) for size in (4, 3)]
    outputs = []
    for kind in (PunicaWrapperCPU, OneAdapterWrapper):
        wrapper, output = kind(16, 8, "cpu"), y.clone()
        wrapper.update_metadata(LoRAMapping(adapters, adapters, is_prefill=True), [1, 2], 3, VOCABULARY)
        wrapper.add_lora_linear(output, x, tuple(down), tuple(up), 0.5, (4, 3))
        outputs.append(output)
    torch.testing.assert_close(*outputs)
    assert (outputs[0] != y).all()


def test_a_topology_takes_every_rank_that_vllm_does_and_no_greater():
    prepare_vllm(threads=1)
    from vllm.config.lora import MaxLoRARanks

    assert max(get_args(MaxLoRARanks)) == MAX_VLLM_LORA_RANK
