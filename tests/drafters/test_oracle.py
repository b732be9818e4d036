"""The oracle itself: proven on the authors' recorded numbers, and against transformers."""

import functools
import json

import pytest
import torch

from tests.compare import LOSSES, NORMS, assert_close, assert_norm_close, assert_value
from tests.conftest import golden_cases
from tests.oracle import blocks, decode, learn, moa, random_pair
from tests.oracle.recorded import Case

SAFE_GAP = 1e-5  # drafted tokens whose scores lie closer may come in any order
FAMILIES = list(random_pair.FAMILIES)
TARGETS = [(x, {}) for x in FAMILIES] + [("llama", {"attention_bias": True, "mlp_bias": True})]

case_at = functools.cache(Case)


def recorded_in(file):
    return pytest.mark.parametrize("folder", golden_cases("moa_", file))


# ---- recorded cases: the parts ------------------------------------------------------------


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
def test_draft_frequencies(folder):
    case = case_at(folder)
    drafter = case.drafter()
    for part in ("sa", "ca", "lsa"):
        assert_close(getattr(drafter, part).frequency, case.train[f"inv_freq_{part}"], part)
    for layer in drafter.reused:
        assert_close(layer.frequency, case.train["inv_freq_target"], "target")


@recorded_in("train.npz")
def test_draft_memory(folder):
    case = case_at(folder)
    memory = moa.memory_of(case.drafter(), case.seen.key_LBKTE, case.seen.value_LBKTE)
    names = ("kv_flat", "lsa_out", "lsa_mean", "ekv2e_out")
    for name, ours in zip(names, memory, strict=True):
        assert_close(ours[case.real_BT], case.train[name][case.real_BT], name)


@recorded_in("train.npz")
def test_draft_masks(folder):
    case = case_at(folder)
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


# ---- recorded cases: learning -------------------------------------------------------------


@recorded_in("grads.npz")
def test_draft_gradients(folder):
    case, recorded = case_at(folder), case_at(folder).arrays("grads.npz")
    for variant in {name.split("/")[0] for name in recorded}:
        sample = case.sample(variant)
        ours = learn.gradients(case.config, case.target, case.draft, case.num_reused, sample)
        for name, gradient in ours.items():
            assert_norm_close(gradient, recorded[f"{variant}/{name}"], f"{variant}/{name}")


@recorded_in("steps.npz")
def test_draft_optimiser_steps(folder):
    case, recorded = case_at(folder), case_at(folder).arrays("steps.npz")
    rate, peak = float(recorded["learning_rate"]), float(recorded["peak_lr"])
    warmup, decay = int(recorded["warmup_steps"]), int(recorded["decay_steps"])
    rates = [learn.learning_rate(i, rate, warmup, decay, peak) for i in range(len(recorded["lr"]))]
    assert_close(torch.tensor(rates, dtype=torch.float64), recorded["lr"], "lr", LOSSES)
    steps = list(
        learn.train(
            *(case.config, case.target, case.draft, case.num_reused, case.sample("vfl0_sc0")),
            rates=rates,
            max_grad_norm=float(recorded["max_grad_norm"]),
        )
    )
    for name in ("loss", "forward_KL", "feature_loss"):
        ours = torch.stack([getattr(step.losses, name) for step in steps])
        assert_close(ours, recorded[name], name, NORMS)
    norms = torch.tensor([step.grad_norm for step in steps])
    assert_close(norms, recorded["grad_norm"], "grad_norm", NORMS)
    for key, value in recorded.items():
        if key.startswith("final/"):
            assert_norm_close(steps[-1].draft[key.removeprefix("final/")], value, key)


# ---- recorded cases: decoding -------------------------------------------------------------


def first_answer(response_T):
    """Length of the leading prompt, and the end of the answer that follows it."""
    context = response_T.tolist().index(1)
    return context, (response_T.tolist()[context:] + [0]).index(0) + context


def drafted_logits(drafter, seen, row, tokens_T, context, end):
    """Logits after tokens `context`..`end-1`, drafted one by one behind a verified context.

    An earlier round, with half of the context and a wrong draft, must leave nothing behind.
    """
    drafting, half = decode.Drafting(drafter), context // 2
    key_LBKTE, value_LBKTE = seen.key_LBKTE[:, row, None], seen.value_LBKTE[:, row, None]
    drafting.extend(key_LBKTE[:, :, :, :half], value_LBKTE[:, :, :, :half])
    drafting.feed(tokens_T[None, : half + 1])
    drafting.feed(tokens_T[None, :1])
    drafting.extend(key_LBKTE[:, :, :, half:context], value_LBKTE[:, :, :, half:context])
    logits = [drafting.feed(tokens_T[None, half + 1 : context + 1])]
    logits += [drafting.feed(tokens_T[None, i : i + 1]) for i in range(context + 1, end)]
    return torch.cat(logits)


@recorded_in("train.npz")
def test_draft_with_caches_gives_the_training_logits(folder):
    case, drafter = case_at(folder), case_at(folder).drafter()
    tokens_BT = case.train["input_ids"].long()
    for row, response_T in enumerate(case.train["response_mask"]):
        context, end = first_answer(response_T)
        ours = drafted_logits(drafter, case.seen, row, tokens_BT[row], context, end)
        assert_close(ours, case.train["vfl0_sc0/logits"][row, context:end], f"row {row}")


def chains(case):
    """(name of the setting, tokens drafted a round) of the recorded settings of breadth 1."""
    for name, shape in case.settings["settings"].items():
        if shape["breadth"] == 1:
            yield name, min(shape["depth"] - 1, shape["total_tokens"])


def decode_recorded(case, prompt, num_drafted, extra_stop=()):
    stop = {*case.settings["eos_token_id"], *extra_stop}
    limit = case.settings["max_new_tokens"]
    return decode.decode_chain(case.drafter(), case.model, prompt, num_drafted, limit, stop)


@recorded_in("generate.npz")
def test_draft_rounds(folder):
    case, recorded = case_at(folder), case_at(folder).arrays("generate.npz")
    for p in sorted(x.removesuffix("/prompt") for x in recorded if x.endswith("/prompt")):
        prompt = recorded[f"{p}/prompt"].tolist()
        for setting, num_drafted in chains(case):
            tokens, rounds = decode_recorded(case, prompt, num_drafted)
            assert tokens == recorded[f"{p}/vanilla"].tolist()
            one = f"{p}/{setting}"
            if f"{one}/tokens" not in recorded:  # N > 0: the authors' decoding raises
                continue
            safe = recorded[f"{one}/rounds_min_gap"] > SAFE_GAP
            count = (safe.tolist() + [False]).index(False)
            drafted = [[x.root, *x.drafted] for x in rounds[:count]]
            assert drafted == recorded[f"{one}/rounds_draft_tokens"][:count].tolist()
            for name, ours in {
                "rounds_context_len": [x.context for x in rounds],
                "rounds_accepted_drafts": [x.matched for x in rounds],
                "accept_len": [1 + x.kept for x in rounds],
            }.items():
                assert ours[:count] == recorded[f"{one}/{name}"][:count].tolist(), name
            if safe.all():
                assert len(rounds) == len(safe) == recorded[f"{one}/target_calls"] - 1


@recorded_in("generate.npz")
def test_draft_first_round_in_detail(folder):
    case, recorded = case_at(folder), case_at(folder).arrays("generate.npz")
    for setting, num_drafted in chains(case):
        one = f"p0/{setting}"
        if f"{one}/tokens" not in recorded:
            pytest.skip("no rounds recorded: the authors' decoding raises for N > 0")
        tokens_T = recorded["p0/vanilla"].long()
        drafting, seen = decode.Drafting(case.drafter()), moa.observe(case.model, tokens_T[None])
        contexts = [0, *recorded[f"{one}/rounds_context_len"].tolist()]
        for number in (0, 1):  # the second finds what the first left behind
            fresh = slice(contexts[number], contexts[number + 1])
            drafting.extend(seen.key_LBKTE[:, :, :, fresh], seen.value_LBKTE[:, :, :, fresh])
            for name, ours in zip(("ca_key", "ca_value"), drafting.memory, strict=True):
                assert_close(ours, recorded[f"{one}/r{number}_{name}"], f"r{number}_{name}")
            if number == 0:
                tokens = recorded[f"{one}/r0_draft_tokens"].long()
                fed = torch.cat([tokens_T[: contexts[1]], tokens[:1]])
                for step in range(1, num_drafted + 1):
                    logits = drafting.feed(fed[None])
                    assert_close(logits, recorded[f"{one}/r0_step{step}_logits"], f"step {step}")
                    fed = tokens[step : step + 1]


@recorded_in("generate.npz")
def test_draft_rounds_end_at_a_stop_token(folder):
    case, recorded = case_at(folder), case_at(folder).arrays("generate.npz")
    found = [x.removesuffix("/eos_token") for x in recorded if x.endswith("/eos_token")]
    for setting, num_drafted in chains(case):
        for one in (x for x in found if x.endswith(f"/{setting}")):
            prompt = recorded[f"{one.split('/')[0]}/prompt"].tolist()
            stop = {int(recorded[f"{one}/eos_token"])}
            tokens, rounds = decode_recorded(case, prompt, num_drafted, stop)
            assert tokens == recorded[f"{one}/eos_tokens_out"].tolist()
            assert [1 + x.kept for x in rounds] == recorded[f"{one}/eos_accept_len"].tolist()


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


@pytest.mark.parametrize("num_reused", [0, 1, 3, 5])
@pytest.mark.parametrize("family", FAMILIES)
def test_draft_of_a_random_pair(family, num_reused):
    """Caches give the training logits; rounds give plain decoding's tokens, in fewer rounds."""
    calm = 0.5 if family == "qwen2" else 0.2  # a calm tied head repeats one token for ever
    config, model = random_pair.random_target(family, 3, calm)
    sizes = random_pair.draft_sizes(config, num_reused)
    draft = random_pair.random_drafter(config, sizes, 4, calm)
    drafter = moa.make_drafter(config, model.state_dict(), draft, num_reused)
    tokens_BT, attention_BT, response_BT = random_pair.random_batch(101, [30, 21], seed=5)
    seen = moa.observe(model, tokens_BT, attention_BT)
    nobody_B = torch.zeros(2, dtype=torch.bool)
    out = moa.train_forward(drafter, seen, attention_BT, response_BT, nobody_B)
    for row, tokens_T in enumerate(tokens_BT):
        context, end = first_answer(response_BT[row])
        ours = drafted_logits(drafter, seen, row, tokens_T, context, end)
        assert_close(ours, out.logits_BTV[row, context:end], f"row {row}")
    prompt = tokens_BT[0, :9].tolist()
    tokens, rounds = decode.decode_chain(drafter, model, prompt, 4, 24)
    assert tokens == decode.greedy(model, prompt, 24)
    assert len(rounds) < 23


@pytest.mark.parametrize(("family", "extra"), TARGETS)
def test_a_saved_draft_pair_comes_back(family, extra, tmp_path):
    config, model = random_pair.random_target(family, seed=0, **extra)
    draft = random_pair.random_drafter(config, random_pair.draft_sizes(config), seed=1)
    random_pair.save_pair(tmp_path / "target", tmp_path / "draft", model, draft)
    case = Case(tmp_path)
    tokens_BT = torch.arange(3, 20)[None]
    ours, theirs = (moa.observe(x, tokens_BT) for x in (case.model, model))
    assert torch.equal(ours.hidden_LBTD, theirs.hidden_LBTD)
    assert case.draft.keys() == draft.keys()
    assert all(torch.equal(case.draft[name], draft[name]) for name in draft)
    written = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert written["architectures"] == ["MOASpec"]
    assert written["rope_theta"] == config.rope_parameters["rope_theta"]
    assert "rope_parameters" not in written
    sa = {name.removeprefix("self_attention.") for name in draft if name.startswith("self_att")}
    layer = "model.layers.0."
    assert sa == {x.removeprefix(layer) for x in model.state_dict() if x.startswith(layer)}
