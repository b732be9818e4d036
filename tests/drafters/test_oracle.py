"""The oracle equals the authors' recordings and transformers."""

import functools

import pytest
import torch

from tests.compare import assert_close, assert_value
from tests.conftest import golden_cases
from tests.oracle import blocks, learn, moa, random_pair
from tests.oracle.recorded import Case

FAMILIES = list(random_pair.FAMILIES)
TARGETS = [(x, {}) for x in FAMILIES] + [("llama", {"attention_bias": True, "mlp_bias": True})]

case_at = functools.cache(Case)


def recorded_in(file):
    return pytest.mark.parametrize("folder", golden_cases("moa_", file))


# ---- recorded cases -----------------------------------------------------------------------


@recorded_in("train.npz")
def test_target_is_seen_as_recorded(folder):
    case = case_at(folder)
    tokens_BT, attention_BT = (case.train[x].long() for x in ("input_ids", "attention_mask"))
    seen = moa.observe(case.model, tokens_BT, attention_BT)
    for name, ours, recorded in zip(seen._fields, seen, case.seen, strict=True):
        tokens_first = (1, 2, 0, 3) if name == "hidden_LBTD" else (1, 3, 0, 2, 4)
        ours, recorded = (x.permute(tokens_first)[case.real_BT] for x in (ours, recorded))
        assert_close(ours, recorded, name)
    logits_BTV = case.drafter().logits(seen.hidden_LBTD[-1])
    assert_close(logits_BTV[case.real_BT], case.train["target_logits"][case.real_BT], "logits")


@recorded_in("train.npz")
def test_draft_memory_and_masks(folder):
    case = case_at(folder)
    drafter = case.drafter()
    for part in ("sa", "ca", "lsa"):
        assert_close(getattr(drafter, part).frequency, case.train[f"inv_freq_{part}"], part)
    memory = moa.memory_of(drafter, case.seen.key_LBKTE, case.seen.value_LBKTE)
    names = ("kv_flat", "lsa_out", "lsa_mean", "ekv2e_out")
    for name, ours in zip(names, memory, strict=True):
        assert_close(ours[case.real_BT], case.train[name][case.real_BT], name)
    for variant in case.variants:
        sample = case.sample(variant)
        if f"{variant}/every" in case.train:
            every_B = case.train[f"{variant}/every"]
            noisy_BT = moa.noisy_response(sample.response_BT, every_B)
            assert torch.equal(noisy_BT, sample.noisy_BT), variant
        sa_mask, ca_mask = moa.draft_masks(sample.noisy_BT, sample.staircase_B)
        recorded = case.train[f"{variant}/sa_mask"].expand_as(sa_mask)  # one for all rows, or each
        assert torch.equal(sa_mask, recorded), variant
        assert torch.equal(ca_mask, case.train[f"{variant}/ca_mask"]), variant


@recorded_in("train.npz")
def test_draft_forward_and_losses(folder):
    case = case_at(folder)
    for variant in case.variants:
        out, losses = learn.evaluate(case.drafter(), case.sample(variant))
        ours = {"sa_out": out.sa_BTD, "ca_out": out.ca_BTD, "logits": out.logits_BTV}
        if case.num_reused:
            ours |= {"tli_in": out.tli_in_BTD, "tli_out": out.tli_out_BTD}
            ours |= {"feature": out.feature_BTD}
        for name, value in ours.items():
            recorded = case.train[f"{variant}/{name}"]
            assert_close(value[case.real_BT], recorded[case.real_BT], f"{variant}/{name}")
        for name, value in losses._asdict().items():
            if name != "prev_feature_loss" or case.num_reused:
                assert_value(value, case.train[f"{variant}/{name}"], f"{variant}/{name}")


# ---- without recorded cases ---------------------------------------------------------------


@pytest.mark.parametrize(("family", "extra"), TARGETS)
def test_blocks_are_the_layers_of_transformers(family, extra):
    config, model = random_pair.random_target(family, seed=0, **extra)
    draft = random_pair.random_drafter(config, random_pair.draft_sizes(config), seed=1)
    drafter = moa.make_drafter(config, model.state_dict(), draft, config.num_hidden_layers)
    batch = random_pair.random_batch(config.vocab_size, [70, 41], seed=2)
    seen = moa.observe(model, batch.input_ids, batch.attention_mask)
    real_BT = batch.attention_mask == 1
    position_BT = torch.arange(70).expand(2, -1)
    x_BTD = drafter.embed_VD[batch.input_ids]
    for i, layer in enumerate(drafter.reused):
        assert_close(x_BTD[real_BT], seen.hidden_LBTD[i][real_BT], f"input of layer {i}")
        k_BKTE, v_BKTE = blocks.keys_values(layer, x_BTD, position_BT)
        for ours, theirs in ((k_BKTE, seen.key_LBKTE[i]), (v_BKTE, seen.value_LBKTE[i])):
            ours, theirs = (x.transpose(1, 2)[real_BT] for x in (ours, theirs))
            assert_close(ours, theirs, f"cache of layer {i}")
        x_BTD = blocks.self_attend(layer, x_BTD, position_BT, blocks.causal(70, 70))
    x_BTD = blocks.rms_norm(x_BTD, drafter.final_norm_D, config.rms_norm_eps)
    assert_close(x_BTD[real_BT], seen.hidden_LBTD[-1][real_BT], "final norm")
